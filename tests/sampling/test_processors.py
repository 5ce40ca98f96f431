"""Masks, biases and penalties against plain loops, and the rows that must keep their bits."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from deepinfer.sampling.batch import SamplingBatch, SamplingBatchBuilder
from deepinfer.sampling.edits import GrammarMask
from deepinfer.sampling.params import SamplingParams
from deepinfer.sampling.processors import process
from deepinfer.sampling.state import SamplingState
from tests.sampling.reference import naive_penalties

VOCAB = 70
EOS = 2


def _state(params: SamplingParams, prompt=(1, 2, 3), output=()) -> SamplingState:
    return SamplingState(params, prompt, vocab_size=VOCAB, eos_id=EOS, seed=5, output_ids=output)


def _process(states, logits, **options):
    batch = SamplingBatch.build(states, [state.next_position for state in states])
    return process(logits, batch, **options)


def test_nothing_to_do_returns_the_logits_themselves():
    logits = torch.randn(2, VOCAB)
    assert _process([_state(SamplingParams()), _state(SamplingParams(temperature=0, top_p=0.5))], logits) is logits


def test_allow_list_bias_and_bans():
    logits = torch.randn(4, VOCAB)
    before = logits.clone()
    states = [
        _state(SamplingParams()),
        _state(SamplingParams(allowed_token_ids=[5, 9, 5], logit_bias={9: 2.0, 11: 100.0})),
        _state(SamplingParams(logit_bias={0: -100.0, VOCAB - 1: 1.5})),
        _state(SamplingParams(allowed_token_ids=[7])),
    ]
    found = _process(states, logits, banned_ids=torch.tensor([7, 8]))
    assert torch.equal(logits, before)
    expected = before.clone()
    expected[:, [7, 8]] = -math.inf
    keep = torch.full((VOCAB,), -math.inf)
    keep[[5, 9]] = before[1, [5, 9]]
    keep[9] += 2.0
    expected[1] = keep
    expected[2, 0] -= 100.0
    expected[2, VOCAB - 1] += 1.5
    expected[3] = -math.inf
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("values", "banned"),
    [
        ({"first_n_token_no_eos": 1}, [{EOS}, set(), set()]),
        ({"first_n_token_no_eos": 1, "ignore_eos": True}, [{EOS}, set(), set()]),
        ({"min_tokens": 2}, [{EOS}, {EOS}, set()]),
        ({"min_tokens": 2, "ignore_eos": True}, [set(), set(), set()]),
        ({"min_tokens": 1, "stop_token_ids": [9, VOCAB - 1]}, [{EOS, 9, VOCAB - 1}, set(), set()]),
        ({"min_tokens": 1, "first_n_token_no_eos": 2, "stop_token_ids": [9]}, [{EOS, 9}, {EOS}, set()]),
        ({"min_tokens": 2, "stop_token_ids": [EOS], "ignore_eos": True}, [{EOS}, {EOS}, set()]),
    ],
)
def test_ends_are_banned_until_enough_tokens_exist(values, banned):
    state = _state(SamplingParams(**values))
    for expected in banned:
        found = _process([state, _state(SamplingParams())], torch.zeros(2, VOCAB))
        assert {token for token in range(VOCAB) if found[0, token] == -math.inf} == expected
        assert torch.equal(found[1], torch.zeros(VOCAB))
        state.append([4])


def test_bans_follow_positions_that_the_device_corrected():
    state = _state(SamplingParams(min_tokens=3))
    batch = SamplingBatch.build([state, state], [3, 3])
    corrected = dataclasses.replace(batch, positions=torch.tensor([5, 6]))
    found = process(torch.zeros(2, VOCAB), corrected)
    assert found[:, EOS].tolist() == [-math.inf, 0.0]


@pytest.mark.parametrize(
    "values",
    [
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 0.7},
        {"presence_penalty": 0.5},
        {"frequency_penalty": -0.25},
        {"repetition_penalty": 1.1, "presence_penalty": -1.0, "frequency_penalty": 0.4},
    ],
)
def test_penalties_match_a_plain_loop(values):
    params = SamplingParams(**values)
    prompt, output = [1, 2, 2, 60, VOCAB + 1, VOCAB + 2], [5, 5, 2, 69, 5]  # ids beyond the vocabulary: image pads
    logits = torch.randn(3, VOCAB) * 3
    logits[1, 5] = -math.inf
    states = [_state(SamplingParams()), _state(params, prompt, output), _state(params, [3], [])]
    found = _process(states, logits)
    assert torch.equal(found[0], logits[0])
    for row, (seen, made) in ((1, (prompt, output)), (2, ([3], []))):
        expected = torch.tensor(naive_penalties(logits[row].tolist(), seen, made, params))
        torch.testing.assert_close(found[row], expected, rtol=1e-6, atol=1e-6)  # fp32 against fp64 arithmetic


def test_penalties_of_a_verification_row_count_the_drafts_before_it():
    params = SamplingParams(repetition_penalty=1.2, frequency_penalty=0.5, seq_seed=1)
    state = _state(params, [1, 2], [5])
    drafts = [5, 6, 7]
    logits = torch.randn(4, VOCAB)
    builder = SamplingBatchBuilder(VOCAB)
    positions = [state.next_position + row for row in range(4)]
    batch = builder.build([state] * 4, positions, pending=[drafts[:row] for row in range(4)])
    together = process(logits, batch)
    for row in range(4):
        lone = _state(params, [1, 2], [5, *drafts[:row]])
        assert torch.equal(_process([lone], logits[row : row + 1])[0], together[row])
    state.check()
    assert state.output_ids == [5]


def test_grammar_mask_leaves_exactly_the_allowed_tokens():
    allowed = torch.rand(2, VOCAB) < 0.3
    allowed[0, 31] = allowed[0, 63] = allowed[1, VOCAB - 1] = True  # sign bits and the last word
    words = torch.zeros(2, 3, dtype=torch.int64)
    for token in range(VOCAB):
        words[:, token // 32] |= allowed[:, token].long() << (token % 32)
    bits = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    states = [_state(SamplingParams()) for _ in range(3)]
    batch = SamplingBatch.build(states, [3, 3, 3]).with_grammar(GrammarMask(torch.tensor([2, 0]), bits))
    logits = torch.randn(3, VOCAB)
    found = process(logits, batch)
    assert torch.equal(found[1], logits[1])
    assert torch.equal(found[2], logits[2].masked_fill(~allowed[0], -math.inf))
    assert torch.equal(found[0], logits[0].masked_fill(~allowed[1], -math.inf))
