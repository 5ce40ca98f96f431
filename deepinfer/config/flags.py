"""Command line flags made from the table of options, and the way back to engine arguments."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from deepinfer.config.options import AUTO, OPTIONS, Option
from deepinfer.config.values import Kind, parse_text


def path_argument(text: str) -> Path:
    """A path on the command line, for ``type=``; an empty one is refused, as it is for engine options."""
    try:
        path: Path = parse_text(Kind.PATH, text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return path


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Add one flag per option. Texts are kept as they are: :func:`~deepinfer.config.resolve.resolve` parses them."""
    group = parser.add_argument_group("engine options", "see docs/configuration.md")
    for option in OPTIONS:
        if option.kind is Kind.BOOL:
            action = argparse.BooleanOptionalAction  # --chunked-prefill and --no-chunked-prefill
            group.add_argument(option.flag, dest=option.name, action=action, default=None, help=_help(option))
        else:
            group.add_argument(option.flag, dest=option.name, metavar=_metavar(option), help=_help(option))


def engine_arguments(namespace: argparse.Namespace) -> dict[str, Any]:
    """The engine arguments among parsed flags; those that were not given are left out."""
    values = vars(namespace)
    return {option.name: values[option.name] for option in OPTIONS if values.get(option.name) is not None}


def _metavar(option: Option) -> str:
    return "{" + ",".join(option.choices) + "}" if option.choices else (option.unit or option.kind.name).upper()


def _help(option: Option) -> str:
    default = f"auto: {option.rule}" if option.default == AUTO and option.rule else option.default
    text = option.help if default in (None, ()) else f"{option.help} (default: {default})"
    return text.replace("%", "%%")  # argparse formats help texts
