"""Every keyword of JSON Schema: enforced, or an annotation, or refused by name. Nothing is passed over in silence.

:func:`check_keywords` looks at each keyword of each subschema alone, in time linear in the schema; what only shows when
keywords meet (an unprovable ``oneOf``, ``pattern`` with ``minLength``) is found when the grammar is built.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from decimal import Decimal

from deepinfer.structured.json_text import Json
from deepinfer.structured.problems import SchemaError
from deepinfer.structured.string_formats import FORMATS

TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")

ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "$comment", "$schema", "deprecated", "readOnly", "writeOnly"}
)
"""Say nothing about which values are valid. Names that start with ``x-`` count too."""

_NOT_REGULAR = "a grammar cannot count or compare what was written before"
REFUSED: dict[str, tuple[str, str]] = {
    "not": ("the complement of a schema has no grammar here", "list what is allowed"),
    "if": ("conditions are not supported", "use anyOf with one alternative per case"),
    "then": ("conditions are not supported", "use anyOf with one alternative per case"),
    "else": ("conditions are not supported", "use anyOf with one alternative per case"),
    "dependentRequired": ("conditions are not supported", "use anyOf with one alternative per case"),
    "dependentSchemas": ("conditions are not supported", "use anyOf with one alternative per case"),
    "dependencies": ("conditions are not supported", "use anyOf with one alternative per case"),
    "contains": (_NOT_REGULAR, "use prefixItems or items"),
    "minContains": (_NOT_REGULAR, "use minItems"),
    "maxContains": (_NOT_REGULAR, "use maxItems"),
    "patternProperties": ("keys cannot be matched with patterns", "use properties or additionalProperties"),
    "propertyNames": ("keys cannot be restricted", "use properties"),
    "unevaluatedProperties": ("it depends on how the value was matched", "use additionalProperties"),
    "unevaluatedItems": ("it depends on how the value was matched", "use items"),
    "additionalItems": ("it belongs to old drafts", "use prefixItems and items"),
    "$id": ("references are resolved within one schema", "remove it and use #/$defs/..."),
    "id": ("it belongs to old drafts", "remove it and use #/$defs/..."),
    "$anchor": ("references are JSON pointers", "use #/$defs/..."),
    "$dynamicRef": ("dynamic references are not supported", "use $ref"),
    "$dynamicAnchor": ("dynamic references are not supported", "use $ref"),
    "$recursiveRef": ("dynamic references are not supported", "use $ref"),
    "$recursiveAnchor": ("dynamic references are not supported", "use $ref"),
    "$vocabulary": ("the vocabulary is fixed", "remove it"),
    "contentEncoding": ("the content of strings is not checked", "use pattern"),
    "contentMediaType": ("the content of strings is not checked", "use pattern"),
    "contentSchema": ("the content of strings is not checked", "use pattern"),
    "nullable": ("it is no JSON Schema", 'use "type": [..., "null"]'),
    "discriminator": ("it is no JSON Schema", "give the property a const in each alternative of oneOf"),
}


def _is_count(value: Json) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_number(value: Json) -> bool:
    return isinstance(value, (int, Decimal)) and not isinstance(value, bool)


def _is_schema(value: Json) -> bool:
    return isinstance(value, (bool, dict))


def _is_schemas(value: Json) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_schema, value))


def _is_schema_map(value: Json) -> bool:
    return isinstance(value, dict) and all(map(_is_schema, value.values()))


def _is_type(value: Json) -> bool:
    names = [value] if isinstance(value, str) else value
    return (
        isinstance(names, list)
        and bool(names)
        and all(name in TYPES for name in names if isinstance(name, str))
        and (all(isinstance(name, str) for name in names))
    )


def _is_names(value: Json) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


_COUNT = (_is_count, "a whole number >= 0")
_NUMBER = (_is_number, "a number")
_SCHEMA = (_is_schema, "a schema: an object or a boolean")
_SCHEMAS = (_is_schemas, "a list of schemas, not empty")
_SCHEMA_MAP = (_is_schema_map, "an object whose values are schemas")
_TEXT = (lambda value: isinstance(value, str), "text")

ENFORCED: dict[str, tuple[Callable[[Json], bool], str]] = {
    "type": (_is_type, f"one of {', '.join(TYPES)}, or a list of them"),
    "enum": (lambda value: isinstance(value, list) and bool(value), "a list of values, not empty"),
    "const": (lambda value: True, "any value"),
    "$ref": (lambda value: isinstance(value, str) and value.startswith("#"), "a JSON pointer such as #/$defs/name"),
    "$defs": _SCHEMA_MAP,
    "definitions": _SCHEMA_MAP,
    "anyOf": _SCHEMAS,
    "oneOf": _SCHEMAS,
    "allOf": _SCHEMAS,
    "properties": _SCHEMA_MAP,
    "required": (_is_names, "a list of property names"),
    "additionalProperties": _SCHEMA,
    "minProperties": _COUNT,
    "maxProperties": _COUNT,
    "items": _SCHEMA,
    "prefixItems": _SCHEMAS,
    "minItems": _COUNT,
    "maxItems": _COUNT,
    "uniqueItems": (lambda value: value is False, f"false: {_NOT_REGULAR}"),
    "minLength": _COUNT,
    "maxLength": _COUNT,
    "pattern": _TEXT,
    "format": (lambda value: value in FORMATS, f"one of those that are enforced: {', '.join(FORMATS)}"),
    "minimum": _NUMBER,
    "maximum": _NUMBER,
    "exclusiveMinimum": _NUMBER,
    "exclusiveMaximum": _NUMBER,
    "multipleOf": (lambda value: _is_count(value) and 1 <= value <= 1000, "a whole number from 1 to 1000"),
}
"""Keyword -> which values of it are enforced, and how to say that."""

_ONE = ("items", "additionalProperties")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_MAPS = ("properties", "$defs", "definitions")


def check_keywords(schema: Json) -> None:
    """Refuse a schema with a keyword that would not be enforced.

    Raises:
        SchemaError: names the keyword by its path from the root ``$``.
    """
    for path, part in subschemas(schema):
        for keyword, value in part.items():
            _check_keyword(f"{path}.{keyword}", keyword, value, path == "$")


def _check_keyword(path: str, keyword: str, value: Json, is_root: bool) -> None:
    if keyword in ANNOTATIONS or keyword.startswith("x-") or (keyword == "$id" and is_root):
        return
    if keyword in REFUSED:
        why, fix = REFUSED[keyword]
        raise SchemaError(path, value, why=why, fix=fix)
    if keyword not in ENFORCED:
        near = difflib.get_close_matches(keyword, [*ENFORCED, *ANNOTATIONS], n=1)
        fix = f"did you mean {near[0]}?" if near else "remove it, or start its name with x- if it is a note"
        raise SchemaError(path, value, why="there is no such keyword", fix=fix)
    fits, wanted = ENFORCED[keyword]
    if not fits(value):
        raise SchemaError(path, value, why=f"it has to be {wanted}", fix="change or remove it")


def subschemas(schema: Json, path: str = "$") -> Iterator[tuple[str, dict[str, Json]]]:
    """Every subschema that is an object, with its path, outer ones first."""
    if not isinstance(schema, dict):
        return
    yield path, schema
    for keyword in _ONE:
        yield from subschemas(schema.get(keyword), f"{path}.{keyword}")
    for keyword in _LISTS:
        listed = schema.get(keyword)
        for index, inner in enumerate(listed if isinstance(listed, list) else ()):
            yield from subschemas(inner, f"{path}.{keyword}[{index}]")
    for keyword in _MAPS:
        named = schema.get(keyword)
        for name, inner in (named if isinstance(named, dict) else {}).items():
            yield from subschemas(inner, f"{path}.{keyword}.{name}")
