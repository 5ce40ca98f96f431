"""Command line flags made from the fields of :class:`SamplingParams`, and the way back to parameters."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import inspect
import json
from collections.abc import Callable
from typing import Any

from deepinfer.config.engine import SamplingConfig
from deepinfer.sampling.params import SamplingParams

_DEST = "sampling_"
_NOT_FLAGS = ("eos_id", "structured")  # the model decides; an object of Python (so_args is its flag)


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """Add one flag per field; its help is the field's docstring."""
    group = parser.add_argument_group("sampling", "see docs/sampling.md")
    for field in dataclasses.fields(SamplingParams):
        if field.name in _NOT_FLAGS:
            continue
        flag, dest = "--" + field.name.replace("_", "-"), _DEST + field.name
        text = f"{_field_docs()[field.name]} (default: {field.default})".replace("%", "%%")
        common: dict[str, Any] = {"dest": dest, "default": None, "help": text}
        match field.type:
            case "bool":
                group.add_argument(flag, action=argparse.BooleanOptionalAction, **common)
            case "str | Sequence[str] | None":
                group.add_argument(flag, action="append", metavar="TEXT", **common)
            case kind:
                convert, metavar = _CONVERTERS[str(kind)]
                group.add_argument(flag, type=convert, metavar=metavar, **common)


def sampling_params(namespace: argparse.Namespace, engine_defaults: SamplingConfig, **defaults: Any) -> SamplingParams:
    """Parameters from parsed flags.

    Args:
        engine_defaults: temperature, top_p, top_k and max_tokens where no flag is given.
        defaults: values of the command, which beat those of the engine.
    Raises:
        RequestError: a value is out of range.
    """
    base = {
        "temperature": engine_defaults.temperature,
        "top_p": engine_defaults.top_p,
        "top_k": engine_defaults.top_k,
        "max_tokens": engine_defaults.max_tokens,
        **defaults,
    }
    given = {
        name.removeprefix(_DEST): value
        for name, value in vars(namespace).items()
        if name.startswith(_DEST) and value is not None
    }
    return SamplingParams.from_dict({**base, **given})


def _switch_or_int(text: str) -> bool | int:
    return {"true": True, "false": False}[text.lower()] if text.lower() in ("true", "false") else int(text)


def _ids(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _biases(text: str) -> dict[int, float]:
    return {int(token): float(bias) for token, bias in (pair.split("=") for pair in text.split(","))}


def _object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("it has to be a JSON object")
    return value


# argparse names the function in its message: "invalid token ids value: 'x'".
_ids.__name__, _biases.__name__, _object.__name__ = "token ids", "ID=BIAS,...", "JSON object"
_switch_or_int.__name__ = "true, false or number"

_CONVERTERS: dict[str, tuple[Callable[[str], Any], str]] = {
    "float": (float, "NUMBER"),
    "int": (int, "NUMBER"),
    "int | None": (int, "NUMBER"),
    "bool | int | None": (_switch_or_int, "K"),
    "Sequence[int] | None": (_ids, "ID,ID,..."),
    "Mapping[int, float] | None": (_biases, "ID=BIAS,..."),
    "Mapping[str, Any] | None": (_object, "JSON"),
    "Literal['processed', 'raw']": (str, "{processed,raw}"),
    'Literal["processed", "raw"]': (str, "{processed,raw}"),
}


@functools.cache
def _field_docs() -> dict[str, str]:
    """The string below each field of the class: Python keeps it in the source only."""
    body = ast.parse(inspect.cleandoc(inspect.getsource(SamplingParams))).body[0]
    assert isinstance(body, ast.ClassDef)
    docs = {}
    for field, below in zip(body.body, body.body[1:], strict=False):
        is_doc = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and is_doc:
            docs[field.target.id] = " ".join(str(below.value.value).split())  # type: ignore[attr-defined]
    return docs
