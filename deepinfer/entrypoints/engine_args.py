"""What the commands share: which model to use, and an ``LLM`` from parsed flags."""

from __future__ import annotations

import argparse
from typing import Any

from deepinfer.config.env import read_environment
from deepinfer.config.flags import add_engine_flags, engine_arguments
from deepinfer.config.values import Kind, check_value
from deepinfer.entrypoints.default_model import default_model
from deepinfer.entrypoints.llm import LLM
from deepinfer.errors import ConfigError


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the engine and of operator selection."""
    add_engine_flags(parser)
    parser.add_argument("--ops", default="", metavar="OP=IMPLEMENTATION,...", help="pin operators, as all=reference")


def names_model(namespace: argparse.Namespace) -> bool:
    """Whether the flags or the environment say which model to use."""
    return "model" in engine_arguments(namespace) or "model" in read_environment().options


def model_arguments(namespace: argparse.Namespace) -> dict[str, Any]:
    """Engine arguments from flags; the model is the one of the flags, the environment, or the default model."""
    arguments = engine_arguments(namespace)
    if "model" not in arguments:
        found = read_environment().options.get("model")
        arguments["model"] = default_model() if found is None else found[1]
    try:
        arguments["model"] = check_value(Kind.PATH, arguments["model"])
    except ValueError as error:
        raise ConfigError(
            f"model is {arguments['model']!r}",
            why=str(error),
            fix="give a checkpoint's directory, or leave it out",
        ) from error
    return arguments


def load_llm(namespace: argparse.Namespace, **defaults: Any) -> LLM:
    """The ``LLM`` that the flags describe.

    Args:
        defaults: engine arguments that apply where the flags say nothing; a ``model`` among them is used as it is.
    """
    arguments = engine_arguments(namespace) if "model" in defaults else model_arguments(namespace)
    return LLM(ops=namespace.ops, progress=False, **{**defaults, **arguments})
