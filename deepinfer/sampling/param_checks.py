"""Checks of single request parameters. Each returns the value in its canonical form or raises a ``RequestError``.

Torch-free, so that a door can check a request before anything heavy is imported.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Iterable, Mapping
from numbers import Integral, Real

from deepinfer.errors import RequestError

INT32_MAX = 2**31 - 1


class RequestTypeError(RequestError, TypeError):
    """A request value of a type that cannot mean anything, or a parameter name that does not exist."""


def check_bool(field: str, value: object) -> bool:
    """``value`` as a bool. 0 and 1 do not pass: they usually mean that two parameters were swapped."""
    if not isinstance(value, bool):
        raise RequestTypeError(field, value, why="it has to be a bool", fix="give True or False")
    return value


def check_int(field: str, value: object, low: int, high: int = INT32_MAX) -> int:
    """``value`` as an int in ``[low, high]``; NumPy integers pass, bools and floats do not."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise RequestTypeError(field, value, why="it has to be an integer", fix=f"give one in [{low}, {high}]")
    number = int(value)
    if not low <= number <= high:
        raise RequestError(field, value, why=f"it has to lie in [{low}, {high}]", fix="choose a value in that range")
    return number


def check_number(field: str, value: object, low: float, high: float = math.inf, *, above_low: bool = False) -> float:
    """``value`` as a finite float in ``[low, high]``, or in ``(low, high]`` with ``above_low``."""
    span = f"{'(' if above_low else '['}{low:g}, {high:g}{')' if math.isinf(high) else ']'}"
    if isinstance(value, bool) or not isinstance(value, Real):
        raise RequestTypeError(field, value, why="it has to be a number", fix=f"give one in {span}")
    try:
        number = float(value)
    except OverflowError:  # an int beyond the range of floats
        number = math.inf
    inside = low < number <= high if above_low else low <= number <= high
    if not (inside and math.isfinite(number)):  # NaN is inside nothing
        raise RequestError(
            field, value, why=f"it has to be a finite number in {span}", fix="choose a value in that range"
        )
    return number


def check_token_ids(field: str, value: object, *, low: int = 0) -> tuple[int, ...]:
    """``value`` as a tuple of ids in ``[low, 2**31)``. The upper end is the vocabulary's, checked at submission."""
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise RequestTypeError(field, value, why="it has to be a list of token ids", fix="give a list of integers")
    return tuple(check_int(f"{field}[{index}]", item, low) for index, item in enumerate(value))


def check_below_vocab(field: str, token_ids: Iterable[int], vocab_size: int) -> None:
    """Refuse an id that the model does not have: it would write into a neighbour's row of logits."""
    for token_id in token_ids:
        if token_id >= vocab_size:
            raise RequestError(
                field,
                token_id,
                why=f"the vocabulary has ids 0 to {vocab_size - 1}",
                fix="take the id from this model's tokenizer",
            )


def check_text(field: str, value: object) -> str:
    """``value`` as non-empty text that UTF-8 can carry (half a surrogate pair cannot be matched or sent back)."""
    if not isinstance(value, str):
        raise RequestTypeError(field, value, why="it has to be a string", fix="give text")
    if not value:
        raise RequestError(field, value, why="an empty string matches everywhere", fix="leave it out")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            field, value, why=f"it is no valid Unicode text ({error.reason})", fix="send whole characters"
        ) from error
    return value


def check_stop(value: object) -> tuple[str, ...]:
    """``stop`` as a tuple: one string, a list of strings, or None for none."""
    if value is None:
        return ()
    if isinstance(value, str):
        return (check_text("stop", value),)
    if not isinstance(value, (list, tuple)):
        raise RequestTypeError("stop", value, why="it has to be a string or a list of strings", fix="give a list")
    return tuple(check_text(f"stop[{index}]", item) for index, item in enumerate(value))


def check_logit_bias(value: object) -> dict[int, float] | None:
    """``logit_bias`` as ``{token id: bias}``. JSON has string keys only, so decimal strings pass as ids."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise RequestTypeError(
            "logit_bias", value, why="it has to map token ids to biases", fix="give a dict such as {17: -100.0}"
        )
    biases = {}
    for key, bias in value.items():
        is_decimal = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 12
        token_id = check_int("logit_bias key", int(key) if is_decimal else key, 0)
        biases[token_id] = check_number(f"logit_bias[{token_id}]", bias, -100.0, 100.0)
    return biases


def check_choice(field: str, value: object, choices: Collection[str]) -> str:
    """``value`` if it is one of ``choices``."""
    shown = ", ".join(repr(choice) for choice in choices)
    if not isinstance(value, str):
        raise RequestTypeError(field, value, why="it has to be a string", fix=f"choose from {shown}")
    if value not in choices:
        raise RequestError(field, value, why="there is no such choice", fix=f"choose from {shown}")
    return value


def unknown_name(
    field: str, name: object, known: Collection[str], renamed: Mapping[str, str] | None = None
) -> RequestTypeError:
    """The error for a parameter name that does not exist; suggests the nearest one that does.

    Args:
        field: what the names belong to, for the message.
        name: the name that was given.
        known: all names that exist.
        renamed: names that other engines use, and ours for the same thing.
    """
    text = str(name)
    nearest = (renamed or {}).get(text) or next(iter(difflib.get_close_matches(text, known, n=1, cutoff=0.5)), None)
    fix = f"use {nearest!r} if that is what you meant" if nearest else f"known names: {', '.join(sorted(known))}"
    return RequestTypeError(field, name, why="there is no such parameter", fix=fix)
