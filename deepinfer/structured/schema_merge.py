"""Conjunction of schemas: ``$ref`` and ``allOf`` become one plain schema, or are refused where that is not possible."""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import unquote

from deepinfer.structured.json_keywords import ANNOTATIONS, TYPES
from deepinfer.structured.json_text import Json, identity
from deepinfer.structured.problems import SchemaError, UnsatisfiableError

_DEFINITIONS = {"$defs", "definitions", "$id"}
_MAX_STEPS = 100
_HIGHEST = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties")
_LOWEST = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")
_OBJECT = ("properties", "additionalProperties")
_ARRAY = ("items", "prefixItems")


class SchemaMerger:
    """Resolves references within one schema and merges what has to hold together.

    Args:
        root: the whole schema, whose keywords were checked.
    """

    def __init__(self, root: Json) -> None:
        self.root = root

    def flatten(self, schema: Json, path: str, steps: int = 0) -> Json:
        """A boolean, or an equivalent schema without ``$ref``, ``allOf``, definitions and annotations.

        Raises:
            SchemaError: a reference leads nowhere or in a circle, or two conditions cannot be merged.
            UnsatisfiableError: two conditions exclude each other.
        """
        if isinstance(schema, bool):
            return schema
        if steps > _MAX_STEPS:
            why = "references lead back to it before anything is said"
            raise SchemaError(path, schema, why=why, fix="break the circle")
        plain = {key: value for key, value in schema.items() if not _says_nothing(key)}
        parts: list[Json] = []
        if "$ref" in plain:
            pointer = plain.pop("$ref")
            parts.append(self.flatten(self.lookup(pointer, f"{path}.$ref"), path, steps + 1))
        for index, part in enumerate(plain.pop("allOf", ())):
            parts.append(self.flatten(part, f"{path}.allOf[{index}]", steps + 1))
        merged: Json = plain
        for part in parts:
            merged = self.merge(part, merged, path)
        return merged

    def lookup(self, pointer: str, path: str) -> Json:
        """The subschema that a reference names."""
        place = self.root
        for token in unquote(pointer[1:]).split("/")[1:]:
            name = token.replace("~1", "/").replace("~0", "~")
            if isinstance(place, list) and name.isdecimal() and int(name) < len(place):
                place = place[int(name)]
            elif isinstance(place, dict) and name in place:
                place = place[name]
            else:
                raise SchemaError(path, pointer, why=f"there is no {name!r} at that place", fix="correct the reference")
        if not pointer.startswith("#/") and pointer != "#":
            raise SchemaError(path, pointer, why="it is no JSON pointer", fix="write #/$defs/name")
        if not isinstance(place, (bool, dict)):
            raise SchemaError(path, pointer, why="what it names is no schema", fix="correct the reference")
        return place

    def merge(self, left: Json, right: Json, path: str) -> Json:
        """What holds where both flat schemas hold."""
        if left is False or right is False:
            raise UnsatisfiableError(path, False, "no value fits the schema false")
        if left is True or right is True:
            return left if right is True else right
        _refuse_coupled(left, right, path)
        merged = dict(left)
        for keyword, value in right.items():
            if keyword not in merged:
                merged[keyword] = value
            elif identity(merged[keyword]) != identity(value):
                merged[keyword] = _both(keyword, merged[keyword], value, path)
        return merged


def _says_nothing(keyword: str) -> bool:
    return keyword in ANNOTATIONS or keyword in _DEFINITIONS or keyword.startswith("x-")


def _refuse_coupled(left: dict[str, Json], right: dict[str, Json], path: str) -> None:
    """Refuse keywords whose meaning depends on a neighbour that the other schema has."""
    names = [set(side.get("properties", ())) for side in (left, right)]
    for mine, other, side in ((names[0], names[1], left), (names[1], names[0], right)):
        if side.get("additionalProperties", True) is not True and not other <= mine:
            why = f"another schema that holds here as well has the properties {sorted(other - mine)}"
            raise SchemaError(f"{path}.additionalProperties", side["additionalProperties"], why=why, fix="merge them")
    if any(key in left for key in _ARRAY) and any(key in right for key in _ARRAY):
        arrays = [{key: side[key] for key in _ARRAY if key in side} for side in (left, right)]
        if identity(arrays[0]) != identity(arrays[1]):
            why = "two schemas that hold here both describe items"
            raise SchemaError(f"{path}.items", arrays[1], why=why, fix="merge them")


def _both(keyword: str, left: Json, right: Json, path: str) -> Json:
    """The value of a keyword that says what two different values of it say together."""
    combine: dict[str, Callable[[Json, Json], Json]] = {
        **dict.fromkeys(_HIGHEST, max),
        **dict.fromkeys(_LOWEST, min),
        "required": lambda a, b: [*a, *(name for name in b if name not in a)],
        "additionalProperties": lambda a, b: a if b is True else b if a is True else {"allOf": [a, b]},
        "properties": _both_properties,
        "type": lambda a, b: common_types(a, b),
        "enum": lambda a, b: [value for value in a if identity(value) in set(map(identity, b))],
        "const": lambda a, b: [],
    }
    if keyword not in combine:
        why = f"two different values of {keyword} hold at the same place"
        raise SchemaError(f"{path}.{keyword}", right, why=why, fix="merge them by hand")
    value = combine[keyword](left, right)
    if value == [] and keyword != "required":
        raise UnsatisfiableError(f"{path}.{keyword}", right, f"it excludes {left!r}, which holds as well")
    return value


def _both_properties(left: dict[str, Json], right: dict[str, Json]) -> dict[str, Json]:
    merged = dict(left)
    for name, schema in right.items():
        merged[name] = {"allOf": [merged[name], schema]} if name in merged else schema
    return merged


def type_names(value: Json) -> list[str]:
    return [value] if isinstance(value, str) else list(value)


def common_types(left: Json, right: Json) -> list[str]:
    """Types that two values of ``type`` share; integers are numbers."""
    wide = [
        {*names, *(["integer"] if "number" in names else [])}
        for names in (set(type_names(left)), set(type_names(right)))
    ]
    common = wide[0] & wide[1]
    return [name for name in TYPES if name in common and not (name == "integer" and "number" in common)]
