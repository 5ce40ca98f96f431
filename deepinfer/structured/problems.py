"""What can be wrong with a description of structured output, with the place where it is wrong."""

from __future__ import annotations

from deepinfer.errors import RequestError


class SchemaError(RequestError):
    """A schema, pattern or grammar that cannot be enforced as it stands.

    Args:
        path: where: ``$.properties.a.minimum`` for a schema, ``regex`` and a position for a pattern.
        value: what stands there.
    """


class UnsatisfiableError(SchemaError):
    """A part of a schema that no value fits. An alternative like that is dropped; a whole schema is refused."""

    def __init__(self, path: str, value: object, why: str) -> None:
        super().__init__(path, value, why=why, fix="remove one of the conditions")
