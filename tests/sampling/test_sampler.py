"""The sampler as a whole: its distribution, and that a row depends on nothing but itself."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from deepinfer.sampling import batch as batch_module
from deepinfer.sampling.batch import SamplingBatch, SamplingBatchBuilder
from deepinfer.sampling.logprobs import LOGPROB_FLOOR
from deepinfer.sampling.params import SamplingParams
from deepinfer.sampling.random import gumbel_noise
from deepinfer.sampling.sampler import Sampler, SamplerOutput
from deepinfer.sampling.state import SamplingState
from tests.sampling.reference import chi_square, chi_square_bound, naive_distribution

VOCAB = 200
MIXES = [
    {},
    {"temperature": 0},
    {"temperature": 0.6},
    {"temperature": 1.7, "top_p": 0.9},
    {"top_k": 5},
    {"top_p": 0.8, "top_k": 20, "logprobs": 3},
    {"min_p": 0.05},
    {"min_p": 0.02, "top_p": 0.95, "logprobs": True},
    {"temperature": 0, "logprobs": 5},
    {"logprobs": 20, "logprobs_mode": "raw"},
    {"temperature": 0.8, "repetition_penalty": 1.2, "presence_penalty": 0.3, "logprobs": 2},
    {"logit_bias": {3: 5.0, 4: -100.0}, "logprobs": 0},
    {"allowed_token_ids": [1, 50, 199], "logprobs": 4},
    {"min_tokens": 5, "stop_token_ids": [9, 10], "top_p": 0.99},
    {"golden_token_ids": [17, -1], "logprobs": 1},
]


def _state(vocab_size=VOCAB, output=(), seed=1234, **values) -> SamplingState:
    return SamplingState(SamplingParams(**values), [1, 2, 3], vocab_size=vocab_size, seed=seed, output_ids=output)


def _sample(states, logits, positions=None, **options) -> SamplerOutput:
    positions = positions or [state.next_position for state in states]
    return Sampler(logits.shape[1], **options).sample(logits, SamplingBatch.build(states, positions))


def _assert_same_row(one: SamplerOutput, row: int, other: SamplerOutput, other_row: int) -> None:
    assert one.token_ids[row] == other.token_ids[other_row]
    assert one.is_bad[row] == other.is_bad[other_row]
    if one.logprobs is not None and other.logprobs is not None:
        torch.testing.assert_close(one.logprobs[row], other.logprobs[other_row], rtol=0, atol=0, equal_nan=True)
        assert one.ranks[row] == other.ranks[other_row]
        assert one.alternatives(row) == other.alternatives(other_row)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.5},
        {"top_k": 3},
        {"top_p": 0.7},
        {"top_p": 0.6, "temperature": 1.5, "top_k": 5},
        {"min_p": 0.15},
        {"min_p": 0.1, "top_p": 0.8, "top_k": 6, "temperature": 1.2},
    ],
)
def test_draws_follow_the_distribution(values):
    logits = torch.tensor([2.1, 1.3, 1.3, 0.2, -0.5, 3.0, -2.0, 0.9, -math.inf, -7.0])
    draws = 20_000
    state = _state(vocab_size=10, **values)
    found = _sample([state] * draws, logits.expand(draws, 10), positions=list(range(3, 3 + draws)))
    counts = torch.bincount(found.token_ids, minlength=10).tolist()
    expected = naive_distribution(logits.double().tolist(), state.params)
    assert all(count == 0 for count, probability in zip(counts, expected, strict=True) if probability == 0)
    statistic, freedom = chi_square(counts, expected)
    assert statistic < chi_square_bound(freedom)


def test_draws_over_seeds_follow_the_distribution_too():
    logits = torch.randn(30) * 1.5
    states = [_state(vocab_size=30, seed=seed) for seed in range(20_000)]
    found = _sample(states, logits.expand(20_000, 30))
    counts = torch.bincount(found.token_ids, minlength=30).tolist()
    statistic, freedom = chi_square(counts, naive_distribution(logits.double().tolist(), SamplingParams()))
    assert statistic < chi_square_bound(freedom)


def test_token_is_the_argmax_of_log_probability_plus_noise():
    logits = torch.randn(5, VOCAB) * 2
    states = [_state(seed=seed, temperature=0.7) for seed in range(5)]
    seeds, positions = torch.arange(5), torch.full((5,), 3)
    expected = ((logits / 0.7).log_softmax(-1) + gumbel_noise(seeds, positions, VOCAB)).argmax(-1)
    assert torch.equal(_sample(states, logits).token_ids, expected)


def test_crowd_split_and_order_change_no_bit(monkeypatch):
    monkeypatch.setattr(batch_module, "_GROUP_ELEMENTS_CPU", 3 * VOCAB)
    rows = 4 * len(MIXES)
    states = [_state(seed=row, output=[5, 6] * (row % 3), **MIXES[row % len(MIXES)]) for row in range(rows)]
    logits = torch.randn(rows, VOCAB) * 3
    logits[::4] = logits[::4].round()  # ties
    crowd = _sample(states, logits)
    order = torch.randperm(rows).tolist()
    shuffled = _sample([states[row] for row in order], logits[order])
    for place, row in enumerate(order):
        _assert_same_row(crowd, row, shuffled, place)
    for size in (1, 7):
        for start in range(0, rows, size):
            part = _sample(states[start : start + size], logits[start : start + size])
            for row in range(start, min(start + size, rows)):
                _assert_same_row(crowd, row, part, row - start)


def test_seed_and_position_decide():
    logits = torch.randn(1, VOCAB).expand(40, VOCAB)
    same = _sample([_state(seed=-7)] * 40, logits, positions=[11] * 40).token_ids
    assert same.unique().numel() == 1
    assert _sample([_state(seed=-7)] * 40, logits, positions=list(range(40))).token_ids.unique().numel() > 10
    assert _sample([_state(seed=seed) for seed in range(40)], logits).token_ids.unique().numel() > 10


def test_verification_rows_give_what_single_steps_give():
    params = {"temperature": 0.9, "top_p": 0.95, "repetition_penalty": 1.3, "min_tokens": 3, "logprobs": 2}
    logits = torch.randn(6, VOCAB) * 2
    lone = _state(**params)
    singles = []
    for row in range(6):
        singles.append(_sample([lone], logits[row : row + 1]))
        lone.append(singles[-1].token_ids.tolist())
    start = _state(**params)
    pending = [lone.output_ids[:row] for row in range(6)]
    block = SamplingBatchBuilder(VOCAB).build([start] * 6, [3 + row for row in range(6)], pending)
    together = Sampler(VOCAB).sample(logits, block)
    for row in range(6):
        _assert_same_row(together, row, singles[row], 0)


def test_greedy_takes_the_lowest_id_among_equals():
    logits = torch.zeros(3, VOCAB)
    logits[1, [150, 20, 90]] = 2.0
    logits[2] = -5.0
    logits[2, -1] = -4.0
    found = _sample(
        [_state(temperature=0), _state(temperature=1e-6, top_k=3, top_p=0.1), _state(temperature=0)], logits
    )
    assert found.token_ids.tolist() == [0, 20, VOCAB - 1]


def test_sampled_ties_go_to_the_lowest_id():
    rows, seed = 400, 1234
    positions = torch.arange(rows)
    noise = gumbel_noise(torch.full((rows,), seed), positions, 8)
    logits = torch.full((rows, 8), -math.inf)
    logits[:, 2] = 0.0
    logits[:, 5] = noise[:, 2] - noise[:, 5]  # token 5 catches up with token 2, up to rounding
    keys = (logits - logits.amax(-1, keepdim=True)) + noise
    is_tie = keys[:, 2] == keys[:, 5]
    assert is_tie.sum() > 50
    for values in ({}, {"top_k": 4}):
        found = _sample([_state(vocab_size=8, seed=seed, **values)] * rows, logits, positions=positions.tolist())
        assert found.token_ids[is_tie].unique().tolist() == [2]
        assert found.token_ids[~is_tie].tolist() == torch.where(keys[:, 2] > keys[:, 5], 2, 5)[~is_tie].tolist()


@pytest.mark.parametrize("poison", ["one nan", "all nan", "+inf", "all -inf"])
def test_bad_row_is_flagged_and_its_neighbours_keep_their_bits(poison):
    rows = len(MIXES)
    states = [_state(seed=row, **MIXES[row]) for row in range(rows)]
    logits = torch.randn(rows, VOCAB) * 3
    clean = _sample(states, logits)
    assert not clean.is_bad.any()
    for bad in range(rows):
        poisoned = logits.clone()
        if poison == "one nan":
            poisoned[bad, 77] = math.nan
        elif poison == "+inf":
            poisoned[bad, 77] = math.inf
        else:
            poisoned[bad] = math.nan if poison == "all nan" else -math.inf
        found = _sample(states, poisoned)
        assert found.is_bad.nonzero().flatten().tolist() == [bad]
        assert found.token_ids[bad] == 0
        if states[bad].params.wants_logprobs:
            assert found.logprobs[bad] == LOGPROB_FLOOR
            assert found.ranks[bad] == 0
            assert all(value == LOGPROB_FLOOR for _token, value in found.alternatives(bad))
        for row in range(rows):
            if row != bad:
                _assert_same_row(clean, row, found, row)


def test_nan_hidden_behind_a_mask_is_still_an_error():
    logits = torch.randn(2, VOCAB)
    logits[0, 8] = math.nan
    found = _sample([_state(allowed_token_ids=[1]), _state(allowed_token_ids=[1])], logits)
    assert found.is_bad.tolist() == [True, False]
    assert found.token_ids.tolist() == [0, 1]


def test_masks_that_leave_nothing_fail_that_row_only():
    states = [_state(allowed_token_ids=[9], min_tokens=1, stop_token_ids=[9]), _state(temperature=0)]
    logits = torch.randn(2, VOCAB)
    found = _sample(states, logits)
    assert found.is_bad.tolist() == [True, False]
    assert found.token_ids[1] == logits[1].argmax()


def test_forced_tokens_are_taken_and_scored():
    logits = torch.randn(4, VOCAB)
    values = {"golden_token_ids": [7, -1, 9], "logprobs": 0}
    state = _state(**values)
    greedy = _state(temperature=0, **values)
    found = _sample([state, state, state, greedy], logits, positions=[3, 4, 5, 3])
    free = _sample([_state(logprobs=0)] * 3, logits[:3], positions=[3, 4, 5])
    assert found.token_ids.tolist() == [7, free.token_ids[1], 9, 7]
    expected = logits.log_softmax(-1)
    for row in range(4):
        token = found.token_ids[row]
        assert found.logprobs[row].item() == pytest.approx(expected[row, token].item(), abs=1e-5)
        assert found.ranks[row] == 1 + (logits[row] > logits[row, token]).sum()


def test_forced_token_outside_the_nucleus_has_the_floor():
    logits = torch.zeros(1, VOCAB)
    logits[0, 3] = 9.0
    found = _sample([_state(golden_token_ids=[8], top_k=1, logprobs=2)], logits)
    assert found.token_ids.tolist() == [8]
    assert found.logprobs.tolist() == [LOGPROB_FLOOR]
    assert found.alternatives(0) == [(3, 0.0), (0, LOGPROB_FLOOR)]


def test_banned_ids_are_never_sampled():
    logits = torch.zeros(500, VOCAB)
    logits[:, [3, 4]] = 8.0
    found = _sample([_state()] * 500, logits, positions=list(range(500)), banned_ids=[3])
    assert 3 not in found.token_ids.tolist()
    assert found.token_ids.tolist().count(4) > 400


def test_positions_may_be_replaced_on_the_device():
    logits = torch.randn(1, VOCAB)
    planned = SamplingBatch.build([_state()], [3])
    corrected = dataclasses.replace(planned, positions=torch.tensor([6]))
    expected = Sampler(VOCAB).sample(logits, SamplingBatch.build([_state()], [6]))
    assert Sampler(VOCAB).sample(logits, corrected).token_ids == expected.token_ids


def test_logits_of_the_wrong_shape_are_an_internal_error():
    batch = SamplingBatch.build([_state()], [3])
    for logits in (torch.zeros(2, VOCAB), torch.zeros(1, VOCAB + 1), torch.zeros(1, VOCAB, dtype=torch.float64)):
        with pytest.raises(AssertionError):
            Sampler(VOCAB).sample(logits, batch)


def test_empty_batch_gives_no_tokens():
    found = Sampler(VOCAB).sample(torch.zeros(0, VOCAB), SamplingBatchBuilder(VOCAB).build([], []))
    assert found.token_ids.shape == (0,)
    assert found.logprobs is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gpu_gives_the_tokens_of_the_cpu_and_never_synchronises():
    states = [_state(seed=row, **MIXES[row % len(MIXES)]) for row in range(4 * len(MIXES))]
    logits = torch.randn(len(states), VOCAB) * 3
    expected = _sample(states, logits)
    cuda = torch.device("cuda")
    sampler, builder = Sampler(VOCAB, device=cuda), SamplingBatchBuilder(VOCAB, device=cuda)
    positions = [state.next_position for state in states]
    on_gpu = logits.to(cuda)
    sampler.sample(on_gpu, builder.build(states, positions))  # tables and libraries load here
    batch = builder.build(states, positions)
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = sampler.sample(on_gpu, batch)
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    assert torch.equal(found.cpu().token_ids, expected.token_ids)
    torch.testing.assert_close(found.cpu().logprobs, expected.logprobs, rtol=1e-5, atol=1e-5, equal_nan=True)
