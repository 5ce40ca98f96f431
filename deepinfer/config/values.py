"""Typed values from text: one parser per kind, shared by variables, engine arguments and the command line."""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Iterable
from enum import Enum
from pathlib import Path
from typing import Any

FLOAT32_MAX = (2 - 2**-23) * 2.0**127
"""Largest finite float32, about 3.4e38: logits and what is done to them are float32."""


class Kind(Enum):
    """Type of an option or variable; the value is how the documentation writes it."""

    BOOL = "bool"
    INT = "int"
    FLOAT = "float"
    STR = "text"
    PATH = "path"
    FLOATS = "number or comma list"
    ID_RANGES = "ids and ranges, as 5,10-12"


def parse_text(kind: Kind, text: str) -> Any:
    """The value that ``text`` spells.

    Returns:
        bool, int, float, str, Path, ``tuple[float, ...]`` or, for ``ID_RANGES``, ``((first, last), ...)`` inclusive.
    Raises:
        ValueError: the text does not fit; the message says what would.
    """
    text = text.strip()
    match kind:
        case Kind.BOOL:
            return _parse_bool(text)
        case Kind.INT:
            return _number(int, text, "a whole number")
        case Kind.FLOAT:
            return _number(float, text, "a number")
        case Kind.FLOATS:
            return tuple(
                _number(float, part, "a number, or numbers with commas between them") for part in text.split(",")
            )
        case Kind.ID_RANGES:
            return tuple(_parse_range(part.strip()) for part in text.split(","))
        case Kind.PATH:
            if not text:  # would be the working directory
                raise ValueError("the path is empty")
            return Path(text).expanduser()
        case Kind.STR:
            return text


def _parse_bool(text: str) -> bool:
    # These four are false and everything else is true for the engine whose variable names we share. A word such as
    # "no" would therefore turn a feature on there: refuse it instead.
    if text in ("", "0", "false", "False"):
        return False
    if text in ("1", "true", "True"):
        return True
    raise ValueError("it has to be 1 or true, 0 or false")


def _number(convert: type[int] | type[float], text: str, wanted: str) -> Any:
    try:
        number = convert(text)
    except ValueError as error:
        raise ValueError(f"it has to be {wanted}") from error
    if not math.isfinite(number):
        raise ValueError(f"it has to be {wanted}, and finite")
    return number


def _parse_range(text: str) -> tuple[int, int]:
    first, dash, last = text.partition("-")
    if not first.isdecimal() or (dash and not last.isdecimal()):
        raise ValueError("it has to be ids and ranges with commas between them, as 5,10-12")
    start, end = int(first), int(last) if dash else int(first)
    if end < start:
        raise ValueError(f"the range {text} ends before it starts")
    return start, end


def check_value(kind: Kind, value: Any) -> Any:
    """A value given by a program, in the type of ``kind``; text is parsed, as it may come from a command line.

    Raises:
        ValueError: the value is of another type.
    """
    if isinstance(value, str):
        return parse_text(kind, value)
    match kind:
        case Kind.BOOL if isinstance(value, bool):
            return value
        case Kind.INT if isinstance(value, int) and not isinstance(value, bool):
            return value
        case Kind.FLOAT if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
        case Kind.PATH if isinstance(value, os.PathLike):
            return Path(value).expanduser()
        case Kind.ID_RANGES if isinstance(value, (list, tuple)):
            return tuple(_id_range(item) for item in value)
    raise ValueError(f"it has to be of type {kind.value}")


def _id_range(item: Any) -> tuple[int, int]:
    """One entry of a list: an id, or a pair (first, last)."""
    pair = (item, item) if isinstance(item, int) else item
    well_formed = isinstance(pair, (list, tuple)) and len(pair) == 2 and all(type(end) is int for end in pair)
    if not well_formed or not 0 <= pair[0] <= pair[1]:
        raise ValueError("it has to be a list of ids >= 0 and of pairs (first, last)")
    return pair[0], pair[1]


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is most like ``name``, or None when none comes close."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return found[0] if found else None
