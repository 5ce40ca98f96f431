"""What cannot be enforced is refused, and the message names the place."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import pytest

from deepinfer.errors import RequestError
from deepinfer.structured.grammar_text import GrammarKey, grammar_text
from deepinfer.structured.json_keywords import ENFORCED, REFUSED
from deepinfer.structured.spec import Choice, Ebnf, JsonSchema, Regex, StructuredSpec, from_so_args


@pytest.mark.parametrize("keyword", sorted(REFUSED))
def test_refused_keyword_is_named_with_its_path(keyword: str) -> None:
    schema = {"type": "object", "properties": {"a": {"items": {keyword: {}}}}}
    with pytest.raises(RequestError) as caught:
        JsonSchema(schema)
    assert caught.value.field == f"$.properties.a.items.{keyword}"
    assert caught.value.fix


# One value of each enforced keyword that is not accepted.
WRONG_VALUES: dict[str, Any] = {
    "type": "text",
    "enum": [],
    "$ref": "http://example.com/schema",
    "$defs": [],
    "definitions": {"a": 1},
    "anyOf": [],
    "oneOf": {},
    "allOf": [1],
    "properties": {"a": 1},
    "required": "a",
    "additionalProperties": "no",
    "minProperties": -1,
    "maxProperties": 1.5,
    "items": [{"type": "null"}],
    "prefixItems": {},
    "minItems": "1",
    "maxItems": True,
    "uniqueItems": True,
    "minLength": -1,
    "maxLength": None,
    "pattern": 5,
    "format": "uri",
    "minimum": "0",
    "maximum": True,
    "exclusiveMinimum": True,
    "exclusiveMaximum": "x",
    "multipleOf": 0.01,
}


@pytest.mark.parametrize("keyword", sorted(WRONG_VALUES))
def test_value_that_is_not_enforced_is_refused(keyword: str) -> None:
    with pytest.raises(RequestError) as caught:
        JsonSchema({"anyOf": [{}, {keyword: WRONG_VALUES[keyword]}]})
    assert caught.value.field == f"$.anyOf[1].{keyword}"


def test_every_enforced_keyword_has_a_wrong_value_here() -> None:
    assert set(ENFORCED) - {"const"} == set(WRONG_VALUES)


def test_unknown_keyword_is_refused_with_a_suggestion() -> None:
    with pytest.raises(RequestError, match="Did you mean minLength"):
        JsonSchema({"minLenght": 3})
    with pytest.raises(RequestError, match="x-"):
        JsonSchema({"orderly": 3})


# Keywords that only together can't be enforced: found when the grammar is built, with the path.
COMBINATIONS: dict[str, tuple[Any, str]] = {
    "pattern and length": ({"type": "string", "pattern": "^a+$", "minLength": 2}, "$.minLength"),
    "pattern and format": ({"type": "string", "pattern": "^a+$", "format": "date"}, "$.format"),
    "multiples in a range": ({"type": "integer", "multipleOf": 3, "minimum": 1}, "$.multipleOf"),
    "overlapping oneOf": ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "$.oneOf"),
    "overlapping objects in oneOf": (
        {"oneOf": [{"type": "object", "properties": {"a": {}}}, {"type": "object", "properties": {"b": {}}}]},
        "$.oneOf",
    ),
    "enum beside a bound": ({"enum": [1, 2], "minimum": 2}, "$.minimum"),
    "free keys counted": ({"type": "object", "minProperties": 2}, "$.minProperties"),
    "two patterns": ({"allOf": [{"pattern": "a"}, {"pattern": "b"}], "type": "string"}, "$.pattern"),
    "two items": ({"allOf": [{"items": {"const": 1}}, {"items": {"const": 2}}], "type": "array"}, "$.items"),
    "closed against open": (
        {
            "type": "object",
            "allOf": [{"properties": {"a": {}}, "additionalProperties": False}, {"properties": {"b": {}}}],
        },
        "$.additionalProperties",
    ),
    "missing reference": ({"$ref": "#/$defs/gone"}, "$.$ref"),
    "circular reference": ({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, "$"),
    "bad pattern": ({"properties": {"a": {"type": "string", "pattern": "(?=a)"}}}, "$.properties.a.pattern"),
}


@pytest.mark.parametrize("name", COMBINATIONS)
def test_combination_that_cannot_be_enforced_is_refused_by_path(name: str) -> None:
    schema, field = COMBINATIONS[name]
    spec = JsonSchema(schema)
    with pytest.raises(RequestError) as caught:
        grammar_text(spec.grammar_key)
    assert caught.value.field == field, str(caught.value)


@pytest.mark.parametrize(
    "schema",
    [
        False,
        {"type": "integer", "minimum": 3, "maximum": 2},
        {"type": "integer", "minimum": 3.2, "maximum": 3.8},
        {"type": "number", "exclusiveMinimum": 1, "maximum": 1},
        {"type": "string", "minLength": 3, "maxLength": 2},
        {"type": "array", "minItems": 2, "maxItems": 1},
        {"type": "array", "items": False, "minItems": 1},
        {"type": "object", "properties": {"a": False}, "required": ["a"]},
        {"type": "object", "additionalProperties": False, "required": ["a"]},
        {"type": "object", "properties": {"a": {}}, "required": ["a"], "maxProperties": 0},
        {"enum": [1, 2], "type": "string"},
        {"allOf": [{"type": "string"}, {"type": "integer"}]},
        {"const": 1, "enum": [2]},
        {"anyOf": [False, {"type": "string", "minLength": 1, "maxLength": 0}]},
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
    ],
    ids=str,
)
def test_schema_that_no_value_fits_is_refused(schema: Any) -> None:
    with pytest.raises(RequestError):
        grammar_text(JsonSchema(schema).grammar_key)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ('{"a":1,"a":2}', "twice"),
        ('{"minimum":NaN}', "no such number"),
        ("{", "no JSON"),
        ("[1]", "schema"),
        ({"minimum": float("inf")}, "JSON"),
        ({"const": {1, 2}}, "JSON"),
        ({"const": {1: 2}}, "text"),
        ({"const": "\ud800"}, "surrogate"),
        (5, "boolean"),
        ('{"enum":["' + "x" * 300_000 + '"]}', "bytes"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_text_that_is_no_schema(schema: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        JsonSchema(schema)


@pytest.mark.parametrize("depth", [70, 5_000, 200_000])
def test_deep_nesting_is_refused_at_once(depth: int) -> None:
    with pytest.raises(RequestError, match=r"deep|bytes"):
        JsonSchema('{"items":' * depth + "{}" + "}" * depth)
    nested: dict[str, Any] = {}
    for _level in range(min(depth, 5_000)):
        nested = {"items": nested}
    with pytest.raises(RequestError, match="deep"):
        JsonSchema(nested)


@pytest.mark.parametrize(
    "pattern",
    [
        "(a",
        "a)",
        "[a",
        "[]",
        "*a",
        "a**",
        "a{3,2}",
        "a{999999999999}",
        "a++",
        "(?=a)b",
        "(?<!a)b",
        "(?i)a",
        r"(a)\1",
        r"\bword\b",
        r"\p{L}",
        r"\ud800",
        "\\",
        "a^b",
        "a$b",
        "(^a)",
        "[z-a]",
        r"[\d-z]",
        "[[:alpha:]]",
        r"\x4",
        r"\07",
        "(" * 200 + "a" + ")" * 200,
    ],
)
def test_pattern_that_is_not_supported_is_refused(pattern: str) -> None:
    with pytest.raises(RequestError, match="character"):
        Regex(pattern)


def test_other_descriptions_are_checked() -> None:
    with pytest.raises(RequestError, match="nothing to choose"):
        Choice([])
    with pytest.raises(RequestError, match="empty"):
        Choice(["a", ""])
    with pytest.raises(TypeError):
        Choice("ab")
    with pytest.raises(TypeError):
        Regex(5)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="no rule of this name"):
        Ebnf('start ::= "a"')
    with pytest.raises(RequestError, match="no such choice"):
        JsonSchema({}, whitespace="none")  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="trigger"):
        Regex("a", bound_token_id=3)
    with pytest.raises(RequestError):
        Regex("a", trigger_token_ids=[-1])
    with pytest.raises(TypeError):
        Regex("a", after_reasoning=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        StructuredSpec()


def test_equal_descriptions_are_equal_and_hashable() -> None:
    first = JsonSchema({"type": "integer", "minimum": 1})
    second = JsonSchema(' {"type": "integer",  "minimum": 1}')
    assert first == second
    assert len({first, second}) == 1
    assert first.grammar_key == JsonSchema(first.schema, trigger_token_ids=[1, 2]).grammar_key
    assert first != JsonSchema(first.schema, trigger_token_ids=[1, 2])
    assert first.grammar_key != JsonSchema(first.schema, whitespace="compact").grammar_key
    assert JsonSchema({"const": 0.1}).schema == '{"const":0.1}'
    assert Decimal("0.1") == json.loads(str(JsonSchema({"const": 0.1}).schema), parse_float=Decimal)["const"]
    assert Choice(["a", "b", "a"]) == Choice(("a", "b"))


def test_so_args_become_descriptions() -> None:
    timing = {"trigger_token_ids": [5, 6], "bound_token_id": 0}
    spec = from_so_args({"schema_type": "json", "schema": '{"type":"null"}', **timing})
    assert spec == JsonSchema({"type": "null"}, trigger_token_ids=(5, 6), bound_token_id=0)
    assert from_so_args({"schema_type": "regex", "schema": "a+"}) == Regex("a+")
    grammar = 'root ::= "a"'
    assert from_so_args({"schema_type": "ebnf", "schema": grammar}).grammar_key == GrammarKey("ebnf", grammar, "root")
    for bad in (
        {"schema_type": "xml", "schema": ""},
        {"schema_type": "json"},
        {"schema_type": "json", "schema": "{}", "serialized": ""},
        {"schema_type": "json", "schema": "{}", "bound_token_ids": [1]},
        {"schema_type": "json", "schema": "{}", "bound_token_id": 1},
        {"schema_type": "json", "schema": '{"not":{}}'},
    ):
        with pytest.raises(ValueError):
            from_so_args(bad)


@pytest.mark.parametrize("value", ["0.5", "[0.5]", '{"a":[0.5,1.25]}'])
def test_numbers_in_a_message_look_as_in_the_schema(value: str) -> None:
    with pytest.raises(RequestError) as caught:
        JsonSchema('{"type": "integer", "multipleOf": ' + value + "}")
    assert "Decimal" not in str(caught.value)
    assert "0.5" in str(caught.value)
