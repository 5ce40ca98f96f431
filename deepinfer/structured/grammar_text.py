"""From the identity of a grammar to the text that the grammar library compiles. Torch-free; runs in the workers."""

from __future__ import annotations

import json
from typing import NamedTuple

from deepinfer.structured.ebnf_text import ROOT, to_ebnf
from deepinfer.structured.json_text import parse_schema
from deepinfer.structured.problems import SchemaError
from deepinfer.structured.regex_parser import regex_term
from deepinfer.structured.schema_grammar import json_rules
from deepinfer.structured.text_tree import choice_of_texts


class GrammarKey(NamedTuple):
    """What makes two grammars the same, in canonical form."""

    kind: str
    """json, regex, ebnf or choice."""
    text: str
    """Schema, pattern, grammar, or the options as a JSON list."""
    option: str = ""
    """json: layout and strictness, as ``bounded strict``; ebnf: the start rule."""


def grammar_text(key: GrammarKey) -> tuple[str, str]:
    """The grammar in the library's notation and its start rule.

    Raises:
        SchemaError: it cannot be enforced, or no text fits it.
    """
    match key.kind:
        case "ebnf":
            return key.text, key.option
        case "json":
            whitespace, strictness = key.option.split()
            rules = json_rules(parse_schema(key.text), whitespace, strictness == "strict")
        case "regex":
            rules = {ROOT: regex_term(key.text, "regex")}
        case "choice":
            rules = {ROOT: choice_of_texts(json.loads(key.text))}
        case _:
            raise AssertionError(f"unknown {key.kind=}")
    text = to_ebnf(rules)
    if text is None:
        raise SchemaError(key.kind, key.text, why="no text fits it", fix="remove a condition, or end the recursion")
    return text, ROOT
