"""Where reasoning ends and JSON begins, in whatever block: scripted outputs under a grammar."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import jsonschema
import pytest

from deepinfer.engine.outputs import CompletionOutput
from deepinfer.structured.spec import JsonSchema
from tests.engine.scripted import ScriptedModel, finish, spell
from tests.engine.support import make_engine

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["a"],
    "additionalProperties": False,
}


class Wish(NamedTuple):
    """What the model wants to say: ``before</think>after``."""

    before: str
    after: str
    max_tokens: int = 60
    whitespace: str = "compact"


def run(path: Path, wishes: list[Wish], num_drafts: int) -> list[CompletionOutput]:
    engine = make_engine(path, num_speculative_tokens=num_drafts)
    assert engine.tokenizer is not None
    marker = engine.tokenizer.token_to_id("</think>")
    assert marker is not None
    model = ScriptedModel(engine)
    names = [
        model.submit(
            [5, 6, 7],
            [*spell(engine, wish.before), marker, *spell(engine, wish.after)],
            structured=JsonSchema(SCHEMA, whitespace=wish.whitespace, after_reasoning=True),
            temperature=0.0,
            max_tokens=wish.max_tokens,
            skip_special_tokens=False,
        )
        for wish in wishes
    ]
    found = finish(engine)
    assert num_drafts == 0 or max(model.blocks) == 1 + num_drafts, "the border has to fall into a block"
    assert all(found[name].error is None for name in names)
    return [found[name].outputs[0] for name in names]


def json_of(output: CompletionOutput) -> str:
    assert output.finish_reason == "stop"
    _, text = output.text.split("</think>")
    jsonschema.validate(json.loads(text), SCHEMA)
    return text


def test_grammar_starts_behind_the_marker_wherever_it_falls_in_a_block(tiny_path: Path) -> None:
    """S1: a block of six accepted tokens has ``</think>`` at each of its places, and what follows is JSON.

    The first token comes from the prompt's step, so the marker of wish k is token k - 1 of the first block.
    """
    wishes = [Wish('{"a"x{'[:count], '{"a":42}') for count in range(7)]  # before it: looks like JSON and is none
    plain, drafted = run(tiny_path, wishes, 0), run(tiny_path, wishes, 5)
    for wish, one, other in zip(wishes, plain, drafted, strict=True):
        assert other.token_ids == one.token_ids
        assert other.text == wish.before + '</think>{"a":42}'
        assert other.finish_reason == "stop"
        assert other.num_steps < one.num_steps / 2, "whole blocks have to be accepted, across the border too"


def test_wishes_that_are_no_json_are_bent_into_json(tiny_path: Path) -> None:
    """S1: drafts that the grammar forbids are never accepted, and the output always parses."""
    wishes = [Wish("xyzwv"[:count], after) for count in (0, 1, 4) for after in ('{"{"a":1}', "```json", "  {}")]
    plain, drafted = run(tiny_path, wishes, 0), run(tiny_path, wishes, 5)
    for one, other in zip(plain, drafted, strict=True):
        assert other.token_ids == one.token_ids
        json_of(other)


@pytest.mark.parametrize("num_drafts", [0, 5])
def test_a_budget_that_ends_inside_reasoning_gives_no_json(tiny_path: Path, num_drafts: int) -> None:
    """O3: the grammar has not started, so nothing is constrained, and the reason is the length."""
    (output,) = run(tiny_path, [Wish("abcdefgh", '{"a":1}', max_tokens=8)], num_drafts)
    assert output.text == "abcdefgh"
    assert output.finish_reason == "length"


@pytest.mark.parametrize("num_drafts", [0, 4])
def test_a_model_that_only_wants_blanks_still_ends(tiny_path: Path, num_drafts: int) -> None:
    """O2: whitespace is bounded unless it is asked for, so the answer ends within its budget."""
    wishes = [Wish("", '{"a":' + 200 * blank, 120, "bounded") for blank in " \n\t"]
    for output in run(tiny_path, wishes, num_drafts):
        text = json_of(output)
        assert sum(character.isspace() for character in text) <= 4 * 33  # a break and 32 blanks at four places


def test_unbounded_whitespace_has_to_be_asked_for(tiny_path: Path) -> None:
    """O2, the other side: with ``whitespace="any"`` the same wish fills its budget."""
    (output,) = run(tiny_path, [Wish("", '{"a":' + 200 * "\n", 120, "any")], 4)
    assert output.finish_reason == "length"
    assert output.text.count("\n") > 100
