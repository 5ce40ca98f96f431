"""Log-probabilities: values, ranks, and exactly as many alternatives as were asked for."""

from __future__ import annotations

import math

import pytest
import torch

from deepinfer.sampling.batch import SamplingBatch, SamplingBatchBuilder
from deepinfer.sampling.logprobs import LOGPROB_FLOOR, token_logprobs
from deepinfer.sampling.params import SamplingParams
from deepinfer.sampling.sampler import Sampler
from deepinfer.sampling.state import SamplingState
from tests.sampling.reference import naive_distribution

VOCAB = 60


def _sample(logits, *params: SamplingParams):
    states = [SamplingState(each, [1, 2], vocab_size=VOCAB, seed=row) for row, each in enumerate(params)]
    return Sampler(VOCAB).sample(logits, SamplingBatch.build(states, [2] * len(states))).cpu()


def _check_row(found, row: int, expected: torch.Tensor, count: int) -> None:
    """``expected``: float64 ``[vocab]``, the true log-probabilities."""
    expected = expected.clamp(min=LOGPROB_FLOOR)
    token = found.token_ids[row]
    assert found.logprobs[row].item() == pytest.approx(expected[token].item(), abs=1e-5)
    assert found.ranks[row] == 1 + (expected > expected[token] + 1e-9).sum()
    alternatives = found.alternatives(row)
    assert len(alternatives) == count
    order = sorted(range(VOCAB), key=lambda i: (-round(expected[i].item(), 9), i))[:count]
    assert [i for i, _value in alternatives] == order
    assert [value for _i, value in alternatives] == pytest.approx(expected[order].tolist(), abs=1e-5)
    if found.ranks[row] <= count:
        assert (token.item(), found.logprobs[row].item()) in alternatives


@pytest.mark.parametrize(("logprobs", "count"), [(True, 0), (0, 0), (1, 1), (5, 5), (20, 20)])
@pytest.mark.parametrize(
    "values", [{}, {"temperature": 0.5}, {"top_p": 0.7}, {"top_k": 3}, {"min_p": 0.2, "top_k": 4, "temperature": 2.0}]
)
def test_processed_logprobs_are_those_of_what_was_sampled(logprobs, count, values):
    logits = torch.randn(3, VOCAB) * 2
    params = SamplingParams(logprobs=logprobs, **values)
    found = _sample(logits, params, SamplingParams(), SamplingParams(logprobs=2))
    _check_row(found, 0, torch.tensor(naive_distribution(logits[0].double().tolist(), params)).log(), count)
    _check_row(found, 2, logits[2].double().log_softmax(-1), 2)
    assert found.logprobs[1].isnan()
    assert found.ranks[1] == 0
    assert found.alternatives(1) == []


def test_greedy_logprobs_are_of_the_softmax_at_temperature_one():
    logits = torch.randn(2, VOCAB) * 2
    params = SamplingParams(temperature=0, top_k=1, top_p=0.1, logprobs=5, logit_bias={4: 3.0})
    found = _sample(logits, params, params)
    logits[:, 4] += 3.0
    for row in range(2):
        _check_row(found, row, logits[row].double().log_softmax(-1), 5)
        assert found.ranks[row] == 1
    assert found.logprobs.max() < 0.0


def test_raw_logprobs_are_of_the_untouched_logits():
    logits = torch.randn(4, VOCAB)
    values = {"logprobs": 6, "logprobs_mode": "raw"}
    found = _sample(
        logits,
        SamplingParams(temperature=0.3, top_k=2, logit_bias={9: 50.0}, **values),
        SamplingParams(temperature=0, repetition_penalty=2.0, **values),
        SamplingParams(top_p=0.5, logprobs=3),
        SamplingParams(allowed_token_ids=[11], golden_token_ids=[12], **values),
    )
    assert found.token_ids[0] == 9
    assert found.token_ids[3] == 12
    for row in (0, 1, 3):
        _check_row(found, row, logits[row].double().log_softmax(-1), 6)


def test_nobody_asked_means_no_tensors():
    found = _sample(torch.randn(2, VOCAB), SamplingParams(), SamplingParams(logprobs=False))
    assert found.logprobs is found.ranks is found.top_ids is found.top_logprobs is None
    assert found.alternatives(0) == found.alternatives(1) == []


def test_more_alternatives_than_survivors_are_filled_with_the_floor():
    found = _sample(torch.randn(1, VOCAB), SamplingParams(top_k=2, logprobs=VOCAB))
    values = [value for _token, value in found.alternatives(0)]
    assert len(values) == VOCAB
    assert values[1] > -50
    assert values[2:] == [LOGPROB_FLOOR] * (VOCAB - 2)
    assert sorted(token for token, _value in found.alternatives(0)) == list(range(VOCAB))


def test_every_logprob_scores_rows_that_did_not_ask():
    logits = torch.randn(2, VOCAB)
    states = [SamplingState(SamplingParams(temperature=t), [1], vocab_size=VOCAB, seed=3) for t in (0, 1)]
    batch = SamplingBatchBuilder(VOCAB, every_logprob=True).build(states, [1, 1])
    found = Sampler(VOCAB).sample(logits, batch)
    expected = logits.log_softmax(-1).gather(1, found.token_ids[:, None])[:, 0]
    torch.testing.assert_close(found.logprobs, expected, rtol=1e-5, atol=1e-6)
    assert found.alternatives(0) == []


def test_probabilities_sum_to_one_over_a_real_vocabulary():
    logits = torch.randn(1, 129_280) * 3
    found = token_logprobs(logits, torch.tensor([5]), 1000)
    exact = logits.double().log_softmax(-1)[0]
    assert found.logprobs[0].item() == pytest.approx(exact[5].item(), abs=2e-6)
    torch.testing.assert_close(found.top_logprobs[0].double(), exact[found.top_ids[0]], rtol=0, atol=2e-6)
    assert found.ranks[0] == 1 + (logits[0] > logits[0, 5]).sum()


@pytest.mark.parametrize("slab", [1, 7, 64])
@pytest.mark.parametrize(
    "values",
    [None, {}, {"temperature": 0}, {"temperature": 0.7, "top_p": 0.8}, {"min_p": 0.1}, {"top_k": 3}, {"top_k": 10**6}],
)
def test_prompt_logprobs_do_not_depend_on_the_slab(slab, values):
    logits = torch.randn(23, VOCAB) * 2
    targets = torch.randint(VOCAB, (23,))
    params = None if values is None else SamplingParams(**values)
    whole = token_logprobs(logits, targets, 4, slab=100, params=params)
    found = token_logprobs(logits, targets, 4, slab=slab, params=params)
    assert torch.equal(found.logprobs, whole.logprobs)
    assert torch.equal(found.ranks, whole.ranks)
    assert torch.equal(found.top_ids, whole.top_ids)
    assert torch.equal(found.top_logprobs, whole.top_logprobs)
    for row in range(0, 23, 5):
        exact = logits[row].double().log_softmax(-1)
        if params is not None and not params.is_greedy:
            exact = torch.tensor(naive_distribution(logits[row].double().tolist(), params)).log()
        assert whole.logprobs[row].item() == pytest.approx(max(exact[targets[row]].item(), LOGPROB_FLOOR), abs=1e-5)


def test_prompt_logprobs_of_no_tokens():
    found = token_logprobs(torch.zeros(0, VOCAB), torch.zeros(0, dtype=torch.int64), 3)
    assert found.logprobs.shape == (0,)
    assert found.top_ids.shape == (0, 3)


def test_impossible_token_gets_the_floor():
    logits = torch.tensor([[0.0, -math.inf, 1.0]])
    found = token_logprobs(logits, torch.tensor([1]), 3)
    assert found.logprobs.tolist() == [LOGPROB_FLOOR]
    assert found.ranks.tolist() == [3]
    assert found.top_ids.tolist() == [[2, 0, 1]]
