"""Which texts each keyword lets through and which not; an independent validator agrees on every one of them."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from deepinfer.structured.spec import JsonSchema
from tests.structured.support import accepts, matcher_for

# name: schema, accepted texts, rejected texts. Whitespace "compact", so that the texts say what matters.
TABLE: dict[str, tuple[Any, list[str], list[str]]] = {
    "required without properties": (
        {"type": "object", "required": ["a"]},
        ['{"a":1}', '{"a":null,"b":2}', '{"a":{"x":[]},"zz":"","ab":true}'],
        ["{}", '{"b":1}', '{"b":1,"A":2}'],
    ),
    "required beside other properties": (
        {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["b"]},
        ['{"b":"x"}', '{"a":1,"b":[]}'],
        ["{}", '{"a":1}', '{"a":"x","b":1}'],
    ),
    "array without items": (
        {"type": "array", "minItems": 2},
        ['[1,"x"]', "[[],{},null]", "[true,false,null,1]"],
        ["[]", "[1]", '["a"]'],
    ),
    "array limits": (
        {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
        ["[true]", "[true,false,true]"],
        ["[]", "[true,true,true,true]", "[1]", "[true,]"],
    ),
    "maxItems zero": ({"type": "array", "maxItems": 0}, ["[]"], ["[1]"]),
    "items false": ({"type": "array", "items": False}, ["[]"], ["[1]", "[[]]"]),
    "prefixItems": (
        {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "items": {"type": "null"}},
        ["[]", "[1]", '[1,"a"]', '[1,"a",null,null]'],
        ['["a"]', "[1,2]", '[1,"a",1]'],
    ),
    "prefixItems with limits": (
        {
            "prefixItems": [{"const": 1}, {"const": 2}],
            "items": {"const": 3},
            "minItems": 1,
            "maxItems": 3,
            "type": "array",
        },
        ["[1]", "[1,2]", "[1,2,3]"],
        ["[]", "[2]", "[1,3]", "[1,2,3,3]"],
    ),
    "additionalProperties false": (
        {"type": "object", "properties": {"a": {}}, "additionalProperties": False},
        ["{}", '{"a":1}'],
        ['{"b":1}', '{"a":1,"b":1}'],
    ),
    "additionalProperties false alone": ({"type": "object", "additionalProperties": False}, ["{}"], ['{"a":1}']),
    "additionalProperties schema": (
        {"type": "object", "properties": {"ab": {"const": 1}}, "additionalProperties": {"type": "string"}},
        ["{}", '{"ab":1}', '{"ab":1,"c":"x"}', '{"a":"x"}', '{"abc":"x","":"y"}', '{"é\\n":""}'],
        ['{"ab":"x"}', '{"c":1}', '{"ab":1,"c":2}'],
    ),
    "map": (
        {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 1, "maxProperties": 2},
        ['{"a":1}', '{"a":1,"b":2}'],
        ["{}", '{"a":1,"b":2,"c":3}', '{"a":"x"}'],
    ),
    "limits on listed members": (
        {
            "type": "object",
            "properties": {"a": {"const": 1}, "b": {"const": 2}, "c": {"const": 3}},
            "additionalProperties": False,
            "minProperties": 2,
            "maxProperties": 2,
        },
        ['{"a":1,"b":2}', '{"a":1,"c":3}', '{"b":2,"c":3}'],
        ["{}", '{"a":1}', '{"a":1,"b":2,"c":3}'],
    ),
    "property false": (
        {"type": "object", "properties": {"a": False, "b": {"const": 1}}, "additionalProperties": True},
        ["{}", '{"b":1}', '{"ab":1}'],
        ['{"a":1}', '{"a":null,"b":1}'],
    ),
    "$ref recursion": (
        {
            "$defs": {
                "node": {
                    "type": "object",
                    "properties": {"v": {"type": "integer"}, "next": {"$ref": "#/$defs/node"}},
                    "required": ["v"],
                }
            },
            "$ref": "#/$defs/node",
        },
        ['{"v":1}', '{"v":1,"next":{"v":2,"next":{"v":3}}}'],
        ["{}", '{"v":1,"next":{}}', '{"v":1,"next":1}'],
    ),
    "$ref to the root": (
        {"type": "array", "items": {"$ref": "#"}, "maxItems": 2},
        ["[]", "[[],[[]]]"],
        ["[1]", "[[],[],[]]"],
    ),
    "$ref with siblings": (
        {"$defs": {"n": {"type": "integer", "minimum": 0}}, "$ref": "#/$defs/n", "maximum": 9, "description": "digit"},
        ["0", "9"],
        ["10", "-1", "1.5"],
    ),
    "$ref with escaped pointer": (
        {"$defs": {"a/b~c d": {"const": 7}}, "$ref": "#/$defs/a~1b~0c%20d"},
        ["7"],
        ["8"],
    ),
    "enum with escapes and unicode": (
        {
            "enum": [
                'a"b',
                "tab\there",
                "é中😀",
                "\x00\x1f",
                "back\\slash",
                "/",
                None,
                True,
                1,
                2.5,
                [1, {"k": []}],
                {"x": "y"},
            ]
        },
        [
            '"a\\"b"',
            '"tab\\there"',
            '"é中😀"',
            '"back\\\\slash"',
            '"/"',
            "null",
            "true",
            "1",
            "2.5",
            '[1,{"k":[]}]',
            '{"x":"y"}',
        ],
        ['"a"', '"tab here"', "false", "2", '{"x":"z"}', "[]"],
    ),
    "enum with type": ({"enum": [1, "a", None, 2.5], "type": ["integer", "null"]}, ["1", "null"], ['"a"', "2.5"]),
    "const null": ({"const": None}, ["null"], ["0", '""', "false"]),
    "const object": ({"const": {"a": [1, 2]}}, ['{"a":[1,2]}'], ["{}", '{"a":[2,1]}']),
    "big integers": (
        {"enum": [123456789012345678901234567890, -98765432109876543210]},
        ["123456789012345678901234567890", "-98765432109876543210"],
        ["123456789012345678901234567891", "98765432109876543210"],
    ),
    "big integer bounds": (
        {"type": "integer", "minimum": 18446744073709551615, "maximum": 18446744073709551617},
        ["18446744073709551615", "18446744073709551617"],
        ["18446744073709551614", "18446744073709551618", "1"],
    ),
    "integer": (
        {"type": "integer"},
        ["0", "-1", "10", "123456789012345678901"],
        ["1.5", "01", "--1", "+1", '"1"', "-"],
    ),
    "integer bounds": (
        {"type": "integer", "minimum": -3, "exclusiveMaximum": 105},
        ["-3", "0", "104", "99", "100"],
        ["-4", "105", "1000", "-10"],
    ),
    "number": ({"type": "number"}, ["0", "-1.5", "1e5", "2.5E-3", "10"], ["01", "1.", ".5", "1e", "NaN", "Infinity"]),
    "number bounds": (
        {"type": "number", "exclusiveMinimum": -1.5, "maximum": 2.25},
        ["-1.4", "-1.49", "0", "2.25", "2.250", "2.2", "1.999"],
        ["-1.5", "-1.50", "2.26", "2.251", "3", "-2"],
    ),
    "integer and number": ({"type": ["integer", "number"], "minimum": 1}, ["1", "1.5"], ["0", "0.5"]),
    "multipleOf": ({"type": "integer", "multipleOf": 7}, ["0", "7", "-14", "105"], ["1", "15", "-8"]),
    "lengths count characters": (
        {"type": "string", "minLength": 2, "maxLength": 3},
        ['"ab"', '"é中😀"', '"\\n\\""', '"\\u00e9x"', '"\\ud83d\\ude00x"'],
        ['"a"', '"abcd"', '"😀"', '"\\ud83d\\ude00"'],
    ),
    "no half surrogates": (
        {"type": "string"},
        ['"\\ud83d\\ude00"', '"\\uD7FF"'],
        ['"\\ud83d"', '"\\ude00"', '"\\ud83dx"'],
    ),
    "no raw control characters": ({"type": "string"}, ['"\\u0001"', '"\x7f"'], ['"\n"', '"\x01"']),
    "pattern with anchors": (
        {"type": "string", "pattern": "^[a-c]+$"},
        ['"a"', '"abc"'],
        ['""', '"d"', '"ab "', '"xa"', '"a\\n"'],
    ),
    "pattern without anchors": (
        {"type": "string", "pattern": "b+"},
        ['"b"', '"abba"', '"\\n\\"b"', '"éb中"'],
        ['""', '"a"', '"B"'],
    ),
    "pattern anchored at one end": (
        {"type": "string", "pattern": "^a|z$"},
        ['"a"', '"abc"', '"xyz"', '"z"'],
        ['"ba"', '"zb"', '""'],
    ),
    "pattern with quotes and backslashes": (
        {"type": "string", "pattern": '^"\\\\.$'},
        ['"\\"\\\\x"', '"\\"\\\\\\""'],
        ['"x"', '"\\"x"', '"\\"\\\\\\n"'],
    ),
    "pattern without type": ({"pattern": "^a$"}, ['"a"', "1", "null", "[]"], ['"b"']),
    "format date": (
        {"type": "string", "format": "date"},
        ['"2024-02-29"', '"1999-12-31"'],
        ['"2023-02-30"', '"2024-13-01"', '"24-01-01"', '"2024-04-31"'],
    ),
    "format uuid": (
        {"type": "string", "format": "uuid"},
        ['"123e4567-e89b-12d3-a456-426614174000"'],
        ['"123e4567"', '"g23e4567-e89b-12d3-a456-426614174000"'],
    ),
    "format ipv4": ({"type": "string", "format": "ipv4"}, ['"10.0.0.255"'], ['"10.0.0.256"', '"10.0.0"', '"01.0.0.1"']),
    "empty schema": (
        {},
        ["{}", "[]", "1", '"x"', "null", "true", '[{"a":[1,{"b":null}]}]', "-1.5e3"],
        ["", "[", "{a:1}", "nul", "[1,]"],
    ),
    "schema true": (True, ["{}", "0", '"x"'], ["", "x"]),
    "type list": ({"type": ["string", "null"]}, ['"x"', "null"], ["1", "[]", "true"]),
    "keyword of another type": ({"type": "string", "minimum": 5}, ['"x"'], ["7"]),
    "anyOf": (
        {"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 1}]},
        ["1", '"x"', '""'],
        ["1.5", '"xy"', "null"],
    ),
    "anyOf with siblings": (
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
        },
        ['{"a":1}', '{"b":1}', '{"a":1,"b":2}'],
        ["{}", '{"a":"x"}'],
    ),
    "anyOf drops what nothing fits": (
        {"anyOf": [False, {"const": 1}, {"type": "string", "enum": [2]}]},
        ["1"],
        ["2", "null"],
    ),
    "oneOf by type": ({"oneOf": [{"type": "integer"}, {"type": "boolean"}]}, ["1", "true"], ["null", '"x"']),
    "oneOf by discriminator": (
        {
            "oneOf": [
                {
                    "type": "object",
                    "properties": {"k": {"const": "a"}, "v": {"type": "integer"}},
                    "required": ["k", "v"],
                },
                {"type": "object", "properties": {"k": {"const": "b"}}, "required": ["k"]},
            ]
        },
        ['{"k":"a","v":1}', '{"k":"b"}'],
        ['{"k":"a"}', '{"k":"c"}', "{}"],
    ),
    "allOf": (
        {
            "allOf": [
                {"type": "object", "properties": {"a": {"minimum": 1}}, "required": ["a"]},
                {"properties": {"a": {"type": "integer", "maximum": 3}, "b": {"type": "null"}}},
            ]
        },
        ['{"a":1}', '{"a":3,"b":null}'],
        ["{}", '{"a":0}', '{"a":4}', '{"a":1.5}', '{"a":1,"b":1}'],
    ),
    "duplicate keys": (
        {"type": "object", "properties": {"a": {}}, "required": ["a"], "additionalProperties": {"type": "null"}},
        ['{"a":1}', '{"a":1,"b":null}'],
        ['{"a":1,"a":null}', '{"a":1,"\\u0061":null}'],
    ),
    "names that need escapes": (
        {"type": "object", "properties": {'q"\n': {"const": 1}}, "required": ['q"\n']},
        ['{"q\\"\\n":1}'],
        ['{"q":1}', "{}"],
    ),
    "annotations": (
        {
            "title": "t",
            "description": "d",
            "default": 5,
            "examples": [1],
            "$comment": "c",
            "x-order": 3,
            "type": "null",
        },
        ["null"],
        ["5", "1"],
    ),
}


@pytest.mark.parametrize("name", TABLE)
def test_texts_of_a_keyword(name: str) -> None:
    schema, accepted, rejected = TABLE[name]
    matcher = matcher_for(JsonSchema(schema, whitespace="compact"))
    for text in accepted:
        assert accepts(matcher, text), f"{text} should fit"
        jsonschema.validate(json.loads(text), schema)
    for text in rejected:
        assert not accepts(matcher, text), f"{text} should not fit"


def test_open_objects_take_other_members_as_the_standard_says() -> None:
    schema = {"type": "object", "properties": {"a": {"const": 1}}}
    strict = matcher_for(JsonSchema(schema, whitespace="compact"))
    standard = matcher_for(JsonSchema(schema, whitespace="compact", strict=False))
    assert not accepts(strict, '{"a":1,"b":2}')
    assert accepts(standard, '{"a":1,"b":2}')
    assert not accepts(standard, '{"a":2}')
    tuple_schema = {"type": "array", "prefixItems": [{"const": 1}]}
    assert not accepts(matcher_for(JsonSchema(tuple_schema)), "[1,2]")
    assert accepts(matcher_for(JsonSchema(tuple_schema, strict=False)), "[1,2]")


@pytest.mark.parametrize(
    ("style", "accepted", "rejected"),
    [
        ("compact", ['{"a":[1,2]}'], ['{"a": [1,2]}', '{"a":[1, 2]}']),
        ("spaced", ['{"a": [1, 2]}'], ['{"a":[1,2]}', '{"a":  [1, 2]}']),
        (
            "bounded",
            ['{"a":[1,2]}', '{"a": [1, 2]}', '{\n  "a": [\n    1,\n    2\n  ]\n}'],
            [
                '{"a":  1}',
                '{"a":\n1}',
                '{\n\n"a":[1,2]}',
                ' {"a":[1,2]}',
                '{"a":[1,2]} ',
                '{"a":[1,' + "\n" + " " * 33 + "2]}",
            ],
        ),
        ("any", ['{"a":[1,2]}', '{\n\n\n\t "a"  :\r[ 1 , 2 ] }'], ['{"a":[1 2]}']),
    ],
)
def test_whitespace_styles(style: str, accepted: list[str], rejected: list[str]) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}}, "required": ["a"]}
    matcher = matcher_for(JsonSchema(schema, whitespace=style))
    assert [accepts(matcher, text) for text in accepted] == [True] * len(accepted)
    assert [accepts(matcher, text) for text in rejected] == [False] * len(rejected)


def test_empty_containers_have_no_whitespace_inside() -> None:
    matcher = matcher_for(JsonSchema({}))
    assert accepts(matcher, "[]")
    assert accepts(matcher, "{}")
    assert not accepts(matcher, "[ ]")
    assert not accepts(matcher, "{ }")
