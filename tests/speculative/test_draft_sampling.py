"""What drafts are drawn with."""

from __future__ import annotations

import pytest
import torch

from deepinfer.sampling.batch import SamplingBatch
from deepinfer.sampling.params import SamplingParams
from deepinfer.sampling.sampler import Sampler
from deepinfer.sampling.state import SamplingState
from deepinfer.speculative.draft_sampling import CoupledDraftSampler, IndependentDraftSampler
from tests.sampling.reference import chi_square, chi_square_bound, naive_distribution

VOCAB = 20


def _batch(count: int, **values) -> SamplingBatch:
    params = SamplingParams(**values)
    return SamplingBatch.build(
        [SamplingState(params, [0], vocab_size=VOCAB, seed=seed) for seed in range(count)], [1] * count
    )


@pytest.mark.parametrize("values", [{}, {"temperature": 0.5}, {"top_p": 0.7}, {"top_k": 3, "logprobs": 2}])
def test_coupled_draft_is_what_the_target_would_draw(values):
    sampler, logits = Sampler(VOCAB), torch.randn(200, VOCAB)
    batch = _batch(200, **values)
    positions = torch.arange(200) + 7
    drawn = CoupledDraftSampler(sampler).sample(logits, batch, positions, 2)
    states = [SamplingState(SamplingParams(**values), [0], vocab_size=VOCAB, seed=seed) for seed in range(200)]
    target = sampler.sample(logits, SamplingBatch.build(states, positions.tolist()))
    assert torch.equal(drawn.token_ids, target.token_ids)
    assert drawn.distributions is None


@pytest.mark.parametrize("values", [{}, {"temperature": 0.5, "top_p": 0.8}, {"top_k": 3}])
def test_independent_draft_is_drawn_from_what_is_stored(values):
    count = 8000
    logits = torch.randn(VOCAB).mul(2)
    drawn = IndependentDraftSampler(Sampler(VOCAB)).sample(
        logits.expand(count, -1), _batch(count, **values), torch.ones(count, dtype=torch.int64), 0
    )
    scores, totals = drawn.distributions.scores_of(torch.tensor([0]))
    stored = (scores[0].double() - totals).exp()
    counts = torch.bincount(drawn.token_ids, minlength=VOCAB)
    statistic, freedom = chi_square(counts.tolist(), stored.tolist())
    assert statistic < chi_square_bound(freedom)
    assert not counts[stored == 0].any()
    expected = torch.tensor(naive_distribution(logits.tolist(), SamplingParams(**values)), dtype=torch.float64)
    assert float((stored - expected).abs().max()) < 0.01  # bf16 scores


def test_draws_of_a_position_differ_by_slot_and_from_the_target():
    sampler, logits = Sampler(VOCAB), torch.zeros(300, VOCAB)
    batch, positions = _batch(300), torch.full((300,), 9)
    drafter = IndependentDraftSampler(sampler)
    draws = [drafter.sample(logits, batch, positions, slot).token_ids for slot in (0, 1)]
    draws.append(CoupledDraftSampler(sampler).sample(logits, batch, positions, 0).token_ids)
    again = drafter.sample(logits, batch, positions, 0).token_ids
    assert torch.equal(again, draws[0])
    for a, b in ((0, 1), (0, 2), (1, 2)):
        share = float((draws[a] == draws[b]).float().mean())
        assert share < 0.12  # 1 in 20 by chance


@pytest.mark.parametrize("drafter", [CoupledDraftSampler, IndependentDraftSampler])
def test_greedy_requests_draft_the_first_arg_max(drafter):
    logits = torch.randn(4, VOCAB)
    logits[0, [3, 8]] = 50.0
    drawn = drafter(Sampler(VOCAB)).sample(logits, _batch(4, temperature=0), torch.ones(4, dtype=torch.int64), 1)
    assert drawn.token_ids.tolist() == [3, *logits[1:].argmax(-1).tolist()]


@pytest.mark.parametrize("drafter", [CoupledDraftSampler, IndependentDraftSampler])
def test_ids_stay_in_the_vocabulary_when_the_draft_model_breaks(drafter):
    logits = torch.zeros(3, VOCAB)
    logits[1] = torch.nan
    logits[2] = -torch.inf
    drawn = drafter(Sampler(VOCAB)).sample(logits, _batch(3), torch.ones(3, dtype=torch.int64), 0)
    assert drawn.token_ids[1:].tolist() == [0, 0]
    assert 0 <= int(drawn.token_ids[0]) < VOCAB
