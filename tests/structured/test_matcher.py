"""The state machine of one sequence: waiting, forcing, matching, ending, and undoing all of it."""

from __future__ import annotations

import random

import numpy as np
import pytest

from deepinfer.errors import RequestError
from deepinfer.structured.matcher import GrammarMatcher, Mode
from deepinfer.structured.spec import Choice, Ebnf, JsonSchema, Regex
from deepinfer.structured.start_rule import StartRule, start_rule
from deepinfer.structured.token_pattern import TokenPattern
from tests.structured.generators import random_pattern, random_schema
from tests.structured.support import (
    EXTRA_IDS,
    allowed_ids,
    byte_ids,
    matcher_for,
    random_walk,
    text_of,
    tiny_tokenizer,
    vocabulary,
)

EOS = tiny_tokenizer().eos_token_id


def ids(text: str) -> list[int]:
    return [byte_ids()[byte] for byte in text.encode()]


def with_start(spec: Regex | JsonSchema | Choice, *patterns: list[int], bound: int | None = None) -> GrammarMatcher:
    return matcher_for(spec, start=StartRule(tuple(map(TokenPattern, patterns)), bound))


@pytest.mark.parametrize("pattern", [[1], [1, 1, 2], [1, 2, 1, 2, 3], [2, 2, 2], [1, 2, 1, 1, 2, 1, 3]])
def test_token_pattern_finds_what_a_plain_search_finds(pattern: list[int]) -> None:
    rng = random.Random(len(pattern))
    automaton, state = TokenPattern(pattern), 0
    stream: list[int] = []
    for _step in range(2000):
        stream.append(rng.randint(1, 3))
        state = automaton.advance(state, stream[-1])
        assert (state == len(pattern)) == (stream[-len(pattern) :] == pattern)


def test_eos_comes_only_where_the_grammar_allows_it() -> None:
    matcher = matcher_for(Regex("ab?"))
    assert not matcher.accept(EOS)
    assert EOS not in (allowed_ids(matcher) or [])
    assert matcher.accept(ids("a")[0])
    assert matcher.can_end
    assert EOS in (allowed_ids(matcher) or [])
    assert matcher.accept(ids("b")[0])
    assert allowed_ids(matcher) == [EOS]
    assert matcher.accept(EOS)
    assert matcher.is_finished
    assert allowed_ids(matcher) is None, "a late step must not lose its whole row"
    assert matcher.accept(7)
    assert matcher.accept(EOS)
    matcher.rollback(3)
    assert not matcher.is_finished
    assert allowed_ids(matcher) == [EOS]


def test_special_and_unnamed_ids_are_never_allowed() -> None:
    matcher = matcher_for(Regex(r"[^q]*"))
    allowed = set(allowed_ids(matcher) or [])
    hidden = tiny_tokenizer().added_token_ids - {EOS}
    assert not allowed & hidden
    assert max(allowed) < vocabulary().size - EXTRA_IDS
    assert EOS in allowed
    for token in [*hidden, vocabulary().size - 1, vocabulary().size, 10**9, -1]:
        assert not matcher.accept(token)
    assert matcher.num_tokens == 0


def test_mask_clears_the_bits_behind_the_vocabulary() -> None:
    assert vocabulary().size % 32
    row = np.full(vocabulary().num_words, -1, dtype=np.int32)
    assert matcher_for(Regex(r"[\s\S]*")).fill_mask(row)
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")
    assert not bits[vocabulary().size :].any()


def test_grammar_starts_after_its_trigger() -> None:
    trigger = [300, 301, 300, 302]
    matcher = with_start(Choice(["yes", "no"]), trigger)
    for token in [5, EOS, 300, 301, 300, 301, 300]:
        assert allowed_ids(matcher) is None
        assert matcher.accept(token)
    assert matcher.mode is Mode.FREE
    assert matcher.accept(302)
    assert matcher.mode is Mode.GRAMMAR
    assert not matcher.accept(5)
    assert all(matcher.accept(token) for token in [*ids("no"), EOS])
    assert matcher.is_finished


@pytest.mark.parametrize(
    ("bound", "before", "forced"),
    [(300, [], [301, 302]), (301, [300], [302]), (7, [300], [300, 301, 302]), (0, [], [300, 301, 302])],
)
def test_bound_token_forces_the_rest_of_the_trigger(bound: int, before: list[int], forced: list[int]) -> None:
    matcher = with_start(Regex("a+"), [300, 301, 302], bound=bound)
    for token in [9, *before]:
        assert matcher.accept(token)
    assert allowed_ids(matcher) is None
    assert matcher.accept(bound)
    for token in forced:
        assert matcher.mode is Mode.FORCED
        assert allowed_ids(matcher) == [token]
        assert not matcher.accept(token + 1)
        assert matcher.accept(token)
    assert matcher.mode is Mode.GRAMMAR
    matcher.check()


def test_forced_tokens_cross_from_the_trigger_into_the_grammar() -> None:
    matcher = with_start(Regex("#[ab]"), [300, 301, 302], bound=300)
    assert matcher.forced_tokens(8) == []
    matcher.accept(300)
    mark = ids("#")[0]
    assert matcher.forced_tokens(8) == [301, 302, mark]
    assert matcher.forced_tokens(2) == [301, 302]
    assert matcher.num_tokens == 1
    for token in (301, 302, mark):
        assert matcher.accept(token)
    assert matcher.forced_tokens(8) == []
    matcher.accept(ids("a")[0])
    assert matcher.forced_tokens(8) == [EOS]


def test_forced_tokens_leave_the_choice_of_tokenisation_to_the_model() -> None:
    # The text is certain, its tokens are not: " the" may be one token or several.
    matcher = matcher_for(Regex(" the other"))
    assert len(allowed_ids(matcher) or []) > 1
    assert matcher.forced_tokens(16) == []


@pytest.mark.parametrize("seed", range(12))
def test_rollback_across_all_modes_equals_replay(seed: int) -> None:
    rng = random.Random(seed)
    spec = JsonSchema(random_schema(rng)) if seed % 2 else Regex(random_pattern(rng))
    matcher = with_start(spec, [504], [300, 301, 302], bound=rng.choice([None, 300, 7]))
    reference = matcher.copy()
    history: list[int] = []
    for _step in range(120):
        if history and rng.random() < 0.3:
            count = min(rng.randint(1, 16), len(history))
            matcher.rollback(count)
            del history[-count:]
        else:
            allowed = allowed_ids(matcher)
            start = [504, 300, 301, 302]
            token = rng.choice(allowed) if allowed else start[len(history) % 4]
            assert matcher.accept(token)
            history.append(token)
        assert reference.replay(history) == len(history)
        assert reference.mode is matcher.mode
        assert allowed_ids(reference) == allowed_ids(matcher)
        assert reference.num_tokens == matcher.num_tokens
        matcher.check()


def test_rollback_is_bounded() -> None:
    matcher = matcher_for(Regex("a*"), max_rollback=16)
    for _index in range(100):
        assert matcher.accept(ids("a")[0])
    matcher.rollback(16)
    assert matcher.num_tokens == 84
    with pytest.raises(AssertionError):
        matcher.rollback(17)


def test_a_preempted_sequence_goes_on_where_it_was() -> None:
    schema = {"type": "object", "properties": {"name": {"type": "string"}, "n": {"type": "integer"}}, "required": ["n"]}
    whole = matcher_for(JsonSchema(schema))
    output = random_walk(whole, random.Random(3))
    assert output is not None
    for cut in range(len(output)):
        again = whole.copy()
        assert again.replay(output[:cut]) == cut
        assert all(again.accept(token) for token in output[cut:])
        assert again.is_finished
    assert whole.copy().replay([*ids("{"), 504, *ids("}")]) == 1


# ---- reasoning (known failures S1 and O3) ----------------------------------------------------------------------------


def test_marker_may_fall_anywhere_in_an_accepted_block() -> None:
    marker = tiny_tokenizer().token_to_id("</think>")
    assert marker is not None
    answer = [*ids('{"a":1}'), EOS]
    for before in range(6):
        whole = [*[9, EOS, *ids("{")][:before], marker, *answer]
        for first in range(len(whole)):
            matcher = with_start(JsonSchema({"type": "object", "properties": {"a": {"const": 1}}}), [marker])
            for block in (whole[:first], whole[first:]):
                # A block is walked, undone and accepted again, as verification does.
                assert all(matcher.accept(token) for token in block[:16])
                matcher.rollback(len(block[:16]))
                assert all(matcher.accept(token) for token in block)
            assert matcher.is_finished


def test_reasoning_is_waited_for_only_where_it_is_open() -> None:
    tokenizer = tiny_tokenizer()
    begin, end = tokenizer.token_to_id("<think>"), tokenizer.token_to_id("</think>")
    assert begin is not None
    assert end is not None
    spec = Regex("a", after_reasoning=True, trigger_token_ids=[5, 6], bound_token_id=5)
    thinking = start_rule(spec, tokenizer, [1, begin])
    assert [pattern.ids for pattern in thinking.patterns] == [(end,), (5, 6)]
    assert thinking.bound_token_id == 5
    assert [pattern.ids for pattern in start_rule(spec, tokenizer, [begin, 9, end, 3]).patterns] == [(5, 6)]
    assert [pattern.ids for pattern in start_rule(spec, tokenizer, [begin, end, 4, begin]).patterns] == [(end,), (5, 6)]
    assert start_rule(Regex("a"), None).patterns == ()
    custom = start_rule(Regex("a", after_reasoning="<｜User｜>"), tokenizer)
    assert custom.patterns[0].ids == (tokenizer.token_to_id("<｜User｜>"),)
    with pytest.raises(RequestError, match="no token"):
        start_rule(Regex("a", after_reasoning="</thinking>"), tokenizer)
    with pytest.raises(RequestError, match="tokenizer"):
        start_rule(Regex("a", after_reasoning=True), None)


def test_bound_token_before_the_end_of_reasoning_forces_nothing() -> None:
    matcher = with_start(Regex("a"), [504], [5, 6], bound=5)
    for token in (5, 8, 5, 6):
        assert matcher.accept(token)
        assert matcher.mode is Mode.FREE
    assert matcher.accept(504)
    assert matcher.accept(5)
    assert allowed_ids(matcher) == [6]


def test_ebnf_with_another_start_rule() -> None:
    matcher = matcher_for(Ebnf('start ::= item ("," item)*\nitem ::= [0-9]{1,2} | "x"', root="start"))
    output = random_walk(matcher, random.Random(5), closing=b"")
    assert output is not None
    assert all(item == "x" or (item.isdecimal() and len(item) <= 2) for item in text_of(output[:-1]).split(","))


def test_masks_and_acceptance_agree_on_every_token() -> None:
    """The mask is what the sampler obeys, acceptance what verification asks: neither may know better."""
    patterns = ["[a-f]?[^a-z]b", r"(\s?\d+?([^a-z]+?){2}){1,3}| {2,}Z", "^.{0,2}é*x"[1:]]
    specs = [*map(Regex, patterns), *(JsonSchema(random_schema(random.Random(seed))) for seed in range(6))]
    rng = random.Random(0)
    for spec in specs:
        matcher = matcher_for(spec)
        for _step in range(12):
            allowed = allowed_ids(matcher)
            if allowed is None:
                break
            accepted = [token for token in range(vocabulary().size) if matcher.allows(token)]
            assert accepted == allowed, spec
            matcher.accept(rng.choice(allowed))
