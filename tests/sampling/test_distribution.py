"""The whole distribution of a row is the one that its token and its log-probability come from."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from deepinfer.sampling.batch import SamplingBatch
from deepinfer.sampling.distribution import without_logprobs
from deepinfer.sampling.params import SamplingParams
from deepinfer.sampling.sampler import Sampler
from deepinfer.sampling.state import SamplingState

VOCAB = 30
MIXES = [
    {"logprobs": 1},
    {"temperature": 0.6, "top_p": 0.8, "logprobs": 2},
    {"top_k": 5, "logprobs": 0},
    {"min_p": 0.05, "logit_bias": {3: 4.0}, "logprobs": 1},
    {"top_k": 3, "logprobs": 3, "logprobs_mode": "raw"},
]


def _batch(params: list[SamplingParams]) -> SamplingBatch:
    states = [SamplingState(each, [1], vocab_size=VOCAB, seed=row) for row, each in enumerate(params)]
    return SamplingBatch.build(states, [1] * len(states))


def test_scores_normalise_to_the_reported_logprobs():
    sampler = Sampler(VOCAB, banned_ids=[7])
    params = [SamplingParams(**mix) for mix in MIXES[:4]]
    logits, batch = torch.randn(4, VOCAB) * 2, _batch(params)
    full = torch.empty(4, VOCAB)
    for group, scores in sampler.distributions(logits, batch):
        assert torch.all(scores.amax(-1) == 0)
        full[group.rows] = scores
    assert torch.all(full[:, 7] == -torch.inf)
    logprobs = full.log_softmax(-1)
    for token in range(VOCAB):
        forced = dataclasses.replace(batch, forced=torch.full((4,), token))
        reported = sampler.sample(logits, forced).logprobs
        torch.testing.assert_close(reported, logprobs[:, token].clamp(min=-9999.0), atol=1e-5, rtol=1e-5)


def test_greedy_rows_have_one_token():
    logits = torch.zeros(1, VOCAB)
    logits[0, [4, 9]] = 1.0
    ((_, scores),) = Sampler(VOCAB).distributions(logits, _batch([SamplingParams(temperature=0)]))
    assert scores.isfinite().nonzero().tolist() == [[0, 4]]


@pytest.mark.parametrize("mix", MIXES, ids=str)
def test_leaving_logprobs_out_changes_no_token(mix):
    logits, batch = torch.randn(20, VOCAB), _batch([SamplingParams(**mix)] * 20)
    loud, quiet = (Sampler(VOCAB).sample(logits, each) for each in (batch, without_logprobs(batch)))
    assert torch.equal(loud.token_ids, quiet.token_ids)
    assert quiet.logprobs is None
    assert loud.logprobs is not None
    assert without_logprobs(without_logprobs(batch)).constants.wants_logprobs is False
