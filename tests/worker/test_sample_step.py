"""Sampling, acceptance and device tokens as a graph replays them give what the launches one by one give."""

from __future__ import annotations

import importlib.util
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

from deepinfer.layers.fused.device_rows import Column
from deepinfer.sampling.batch import SamplingBatchBuilder
from deepinfer.sampling.params import SamplingParams
from deepinfer.sampling.sampler import Sampler
from deepinfer.sampling.state import SamplingState
from deepinfer.speculative.drafts import Drafts
from deepinfer.speculative.gumbel_verifier import GumbelVerifier
from deepinfer.worker.device_tokens import DeviceTokens
from deepinfer.worker.graph_set import GraphPool
from deepinfer.worker.step_verifier import Sampling
from tests.worker.draft_support import capture_on_cpu

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the interpreter is not used; see tests/gpu"),
]
VOCAB, SLOTS, DRAFTS, NGRAM, SIZES = 50, 6, 2, 3, (2, 4, 8)
PARAMS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 1.0, "seq_seed": 1},
    {"temperature": 1.5, "top_p": 0.7, "top_k": 20, "seq_seed": 2},
    {"temperature": 0.8, "min_p": 0.1, "seq_seed": 3},
    {"temperature": 2.0, "seq_seed": 4},
)


class Forwards:
    """Graphs of a forward whose trunk is the logits already."""

    def __init__(self) -> None:
        self.trunk = torch.zeros(max(SIZES), VOCAB)
        self.ngrams = torch.full((max(SIZES), NGRAM), -1, dtype=torch.int32)
        self.tables = {size: torch.zeros(len(Column), size, dtype=torch.int32) for size in SIZES}

    def is_captured(self, size: int) -> bool:
        return size in self.tables

    def outputs(self, size: int) -> tuple[Any, ...]:
        return self.trunk[:size], None, self.ngrams[:size], self.tables[size]


def make_runner() -> Any:
    from tests.kernels.interpreter import repair

    repair()
    return SimpleNamespace(
        graphs=SimpleNamespace(graphs=Forwards()),
        device_tokens=DeviceTokens(SLOTS, NGRAM, DRAFTS, torch.device("cpu")),
        device=torch.device("cpu"),
        graph_sizes=SIZES,
        graph_pool=GraphPool(),
        config=SimpleNamespace(vocab_size=VOCAB),
        caches=SimpleNamespace(geometry=SimpleNamespace(num_slots=SLOTS)),
        fused=SimpleNamespace(logits=lambda trunk, read_mix: trunk),
    )


def state_of(**params: Any) -> SamplingState:
    return SamplingState(SamplingParams(**params), [1] * 4, vocab_size=VOCAB)


def sampling_of(slots: list[int], counts: list[int], states: list[SamplingState], size: int | None) -> Sampling:
    chunks = tuple(
        SimpleNamespace(state_slot=slot, num_sampled=count, end=20 * slot + count)
        for slot, count in zip(slots, counts, strict=True)
    )
    result = SimpleNamespace(sample_rows=torch.arange(sum(counts)), samples_every_row=True, graph_size=size)
    owners = [SimpleNamespace(sampling=state, grammar=None) for state in states]
    found = Sampling.of(SimpleNamespace(plan=SimpleNamespace(chunks=chunks), result=result), owners)  # type: ignore[arg-type]
    assert found is not None
    return found


def test_replays_equal_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepinfer.sampling.device_choice import DeviceChoice
    from deepinfer.worker.sample_step import SampleStep

    monkeypatch.setattr(GraphPool, "capture", capture_on_cpu)
    torch.manual_seed(0)
    banned = [7, 30]
    runner = make_runner()
    step = SampleStep(runner, DeviceChoice(VOCAB, banned, runner.device))
    expected = DeviceTokens(SLOTS, NGRAM, DRAFTS, torch.device("cpu"))
    verifier, batches = GumbelVerifier(Sampler(VOCAB, banned_ids=banned)), SamplingBatchBuilder(VOCAB)
    states = {slot: state_of(**PARAMS[slot - 1]) for slot in range(1, SLOTS)}
    # Padding, none, all slots at once, fewer with drafts, other counts, the same again, another order.
    steps = [
        *(([1], [1]), ([1, 2], [1, 1]), ([1, 2, 3, 4, 5], [1] * 5), ([2, 3, 1], [3, 2, 3]), ([2, 3, 1], [1, 3, 1])),
        *(([4], [3]), ([3, 5], [1, 1]), ([3, 5], [1, 1]), ([5, 3], [1, 1]), ([1, 3], [3, 1])),
    ]
    num_accepted = 0
    for slots, counts in steps:
        rows = sum(counts)
        size = min(size for size in SIZES if size >= rows)
        forwards = runner.graphs.graphs
        forwards.trunk.normal_().mul_(3)
        forwards.trunk[rows:] = torch.nan
        forwards.ngrams.random_(0, VOCAB)
        table = forwards.tables[size]
        table.zero_()
        table[Column.POSITION, rows:] = -1
        begin = 0
        for slot, count in zip(slots, counts, strict=True):
            part = slice(begin, begin + count)
            table[Column.POSITION, part] = 20 * slot + torch.arange(count, dtype=torch.int32)
            begin += count
        likely = forwards.trunk[:rows].argmax(-1).to(torch.int32)
        table[Column.TOKEN, :rows] = likely.roll(1)  # the draft that the row before verifies
        sampling = sampling_of(slots, counts, [states[slot] for slot in slots], size)
        assert step.takes(sampling)

        where, count_of = torch.arange(rows), torch.tensor(counts)
        known = expected.sampled_reference(table[:, :rows], where, count_of)
        owners = [states[slot] for slot, count in zip(slots, counts, strict=True) for _ in range(count)]
        batch = batches.build(owners, [0] * rows, None, known.positions)
        wanted = verifier.verify(forwards.trunk[:rows], batch, Drafts(known.drafts, None), count_of)
        expected.advance_reference(torch.tensor(slots), wanted, known.firsts, where, forwards.ngrams[:rows])

        found = step.sample(sampling)
        assert found is not None
        verified, sampled = found
        for name in ("token_ids", "num_accepted", "is_bad", "first_row"):
            assert torch.equal(getattr(verified, name), getattr(wanted, name)), (name, slots, counts)
        assert torch.equal(verified.rows.token_ids, wanted.rows.token_ids)
        for name in ("positions", "firsts", "drafts"):
            assert torch.equal(getattr(sampled, name), getattr(known, name)), name
        for name in ("newest", "next_position", "ngrams"):  # the null slot takes what padding leaves
            assert torch.equal(getattr(runner.device_tokens, name)[1:], getattr(expected, name)[1:]), name
        num_accepted += int(wanted.num_accepted.sum())
    assert num_accepted > 3
    assert step.graphs.num_replays == len(steps)


def test_what_a_graph_does_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepinfer.sampling.device_choice import DeviceChoice
    from deepinfer.worker.sample_step import SampleStep

    def failing(self: GraphPool, run: Any) -> Any:
        raise RuntimeError("no capture")

    runner = make_runner()
    step = SampleStep(runner, DeviceChoice(VOCAB, [], runner.device))

    def takes(size: int | None = 2, **params: Any) -> bool:
        state = state_of(**params)
        return step.takes(sampling_of([1], [1], [state], size))

    assert takes()
    assert takes(temperature=0, stop_token_ids=[3])
    assert not takes(None)
    assert not takes(logprobs=1)
    assert not takes(logit_bias={3: 1.0})
    assert not takes(allowed_token_ids=[3])
    assert not takes(frequency_penalty=0.5)
    assert not takes(min_tokens=40, max_tokens=50, stop_token_ids=[3])
    monkeypatch.setattr(GraphPool, "capture", failing)
    assert step.sample(sampling_of([1], [1], [state_of()], 2)) is None


def test_sizes_without_a_forward_are_not_tried(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from deepinfer.sampling.device_choice import DeviceChoice
    from deepinfer.worker.sample_step import SampleStep

    monkeypatch.setattr(GraphPool, "capture", capture_on_cpu)
    runner = make_runner()
    del runner.graphs.graphs.tables[8]  # what a capture that failed leaves
    step = SampleStep(runner, DeviceChoice(VOCAB, [], runner.device))
    step.graphs.capture_all(False)
    assert [step.graphs.is_captured(size) for size in SIZES] == [True, True, False]
    assert step.graphs.size_for(8) is None
    assert not caplog.records
