"""What a caller asks for: a language that the output has to be in. Immutable, hashable, checked on construction."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deepinfer.sampling.param_checks import RequestTypeError, check_choice, check_token_ids
from deepinfer.sampling.so_args import check_so_args
from deepinfer.structured.grammar_text import GrammarKey
from deepinfer.structured.json_keywords import check_keywords
from deepinfer.structured.json_text import MAX_SCHEMA_BYTES, parse_schema, schema_text
from deepinfer.structured.problems import SchemaError
from deepinfer.structured.regex_parser import regex_term
from deepinfer.structured.whitespace import LAYOUTS, Whitespace

END_OF_REASONING = "</think>"
"""The mark that ends reasoning, where ``after_reasoning`` is True."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredSpec:
    """Base of all descriptions: when the grammar starts. Without any of these it starts with the first token."""

    trigger_token_ids: Sequence[int] = ()
    """The grammar starts after exactly these ids in a row; stored as a tuple."""
    bound_token_id: int | None = None
    """Once this token is generated, the ids of the trigger are forced after it."""
    after_reasoning: bool | str = False
    """The grammar (or the wait for its trigger) starts after ``</think>``, or after the token spelled like this."""

    def __post_init__(self) -> None:
        timing = {"schema_type": "ebnf", "schema": "", "bound_token_id": self.bound_token_id}
        checked = check_so_args({**timing, "trigger_token_ids": list(self.trigger_token_ids)})
        assert checked is not None
        object.__setattr__(self, "trigger_token_ids", tuple(checked["trigger_token_ids"]))
        object.__setattr__(self, "bound_token_id", checked["bound_token_id"])
        if not isinstance(self.after_reasoning, (bool, str)) or self.after_reasoning == "":
            why = "it is True, False or the spelling of a token"
            raise RequestTypeError("after_reasoning", self.after_reasoning, why=why, fix="give True for </think>")
        self.check()

    def check(self) -> None:
        """Bring the fields into canonical form, or raise RequestError."""
        raise TypeError("use JsonSchema, Regex, Ebnf or Choice")

    @property
    def grammar_key(self) -> GrammarKey:
        """Equal for descriptions of the same grammar, whenever it starts."""
        raise TypeError("use JsonSchema, Regex, Ebnf or Choice")

    @property
    def marker(self) -> str | None:
        """Spelling of the token that the grammar waits for first."""
        if isinstance(self.after_reasoning, str):
            return self.after_reasoning
        return END_OF_REASONING if self.after_reasoning else None


@dataclass(frozen=True, slots=True)
class JsonSchema(StructuredSpec):
    """A JSON text that is valid against a schema.

    Raises:
        RequestError: no schema, or a keyword that cannot be enforced; names its path.
    """

    schema: Mapping[str, Any] | str | bool
    """A dict, a boolean or JSON text; stored as compact text with its order of keys."""
    whitespace: Whitespace = "bounded"
    """bounded: a space or a line break with up to 32 blanks where printers put them; compact: none; spaced: one space
    after comma and colon; any: without limit (a model can then fill its whole budget with blanks)."""
    strict: bool = True
    """Objects that list properties (arrays that list prefixItems) have no others unless the schema speaks of them."""

    def check(self) -> None:
        check_choice("whitespace", self.whitespace, tuple(LAYOUTS))
        if not isinstance(self.strict, bool):
            raise RequestTypeError("strict", self.strict, why="it is True or False", fix="give True or False")
        text = schema_text(self.schema)
        check_keywords(parse_schema(text))
        object.__setattr__(self, "schema", text)

    @property
    def grammar_key(self) -> GrammarKey:
        assert isinstance(self.schema, str)
        return GrammarKey("json", self.schema, f"{self.whitespace} {'strict' if self.strict else 'open'}")


@dataclass(frozen=True, slots=True)
class Regex(StructuredSpec):
    """A text that a regular expression matches as a whole. Raises RequestError where it cannot be supported."""

    pattern: str
    """ECMA-262 syntax without back references, look-around and word boundaries."""

    def check(self) -> None:
        _check_text("pattern", self.pattern)
        regex_term(self.pattern, "pattern")

    @property
    def grammar_key(self) -> GrammarKey:
        return GrammarKey("regex", self.pattern)


@dataclass(frozen=True, slots=True)
class Ebnf(StructuredSpec):
    """A text of a context-free grammar in the notation ``rule ::= ...`` (GBNF). Its errors show when it is compiled."""

    grammar: str
    root: str = "root"
    """Name of the start rule."""

    def check(self) -> None:
        _check_text("grammar", self.grammar)
        _check_text("root", self.root)
        if not re.search(rf"^\s*{re.escape(self.root)}\s*::=", self.grammar, re.MULTILINE):
            why = "the grammar has no rule of this name"
            raise SchemaError("root", self.root, why=why, fix=f"add a line {self.root} ::= ...")

    @property
    def grammar_key(self) -> GrammarKey:
        return GrammarKey("ebnf", self.grammar, self.root)


@dataclass(frozen=True, slots=True)
class Choice(StructuredSpec):
    """One of several texts. Raises RequestError if there are none."""

    options: Sequence[str]
    """Different texts, none empty; stored as a tuple."""

    def check(self) -> None:
        if isinstance(self.options, str) or not isinstance(self.options, Sequence):
            raise RequestTypeError("options", self.options, why="it is a list of texts", fix="put them in a list")
        for index, option in enumerate(self.options):
            _check_text(f"options[{index}]", option)
        if not self.options:
            raise SchemaError("options", self.options, why="there is nothing to choose from", fix="give a text")
        object.__setattr__(self, "options", tuple(dict.fromkeys(self.options)))
        _check_text("options", json.dumps(self.options, ensure_ascii=False))

    @property
    def grammar_key(self) -> GrammarKey:
        return GrammarKey("choice", json.dumps(self.options, ensure_ascii=False))


def _check_text(field: str, value: object) -> None:
    if not isinstance(value, str):
        raise RequestTypeError(field, value, why="it has to be text", fix="give a string")
    if not value:
        raise SchemaError(field, value, why="it is empty", fix="write something")
    try:
        size = len(value.encode("utf-8"))
    except UnicodeEncodeError as error:
        raise SchemaError(field, value, why="half of a surrogate pair is no character", fix="remove it") from error
    if size > MAX_SCHEMA_BYTES:
        why = f"it has {size} bytes, and at most {MAX_SCHEMA_BYTES} are accepted"
        raise SchemaError(field, "a long text", why=why, fix="describe less")


def from_so_args(so_args: Mapping[str, Any]) -> StructuredSpec:
    """The description that ``so_args`` gives (engine spec 1.6).

    Raises:
        RequestError: an unknown, missing or refused key, a wrong type, or what the description itself refuses.
    """
    checked = check_so_args(so_args)
    if checked is None:
        raise SchemaError("so_args", so_args, why="there is nothing in it", fix="give schema_type and schema")
    timing: dict[str, Any] = {
        "trigger_token_ids": check_token_ids("so_args['trigger_token_ids']", checked.get("trigger_token_ids") or ()),
        "bound_token_id": checked.get("bound_token_id"),
    }
    match checked["schema_type"]:
        case "json":
            return JsonSchema(checked["schema"], **timing)
        case "regex":
            return Regex(checked["schema"], **timing)
    return Ebnf(checked["schema"], **timing)
