"""The sampler of a GPU as a whole: bans, grammars, edits and forced tokens, against the sampler of the CPU."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from deepinfer.sampling.batch import SamplingBatch, SamplingBatchBuilder
from deepinfer.sampling.edits import GrammarMask
from deepinfer.sampling.params import SamplingParams
from deepinfer.sampling.row_parameters import RowParameters
from deepinfer.sampling.sampler import Sampler
from deepinfer.sampling.state import SamplingState

VOCAB = 700
BANNED = (0, 5, 31, 32, 699)


def with_parameters(batch: SamplingBatch, states: list[SamplingState], device) -> SamplingBatch:
    """The batch as a builder makes it for a GPU."""
    parameters = RowParameters.of(states, VOCAB, device)
    return replace(batch, constants=replace(batch.constants, parameters=parameters))


def both(params: list[SamplingParams], logits: torch.Tensor, device, banned=BANNED, grammar=None, pending=None):
    states = [SamplingState(each, [1, 2, 3], vocab_size=VOCAB, eos_id=1, seed=9 + i) for i, each in enumerate(params)]
    positions = [3 + 2 * row for row in range(len(params))]
    expected_batch = SamplingBatchBuilder(VOCAB).build(states, positions, pending)
    device_batch = SamplingBatchBuilder(VOCAB, device=device).build(states, positions, pending)
    device_batch = with_parameters(device_batch, states, device)
    if grammar is not None:
        expected_batch = expected_batch.with_grammar(grammar)
        device_batch = device_batch.with_grammar(GrammarMask(grammar.rows.to(device), grammar.bits.to(device)))
    expected = Sampler(VOCAB, banned_ids=banned).sample(logits, expected_batch)
    sampler = Sampler(VOCAB, banned_ids=banned, device=device)
    for _again in range(2):
        found = sampler.sample(logits.to(device), device_batch)
        assert torch.equal(found.is_bad.cpu(), expected.is_bad)
        assert torch.equal(found.token_ids.cpu(), expected.token_ids)
    return expected


def make_logits(rows: int) -> torch.Tensor:
    return 2 * torch.randn((rows, VOCAB), generator=torch.Generator().manual_seed(rows))


KINDS = [SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(top_p=0.8), SamplingParams(top_k=4)]


@pytest.mark.parametrize("banned", [(), BANNED, tuple(range(1, VOCAB))])
def test_banned_tokens(device, banned):
    logits = make_logits(4)
    if banned:
        logits[:, banned[0]] = 50.0
    expected = both(KINDS, logits, device, banned)
    assert not set(expected.token_ids.tolist()) & set(banned)


def test_grammars_of_some_rows(device):
    bits = torch.randint(-(2**31), 2**31, (2, 22), generator=torch.Generator().manual_seed(3)).to(torch.int32)
    bits[1] = 0
    bits[1, 1] = 1  # token 32 alone, which is banned: nothing is left
    expected = both(KINDS, make_logits(4), device, grammar=GrammarMask(torch.tensor([3, 1]), bits))
    assert expected.is_bad.tolist() == [False, True, False, False]


def test_edits_hide_no_bad_row(device):
    params = [
        SamplingParams(temperature=0.0, allowed_token_ids=[7, 9]),
        SamplingParams(allowed_token_ids=[8, 20, 300], top_p=0.9),
        SamplingParams(temperature=0.0, logit_bias={44: 60.0}),
        SamplingParams(repetition_penalty=1.5, frequency_penalty=0.5),
        SamplingParams(min_tokens=4),
    ]
    logits = make_logits(5)
    logits[1, 600] = math.nan  # outside of the allow list
    logits[3, 1:4] = 8.0
    expected = both(params, logits, device)
    assert expected.is_bad.tolist() == [False, True, False, False, False]
    assert int(expected.token_ids[2]) == 44


def test_forced_tokens(device):
    params = [SamplingParams(golden_token_ids=[11, 12]), SamplingParams(golden_token_ids=[13], temperature=0.0)]
    expected = both(params, make_logits(2), device)
    assert expected.token_ids[0] == 11
