"""Checks that a value given by a caller is text that can be encoded at all, and the errors that say so."""

from __future__ import annotations

from deepinfer.errors import RequestError


def require_text(value: object, field: str) -> str:
    """Return ``value`` if it is a string of Unicode scalar values.

    A Python string may hold lone surrogates (JSON escapes such as ``"\\ud83d"`` produce them). They have no UTF-8 form,
    and a tokenizer that meets one fails deep inside; so they are refused here, by name.

    Raises:
        RequestError: not a string, or a lone surrogate; names ``field`` and the position of the character.
    """
    if not isinstance(value, str):
        raise refusal(field, value, why=f"it is a {type(value).__name__}, not a string", fix="send a string")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        code = f"U+{ord(value[error.start]):04X}"
        raise RequestError(
            field,
            value,
            why=f"character {error.start} is the lone surrogate {code}, which is not Unicode text",
            fix="send the whole character (both halves of its surrogate pair) or leave it out",
        ) from error
    return value


def refusal(field: str, value: object, *, why: str, fix: str) -> RequestError:
    """A :class:`RequestError` about a value from parsed JSON, which may be nested too deeply for ``repr``."""
    try:
        repr(value)
    except RecursionError:
        value = f"a {type(value).__name__} nested too deeply to show"
    return RequestError(field, value, why=why, fix=fix)
