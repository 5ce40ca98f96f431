"""Schemas as text and as values: exact numbers, no duplicate keys, bounded size and depth."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

from deepinfer.structured.problems import SchemaError

MAX_SCHEMA_BYTES = 256 * 1024
MAX_SCHEMA_DEPTH = 64

Json = Any
"""None, bool, int, JsonNumber, str, list or dict with string keys."""


class JsonNumber(Decimal):
    """A number with a point, exact; in messages it looks as it does in JSON, also inside a list or an object."""

    def __repr__(self) -> str:
        return str(self)


def parse_schema(text: str, field: str = "schema") -> Json:
    """The value that a schema's text spells; numbers with a point become JsonNumber.

    Raises:
        SchemaError: too long, too deep, no JSON, a duplicate key, or a number that JSON does not have.
    """

    def refuse(value: object, why: str, fix: str) -> SchemaError:
        return SchemaError(field, value, why=why, fix=fix)

    def unique(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
        result = dict(pairs)
        if len(result) < len(pairs):
            names = [name for name, _value in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise refuse(twice, "this key stands twice in one object of the schema", "remove one of them")
        return result

    def constant(name: str) -> Json:
        raise refuse(name, "JSON has no such number", "use a finite number")

    size = len(text.encode("utf-8", "replace"))
    if size > MAX_SCHEMA_BYTES:
        why = f"it has {size} bytes, and at most {MAX_SCHEMA_BYTES} are accepted"
        raise refuse(text, why, "describe less, or in smaller parts")
    try:
        value = json.loads(text, parse_float=JsonNumber, parse_constant=constant, object_pairs_hook=unique)
    except RecursionError as error:
        raise refuse(text, "it is nested too deeply", f"nest at most {MAX_SCHEMA_DEPTH} deep") from error
    except SchemaError:
        raise
    except ValueError as error:
        raise refuse(text, f"it is no JSON ({error})", "correct it") from error
    check_depth(value, field)
    return value


def check_depth(value: Json, field: str) -> None:
    """Raise SchemaError if a value is nested more than :data:`MAX_SCHEMA_DEPTH` deep."""
    level: list[Json] = [value]
    for _depth in range(MAX_SCHEMA_DEPTH + 1):
        level = [
            inner
            for outer in level
            if isinstance(outer, (dict, list))
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return
    why = f"it is nested more than {MAX_SCHEMA_DEPTH} deep"
    raise SchemaError(field, "a deeply nested schema", why=why, fix="use $ref for what repeats")


def schema_text(schema: object) -> str:
    """Compact JSON text of a schema given as text, a mapping or a boolean. The order of keys is kept: it is the order
    in which members are generated.

    Raises:
        SchemaError: it is none of these, or holds something that JSON does not have.
    """
    if isinstance(schema, str):
        return _canonical(schema)
    if not isinstance(schema, (bool, Mapping)):
        raise SchemaError("schema", schema, why="a schema is an object or a boolean", fix="give a dict or JSON text")
    try:
        _require_text_keys(schema)
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False, default=_plain)
    except RecursionError as error:
        why = f"it is nested more than {MAX_SCHEMA_DEPTH} deep"
        raise SchemaError("schema", "a deeply nested schema", why=why, fix="use $ref for what repeats") from error
    except (TypeError, ValueError) as error:
        raise SchemaError("schema", schema, why=f"it can't be written as JSON ({error})", fix="correct it") from error
    return _canonical(text)


def _canonical(text: str) -> str:
    value = parse_schema(text)
    if not isinstance(value, (bool, dict)):
        raise SchemaError("schema", text, why="a schema is an object or a boolean", fix="write an object")
    canonical = to_text(value)
    try:
        canonical.encode("utf-8")
    except UnicodeEncodeError as error:
        why = "half of a surrogate pair is no character"
        raise SchemaError("schema", "text with a surrogate", why=why, fix="remove it") from error
    return canonical


def _require_text_keys(value: object) -> None:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise SchemaError("schema", key, why="keys of a JSON object are text", fix="turn the key into text")
            _require_text_keys(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            _require_text_keys(inner)


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return list(value)
    raise TypeError(f"{type(value).__name__} is no JSON type")


def to_text(value: Json) -> str:
    """Canonical compact text: equal values of equal key order give equal text, numbers keep their digits."""
    match value:
        case None | bool():
            return {None: "null", True: "true", False: "false"}[value]
        case int() | Decimal():
            return str(value)
        case str():
            return json.dumps(value, ensure_ascii=False)
        case list():
            return f"[{','.join(map(to_text, value))}]"
        case dict():
            members = (f"{json.dumps(key, ensure_ascii=False)}:{to_text(inner)}" for key, inner in value.items())
            return f"{{{','.join(members)}}}"
    raise TypeError(f"{type(value).__name__} is no JSON type")


def identity(value: Json) -> object:
    """A hashable stand-in that is equal exactly where JSON Schema calls two values equal (1 and 1.0, but not true)."""
    match value:
        case None | bool():
            return ("constant", value)
        case int() | Decimal():
            return ("number", Decimal(value))
        case list():
            return ("array", tuple(map(identity, value)))
        case dict():
            return ("object", frozenset((key, identity(inner)) for key, inner in value.items()))
    return ("string", value)


def kind_of(value: Json) -> str:
    """JSON Schema type of a value; whole numbers are integers."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case Decimal():
            return "integer" if value == value.to_integral_value() else "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"
