"""Proofs that no value fits two schemas, which make ``oneOf`` as easy as ``anyOf``."""

from __future__ import annotations

from collections.abc import Iterator

from deepinfer.structured.json_keywords import TYPES
from deepinfer.structured.json_text import Json, identity, kind_of
from deepinfer.structured.problems import UnsatisfiableError
from deepinfer.structured.schema_merge import SchemaMerger, common_types, type_names

_MAX_DEPTH = 4


def are_disjoint(merger: SchemaMerger, left: Json, right: Json, depth: int = 0) -> bool:
    """Whether it is certain that no value fits both schemas; False where it cannot be told.

    Raises:
        SchemaError: as :meth:`SchemaMerger.flatten`.
    """
    try:
        left, right = merger.flatten(left, "$"), merger.flatten(right, "$")
    except UnsatisfiableError:
        return True
    if left is False or right is False:
        return True
    if left is True or right is True or depth > _MAX_DEPTH:
        return False
    for one, other in ((left, right), (right, left)):
        for keyword in ("anyOf", "oneOf"):
            if keyword in one and all(are_disjoint(merger, part, other, depth + 1) for part in one[keyword]):
                return True
    if not common_types(_types(left), _types(right)):
        return True
    if (values := _values(left)) is not None and (others := _values(right)) is not None:
        return not set(map(identity, values)) & set(map(identity, others))
    if common_types(_types(left), _types(right)) != ["object"]:
        return False
    return any(_told_apart(merger, left, right, depth)) or any(_told_apart(merger, right, left, depth))


def _told_apart(merger: SchemaMerger, left: dict[str, Json], right: dict[str, Json], depth: int) -> Iterator[bool]:
    """For each property that ``left`` requires: whether it tells an object of ``left`` from one of ``right``."""
    properties = [side.get("properties", {}) for side in (left, right)]
    for name in left.get("required", ()):
        if name not in properties[1]:
            yield right.get("additionalProperties") is False
        elif name in right.get("required", ()) and name in properties[0]:
            yield are_disjoint(merger, properties[0][name], properties[1][name], depth + 1)


def _types(schema: dict[str, Json]) -> list[str]:
    values = _values(schema)
    return type_names(schema.get("type", list(TYPES))) if values is None else sorted(set(map(kind_of, values)))


def _values(schema: dict[str, Json]) -> list[Json] | None:
    if "const" in schema:
        return [schema["const"]]
    return schema.get("enum")
