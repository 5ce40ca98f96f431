"""State and builder: pure functions of the request, cheap to build every step."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from deepinfer.sampling.batch import Kind, SamplingBatch, SamplingBatchBuilder
from deepinfer.sampling.params import SamplingParams
from deepinfer.sampling.random import child_seed
from deepinfer.sampling.state import SamplingState
from deepinfer.sampling.token_counts import TokenCounts

VOCAB = 100


def _state(prompt=(1, 2, 3), output=(), **values) -> SamplingState:
    return SamplingState(SamplingParams(**values), prompt, vocab_size=VOCAB, output_ids=output)


def _snapshot(counts: TokenCounts, pending=()) -> dict[int, int]:
    ids, numbers = counts.snapshot(pending)
    assert len(set(ids.tolist())) == len(ids)
    return dict(zip(ids.tolist(), numbers.tolist(), strict=True))


def test_rollback_and_replay_give_the_same_state():
    rng = np.random.default_rng(3)
    state = _state(repetition_penalty=1.1, seq_seed=4)
    output: list[int] = []
    for _ in range(300):
        if rng.random() < 0.7 or not output:
            tokens = rng.integers(0, VOCAB, size=rng.integers(1, 6)).tolist()
            state.append(tokens)
            output += tokens
        else:
            keep = int(rng.integers(max(0, len(output) - 6), len(output) + 1))
            state.rollback(keep)
            del output[keep:]
        state.check()
        assert state.output_ids == output
        assert state.next_position == 3 + len(output)
    replayed = _state(output=output, repetition_penalty=1.1, seq_seed=4)
    assert _snapshot(state.counts) == _snapshot(replayed.counts)
    assert state.seed == replayed.seed


def test_counts_ignore_what_is_no_token_and_grow():
    counts = TokenCounts(VOCAB, [5, 5, -1, VOCAB, VOCAB + 4, 7])
    assert _snapshot(counts) == {5: 0, 7: 0}
    for token in list(range(VOCAB)) * 2:
        counts.add(token)
    assert _snapshot(counts) == dict.fromkeys(range(VOCAB), 2)
    assert _snapshot(counts, [3, 3])[3] == 4
    assert _snapshot(counts)[3] == 2


def test_check_finds_a_wrong_count():
    state = _state(presence_penalty=1.0, output=[4, 5])
    state.check()
    state.counts.add(9)
    with pytest.raises(AssertionError, match="9"):
        state.check()


def test_token_outside_the_vocabulary_is_an_internal_error():
    with pytest.raises(AssertionError):
        _state().append([VOCAB])
    with pytest.raises(AssertionError):
        _state().append([-1])


def test_seed_comes_from_the_parameters_or_the_engine_or_chance():
    assert _state(seq_seed=-1).seed == 2**64 - 1
    assert _state(seq_seed=-1).seed_int64 == -1
    assert SamplingState(SamplingParams(seq_seed=3), [1], vocab_size=9, seed=8).seed == 8
    assert _state().seed != _state().seed
    parent = _state(seq_seed=6, n=3)
    assert [parent.child(index, [1, 2, 3]).seed for index in range(3)] == [child_seed(6, index) for index in range(3)]


def test_golden_tokens_by_position():
    state = _state(golden_token_ids=[7, -1, 9])
    assert [state.golden_at(position) for position in range(2, 8)] == [-1, 7, -1, 9, -1, -1]
    batch = SamplingBatch.build([state, _state(), state], [3, 3, 5])
    assert batch.forced.tolist() == [7, -1, 9]
    assert SamplingBatch.build([_state()], [3]).forced is None


def test_same_membership_reuses_the_constants_and_a_new_one_does_not():
    builder = SamplingBatchBuilder(VOCAB)
    states = [_state(temperature=0.5 + index) for index in range(4)]
    first = builder.build(states, [3] * 4)
    second = builder.build(states, [4] * 4)
    assert second.constants is first.constants
    assert second.positions.tolist() == [4] * 4
    other = builder.build(states[::-1], [4] * 4)
    assert other.constants is not first.constants
    assert other.constants.groups[0].temperature[:, 0].tolist() == [3.5, 2.5, 1.5, 0.5]
    assert builder.build(states[:2], [4] * 2).constants.groups[0].temperature[:, 0].tolist() == [0.5, 1.5]


def test_cache_stays_small():
    builder = SamplingBatchBuilder(VOCAB)
    for _ in range(50):
        builder.build([_state()], [3])
    assert len(builder._remembered) <= 4


def test_rows_are_grouped_by_what_they_need():
    states = [
        _state(temperature=0),
        _state(),
        _state(top_k=VOCAB),  # no truncation: the whole vocabulary
        _state(top_p=0.5),
        _state(top_k=3, logprobs=2),
        _state(min_p=0.2, logprobs=4, logprobs_mode="raw"),
    ]
    constants = SamplingBatch.build(states, [3] * 6).constants
    kinds = {(group.kind, group.wants_logprobs): group for group in constants.groups}
    assert set(kinds) == {(Kind.GREEDY, False), (Kind.FULL, False), (Kind.TRUNCATED, False), (Kind.TRUNCATED, True)}
    assert kinds[Kind.FULL, False].rows.tolist() == [1, 2, 5]
    assert kinds[Kind.FULL, False].temperature is None
    assert kinds[Kind.TRUNCATED, True].rows == slice(4, 5)
    assert kinds[Kind.TRUNCATED, True].max_top_k == 3
    assert kinds[Kind.TRUNCATED, True].num_top == 2
    assert constants.raw_groups == ((slice(5, 6), 4),)
    assert constants.top_counts == (0, 0, 0, 0, 2, 4)


def test_every_logprob_overrides_what_requests_asked():
    batch = SamplingBatchBuilder(VOCAB, every_logprob=True).build([_state(), _state(temperature=0)], [3, 3])
    assert all(group.wants_logprobs for group in batch.constants.groups)


def test_request_without_bans_costs_nothing():
    assert _state(stop_token_ids=[4]).early_bans == ()
    constants = SamplingBatch.build([_state(), _state(min_tokens=1)], [3, 3]).constants
    assert constants.early_rows == (1,)
    assert SamplingBatch.build([_state(min_tokens=1)], [4]).early is None


def test_empty_batch():
    batch = SamplingBatchBuilder(VOCAB).build([], [])
    assert batch.num_rows == 0
    assert batch.constants.groups == ()


def test_building_for_32_plain_requests_is_cheap():
    builder = SamplingBatchBuilder(129_280)
    params = SamplingParams(temperature=0.7, top_p=0.9)
    states = [SamplingState(params, range(1000), vocab_size=129_280) for _ in range(32)]
    positions = [state.next_position for state in states]
    builder.build(states, positions)
    best_s = min(_time_s(lambda: builder.build(states, positions)) for _ in range(30))
    assert best_s < 0.3e-3


def _time_s(call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def test_positions_reach_the_device_as_int64():
    batch = SamplingBatch.build([_state()], [2**40])
    assert batch.positions.dtype == torch.int64
    assert batch.positions.tolist() == [2**40]
