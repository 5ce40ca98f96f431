"""Masks of whole steps: rows of several sequences, drafts, buffers."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from deepinfer.structured.masks import MaskBatch, MaskRows
from deepinfer.structured.matcher import GrammarMatcher
from deepinfer.structured.spec import Choice, JsonSchema, Regex
from deepinfer.structured.start_rule import StartRule
from deepinfer.structured.token_pattern import TokenPattern
from tests.structured.generators import random_pattern, random_schema
from tests.structured.support import allowed_ids, byte_ids, matcher_for, tiny_tokenizer, vocabulary

EOS = tiny_tokenizer().eos_token_id


def unpack(words: torch.Tensor) -> list[int]:
    return np.flatnonzero(np.unpackbits(words.numpy().view(np.uint8), bitorder="little")).tolist()


@pytest.fixture
def batch() -> MaskBatch:
    made = MaskBatch(vocabulary().size, num_threads=2)
    yield made
    made.close()


def test_rows_of_several_sequences_and_drafts(batch: MaskBatch) -> None:
    yes, no = byte_ids()[ord("y")], byte_ids()[ord("n")]
    choice = matcher_for(Choice(["yy", "n"]))
    waiting = matcher_for(Regex("y"), start=StartRule((TokenPattern([300, 301]),)))
    plain = matcher_for(Regex("n*"))
    rows = [MaskRows(choice, 2, (yes, no, yes)), MaskRows(waiting, 7, (300, 301, yes)), MaskRows(plain, 11)]
    mask = batch.compute(rows)
    assert mask is not None
    # choice: before and after "y"; the draft "n" is wrong and nothing follows it. waiting: after its trigger only.
    assert mask.rows.tolist() == [2, 3, 9, 10, 11]
    assert mask.rows.dtype == torch.int64
    assert mask.bits.dtype == torch.int32
    assert mask.bits.shape == (5, vocabulary().num_words)
    assert unpack(mask.bits[0])[:2] == sorted([yes, no])[:2] or {yes, no} <= set(unpack(mask.bits[0]))
    assert unpack(mask.bits[1]) == [yes]
    assert unpack(mask.bits[2]) == [yes]
    assert unpack(mask.bits[3]) == [EOS]
    assert unpack(mask.bits[4]) == allowed_ids(plain)
    assert [matcher.num_tokens for matcher in (choice, waiting, plain)] == [0, 0, 0]


def test_no_constrained_row_gives_no_mask(batch: MaskBatch) -> None:
    waiting = matcher_for(Regex("y"), start=StartRule((TokenPattern([300]),)))
    assert batch.compute([]) is None
    assert batch.compute([MaskRows(waiting, 0, (5, 6))]) is None


def test_masks_of_a_step_survive_the_start_of_the_next(batch: MaskBatch) -> None:
    matcher = matcher_for(Choice(["a", "bc"]))
    first = batch.compute([MaskRows(matcher, 0)])
    assert first is not None
    before = first.bits.clone()
    matcher.accept(byte_ids()[ord("b")])
    second = batch.compute([MaskRows(matcher, 0)])
    assert second is not None
    assert torch.equal(first.bits, before)
    assert not torch.equal(first.bits, second.bits)


def test_masks_of_many_sequences_equal_those_computed_alone(batch: MaskBatch) -> None:
    rng = random.Random(4)
    rows, expected, first = [], [], 0
    for index in range(24):
        spec = JsonSchema(random_schema(rng)) if index % 2 else Regex(random_pattern(rng))
        matcher = matcher_for(spec)
        drafts: list[int] = []
        for _draft in range(rng.randint(0, 4)):
            allowed = allowed_ids(matcher)
            assert allowed is not None
            expected.append((first + len(drafts), allowed))
            token = rng.choice([each for each in allowed if each != EOS] or allowed)
            if token == EOS:
                break
            matcher.accept(token)
            drafts.append(token)
        else:
            allowed = allowed_ids(matcher)
            assert allowed is not None
            expected.append((first + len(drafts), allowed))
        matcher.rollback(len(drafts))
        rows.append(MaskRows(matcher, first, tuple(drafts)))
        first += 1 + len(drafts)
    mask = batch.compute(rows)
    assert mask is not None
    assert list(zip(mask.rows.tolist(), map(unpack, mask.bits), strict=True)) == expected


def generate(matcher: GrammarMatcher, batch: MaskBatch, seed: int, num_drafts: int) -> list[int]:
    """A toy engine with position-keyed noise: the token at a position is the allowed one with the most noise."""

    def best(allowed: list[int], position: int) -> int:
        noise = random.Random(f"{seed} {position}").sample(range(10**6), vocabulary().size)
        return max(allowed, key=lambda token: (position > 40 and token == EOS, noise[token]))

    wild = random.Random(f"drafts {seed}")
    output: list[int] = []
    while not matcher.is_finished and len(output) < 150:
        position = len(output)
        drafts = [best(list(range(vocabulary().size)), position + each) for each in range(num_drafts)]
        # Some drafts are what the target will choose: take them from a walk of our own.
        guide = matcher.copy()
        guide.replay(output)
        for each in range(num_drafts):
            allowed = allowed_ids(guide)
            if allowed is None or wild.random() < 0.2:
                break
            drafts[each] = best(allowed, position + each)
            guide.accept(drafts[each])
        mask = batch.compute([MaskRows(matcher, 0, tuple(drafts))])
        allowed_at = {} if mask is None else dict(zip(mask.rows.tolist(), map(unpack, mask.bits), strict=True))
        for row in range(1 + num_drafts):
            if matcher.is_finished:
                break
            token = best(allowed_at.get(row, list(range(vocabulary().size))), position + row)
            assert matcher.accept(token)
            output.append(token)
            if row < num_drafts and token != drafts[row]:
                break
    return output


@pytest.mark.parametrize("seed", range(8))
def test_speculative_output_equals_plain_output(batch: MaskBatch, seed: int) -> None:
    rng = random.Random(seed)
    spec = JsonSchema(random_schema(rng)) if seed % 2 else Regex(random_pattern(rng))
    plain = generate(matcher_for(spec), batch, seed, 0)
    assert plain
    for num_drafts in (1, 3, 7):
        assert generate(matcher_for(spec), batch, seed, num_drafts) == plain
