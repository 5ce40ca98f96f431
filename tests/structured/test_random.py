"""Random schemas and patterns: what is generated under the masks always satisfies an independent validator."""

from __future__ import annotations

import json
import random
import re

import jsonschema
import pytest

from deepinfer.structured.spec import Choice, JsonSchema, Regex
from tests.structured.generators import random_pattern, random_schema
from tests.structured.support import byte_ids, matcher_for, random_walk, text_of

SAMPLED, FULL = 100, 1000
_ECMA_SPACE = r"(?:\s|\ufeff)"
_CHECKER = jsonschema.Draft202012Validator.FORMAT_CHECKER


def check_schema(seed: int) -> int:
    """Two outputs of a random schema; returns how many came to an end."""
    rng = random.Random(seed)
    schema = random_schema(rng)
    spec = JsonSchema(schema, whitespace=rng.choice(("bounded", "compact", "spaced")), strict=rng.random() < 0.7)
    matcher = matcher_for(spec)
    num_finished = 0
    for _repeat in range(2):
        matcher.replay(())
        ids = random_walk(matcher, rng)
        matcher.check()
        if ids is not None:
            value = json.loads(text_of(ids[:-1]))
            jsonschema.Draft202012Validator(schema, format_checker=_CHECKER).validate(value)
            num_finished += 1
    return num_finished


def check_pattern(seed: int) -> int:
    """As :func:`check_schema`, for a random pattern."""
    rng = random.Random(seed)
    pattern = random_pattern(rng)
    matcher = matcher_for(Regex(pattern))
    num_finished = 0
    for _repeat in range(2):
        matcher.replay(())
        ids = random_walk(matcher, rng, hurry_after=15, closing=b"abAZ0-. \n", limit=200)
        if ids is not None:
            text = text_of(ids[:-1])
            assert re.fullmatch(pattern.replace(r"\s", _ECMA_SPACE), text), (pattern, text)
            num_finished += 1
    return num_finished


@pytest.mark.parametrize("first", range(0, SAMPLED, 20))
def test_random_schemas_validate(first: int) -> None:
    assert sum(check_schema(seed) for seed in range(first, first + 20)) >= 36


@pytest.mark.parametrize("first", range(0, SAMPLED, 20))
def test_random_patterns_match(first: int) -> None:
    assert sum(check_pattern(seed) for seed in range(first, first + 20)) >= 36


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, FULL, 100))
def test_two_thousand_structured_outputs_validate(first: int) -> None:
    seeds = range(10_000 + first, 10_000 + first + 100)
    assert sum(check_schema(seed) for seed in seeds) >= 175
    assert sum(check_pattern(seed) for seed in seeds) >= 175


def test_patterns_of_texts_that_python_matches_are_accepted_too() -> None:
    """The other direction: the language is not smaller than the pattern's."""
    words = [a + b + c for a in ("", "a", "b", "0", "é") for b in ("", "a", "\n", "-") for c in ("", "b", "ab", "Z")]
    for seed in range(60):
        pattern = random_pattern(random.Random(seed))
        matcher = matcher_for(Regex(pattern))
        for word in words:
            # Python's \w takes é and its dot takes \r; ECMA's do not.
            expected = re.fullmatch(pattern, word, re.ASCII) is not None
            matcher.replay(())
            ids = _byte_tokens(word)
            fits = matcher.replay(ids) == len(ids) and matcher.can_end
            assert fits == expected, (pattern, word)


def _byte_tokens(text: str) -> list[int]:
    return [byte_ids()[byte] for byte in text.encode()]


def test_choice_generates_each_option_and_nothing_else() -> None:
    options = ["yes", "no", "yes, but", 'qu"ote', "é中😀"]
    matcher = matcher_for(Choice(options))
    rng = random.Random(1)
    seen = set()
    for _repeat in range(60):
        matcher.replay(())
        ids = random_walk(matcher, rng)
        assert ids is not None
        seen.add(text_of(ids[:-1]))
    assert seen == set(options)
