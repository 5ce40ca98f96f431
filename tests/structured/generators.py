"""Random schemas and patterns, within what is enforced."""

from __future__ import annotations

import random
from typing import Any

_KINDS = ("object", "array", "string", "integer", "number", "boolean", "null", "enum", "anyOf", "const", "types", "map")
_NAMES = ("a", "ab", "b", "name", "é", 'q"', "x y")
_PATTERNS = ("^[a-z]{2,4}$", "[0-9]+", "^(foo|bar)-[0-9]{1,3}$", "^a", "z$", '^"?\\\\?[^"]$', "^[^a-z]{1,3}$", "a.b")
_FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "hostname", "email")
_ENUM = ("red", 'q"\\\n', "é中😀", 0, -7, 1.5, None, True, [1, [2]], {"k": "v", "n": {"m": 1}}, 10**25)


def random_schema(rng: random.Random, depth: int = 0) -> Any:
    kinds = _KINDS if depth < 3 else _KINDS[2:7]
    match rng.choice(kinds):
        case "object":
            return _object(rng, depth)
        case "array":
            return _array(rng, depth)
        case "string":
            return _string(rng)
        case "integer":
            return {
                "type": "integer",
                **(_bounds(rng, whole=True) if rng.random() < 0.8 else {"multipleOf": rng.choice((2, 3, 7, 10))}),
            }
        case "number":
            return {"type": "number", **_bounds(rng, whole=False)}
        case "enum":
            return {"enum": rng.sample(_ENUM, rng.randint(1, 4))}
        case "const":
            return {"const": rng.choice(_ENUM)}
        case "anyOf":
            return {"anyOf": [random_schema(rng, depth + 1) for _ in range(rng.randint(1, 3))]}
        case "types":
            return {"type": rng.sample(["string", "null", "integer", "boolean"], 2), "minLength": 1, "maximum": 50}
        case "map":
            extra = {"minProperties": 1} if rng.random() < 0.5 else {"maxProperties": rng.randint(0, 3)}
            return {"type": "object", "additionalProperties": random_schema(rng, depth + 1), **extra}
        case kind:
            return {"type": kind}


def _object(rng: random.Random, depth: int) -> Any:
    names = rng.sample(_NAMES, rng.randint(0, 4))
    schema: dict[str, Any] = {"type": "object"}
    if names or rng.random() < 0.5:
        schema["properties"] = {name: random_schema(rng, depth + 1) for name in names}
    required = [name for name in names if rng.random() < 0.5]
    if required or rng.random() < 0.3:
        schema["required"] = required + (["extra"] if rng.random() < 0.2 else [])
    if "extra" not in schema.get("required", ()) and rng.random() < 0.5:
        schema["additionalProperties"] = False if rng.random() < 0.5 else random_schema(rng, depth + 2)
    if len(names) >= 2 and rng.random() < 0.3:
        schema["maxProperties"] = max(len(schema.get("required", ())), rng.randint(1, 3))
    return schema


def _array(rng: random.Random, depth: int) -> Any:
    schema: dict[str, Any] = {"type": "array", "items": random_schema(rng, depth + 1)}
    if rng.random() < 0.3:
        schema["prefixItems"] = [random_schema(rng, depth + 1) for _ in range(rng.randint(1, 2))]
        if rng.random() < 0.3:
            del schema["items"]
            return schema
    low = rng.randint(0, 3)
    if rng.random() < 0.6:
        schema["minItems"] = low
    if rng.random() < 0.6:
        schema["maxItems"] = low + rng.randint(0, 3)
    return schema


def _string(rng: random.Random) -> Any:
    match rng.randint(0, 4):
        case 0:
            return {"type": "string", "pattern": rng.choice(_PATTERNS)}
        case 1:
            return {"type": "string", "format": rng.choice(_FORMATS)}
        case 2:
            low = rng.randint(0, 4)
            return {"type": "string", "minLength": low, "maxLength": low + rng.randint(0, 4)}
        case 3:
            return {"type": "string", "minLength": rng.randint(0, 5)}
    return {"type": "string"}


def _bounds(rng: random.Random, whole: bool) -> dict[str, Any]:
    low = rng.randint(-200, 200) if whole else round(rng.uniform(-20, 20), rng.randint(0, 3))
    schema: dict[str, Any] = {}
    if rng.random() < 0.6:
        schema[rng.choice(("minimum", "exclusiveMinimum"))] = low
    if rng.random() < 0.6:
        gap = rng.randint(2, 300) if whole else round(rng.uniform(0.5, 30), rng.randint(1, 3))
        schema[rng.choice(("maximum", "exclusiveMaximum"))] = round(low + gap, 3)
    return schema


def random_pattern(rng: random.Random, depth: int = 0) -> str:
    """A pattern that means the same to Python's ``re`` (whose classes know more digits and letters) on our output."""
    parts = [_piece(rng, depth) for _ in range(rng.randint(1, 3))]
    pattern = "".join(parts)
    if depth < 2 and rng.random() < 0.3:
        pattern += "|" + random_pattern(rng, depth + 1)
    return pattern


def _piece(rng: random.Random, depth: int) -> str:
    atoms = [
        "a",
        "b",
        "Z",
        "0",
        "é",
        "中",
        "😀",
        r"\.",
        r"\d",
        r"\w",
        r"\s",
        "[a-f]",
        "[^a-z]",
        r"[\d_-]",
        ".",
        "-",
        r"\x41",
        r"\u00e9",
        r"\n",
        "{",
        " ",
    ]
    atom = rng.choice(atoms)
    if depth < 2 and rng.random() < 0.25:
        group = rng.choice(("(", "(?:", f"(?P<g{rng.randrange(10**6)}>"))
        # Counted rather than starred: Python's matcher takes exponential time for stars within stars.
        return f"{group}{random_pattern(rng, depth + 1)})" + rng.choice(("", "", "?", "{2}", "{1,3}"))
    return atom + rng.choice(("", "", "", "?", "*", "+", "{2}", "{1,3}", "{0,2}", "{2,}", "*?", "+?"))
