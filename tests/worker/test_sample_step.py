"""Sampling, acceptance and device tokens as a graph replays them give what the launches one by one give."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
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
from deepinfer.worker.worker import Worker
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

    def __init__(self, ngram: int) -> None:
        self.trunk = torch.zeros(max(SIZES), VOCAB)
        self.ngrams = torch.full((max(SIZES), ngram), -1, dtype=torch.int32) if ngram else None
        self.tables = {size: torch.zeros(len(Column), size, dtype=torch.int32) for size in SIZES}

    def is_captured(self, size: int) -> bool:
        return size in self.tables

    def outputs(self, size: int) -> tuple[Any, ...]:
        ngrams = None if self.ngrams is None else self.ngrams[:size]
        return self.trunk[:size], None, ngrams, self.tables[size]


def make_runner(drafts: int = DRAFTS, ngram: int = NGRAM) -> Any:
    from tests.kernels.interpreter import repair

    repair()
    return SimpleNamespace(
        graphs=SimpleNamespace(graphs=Forwards(ngram)),
        device_tokens=DeviceTokens(SLOTS, ngram, drafts, torch.device("cpu")),
        device=torch.device("cpu"),
        graph_sizes=SIZES,
        graph_pool=GraphPool(),
        config=SimpleNamespace(vocab_size=VOCAB),
        caches=SimpleNamespace(geometry=SimpleNamespace(num_slots=SLOTS)),
        fused=SimpleNamespace(logits=lambda trunk, read_mix: trunk),
    )


def state_of(**params: Any) -> SamplingState:
    return SamplingState(SamplingParams(**params), [1] * 4, vocab_size=VOCAB)


def sampling_of(
    slots: list[int], counts: list[int], states: Sequence[SamplingState | None], size: int | None
) -> Sampling:
    chunks = tuple(
        SimpleNamespace(state_slot=slot, num_sampled=count, end=20 * slot + count)
        for slot, count in zip(slots, counts, strict=True)
    )
    result = SimpleNamespace(sample_rows=torch.arange(sum(counts)), samples_every_row=True, graph_size=size)
    owners = [None if state is None else SimpleNamespace(sampling=state, grammar=None) for state in states]
    found = Sampling.of(SimpleNamespace(plan=SimpleNamespace(chunks=chunks), result=result), owners)  # type: ignore[arg-type]
    assert found is not None
    return found


class Twins:
    """The function as a graph replays it, and what it stands for, on the same forwards."""

    def __init__(self, drafts: int = DRAFTS, ngram: int = NGRAM) -> None:
        from deepinfer.sampling.device_choice import DeviceChoice
        from deepinfer.worker.sample_step import SampleStep

        torch.manual_seed(0)
        banned = [7, 30]
        self.runner = make_runner(drafts, ngram)
        self.step = SampleStep(self.runner, DeviceChoice(VOCAB, banned, self.runner.device))
        self.expected = DeviceTokens(SLOTS, ngram, drafts, torch.device("cpu"))
        self.verifier = GumbelVerifier(Sampler(VOCAB, banned_ids=banned))
        self.batches = SamplingBatchBuilder(VOCAB)
        self.num_accepted = self.num_bad = 0

    def forward(self, slots: list[int], counts: list[int], size: int, bad_rows: Sequence[int]) -> None:
        """Random logits and drafts that often stand; padding holds what nobody may see."""
        forwards, rows = self.runner.graphs.graphs, sum(counts)
        forwards.trunk.normal_().mul_(3)
        likely = forwards.trunk[:rows].argmax(-1).to(torch.int32)
        forwards.trunk[[*bad_rows, *range(rows, size)]] = torch.nan
        if forwards.ngrams is not None:
            forwards.ngrams.random_(0, VOCAB)
        table = forwards.tables[size]
        table.zero_()
        table[Column.POSITION, rows:] = -1
        begin = 0
        for slot, count in zip(slots, counts, strict=True):
            part = slice(begin, begin + count)
            table[Column.POSITION, part] = 20 * slot + torch.arange(count, dtype=torch.int32)
            begin += count
        table[Column.TOKEN, :rows] = likely.roll(1)  # the draft that the row before verifies

    def compare(
        self,
        slots: list[int],
        counts: list[int],
        states: dict[int, SamplingState],
        bad_rows: Sequence[int] = (),
        size: int | None = None,
    ) -> None:
        """One step both ways. ``states``: by slot. ``size``: of the graph, default the smallest."""
        rows = sum(counts)
        size = size or min(size for size in SIZES if size >= rows)
        self.forward(slots, counts, size, bad_rows)
        forwards = self.runner.graphs.graphs
        sampling = sampling_of(slots, counts, [states[slot] for slot in slots], size)
        assert self.step.takes(sampling)

        where, count_of = torch.arange(rows), torch.tensor(counts)
        known = self.expected.sampled_reference(forwards.tables[size][:, :rows], where, count_of)
        owners = [states[slot] for slot, count in zip(slots, counts, strict=True) for _ in range(count)]
        batch = self.batches.build(owners, [0] * rows, None, known.positions)
        wanted = self.verifier.verify(forwards.trunk[:rows], batch, Drafts(known.drafts, None), count_of)
        ngrams = None if forwards.ngrams is None else forwards.ngrams[:rows]
        self.expected.advance_reference(torch.tensor(slots), wanted, known.firsts, where, ngrams)

        found = self.step.sample(sampling)
        assert found is not None
        verified, sampled = found
        for name in ("token_ids", "num_accepted", "is_bad", "first_row"):
            assert torch.equal(getattr(verified, name), getattr(wanted, name)), (name, slots, counts)
        assert torch.equal(verified.rows.token_ids, wanted.rows.token_ids)
        for name in ("positions", "firsts", "drafts"):
            assert torch.equal(getattr(sampled, name), getattr(known, name)), name
        for name in ("newest", "next_position", "ngrams"):  # the null slot takes what padding leaves
            mine, other = getattr(self.runner.device_tokens, name), getattr(self.expected, name)
            assert torch.equal(mine[1:], other[1:]), name
        self.num_accepted += int(wanted.num_accepted.sum())
        self.num_bad += int(wanted.is_bad.sum())


@pytest.mark.parametrize(("drafts", "ngram"), [(DRAFTS, NGRAM), (DRAFTS, 0), (0, NGRAM), (0, 0)])
def test_replays_equal_launches(monkeypatch: pytest.MonkeyPatch, drafts: int, ngram: int) -> None:
    monkeypatch.setattr(GraphPool, "capture", capture_on_cpu)
    twins = Twins(drafts, ngram)
    states = {slot: state_of(**PARAMS[slot - 1]) for slot in range(1, SLOTS)}
    # Padding, none, all slots at once, fewer with drafts, other counts, the same again, another order.
    steps = [
        *(([1], [1]), ([1, 2], [1, 1]), ([1, 2, 3, 4, 5], [1] * 5), ([2, 3, 1], [3, 2, 3]), ([2, 3, 1], [1, 3, 1])),
        *(([4], [3]), ([3, 5], [1, 1]), ([3, 5], [1, 1]), ([5, 3], [1, 1]), ([1, 3], [3, 1])),
    ]
    for slots, counts in steps:
        twins.compare(slots, [min(count, 1 + drafts) for count in counts], states)
    twins.compare([3, 5], [1, 1], states, size=8)  # where smaller graphs could not be captured
    assert not drafts or twins.num_accepted > 3
    assert twins.step.graphs.num_replays == len(steps) + 1


def test_bad_rows_end_what_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GraphPool, "capture", capture_on_cpu)
    twins = Twins()
    states = {slot: state_of(temperature=0) for slot in range(1, SLOTS)}
    for bad_rows in ([0], [1], [2], [4], [0, 5], [2, 6]):
        twins.compare([2, 3, 1], [3, 2, 3], states, bad_rows)
    assert twins.num_bad >= 6
    assert twins.num_accepted > 3


def test_parameters_are_those_of_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where another takes the same slot and row, with the same seed."""
    monkeypatch.setattr(GraphPool, "capture", capture_on_cpu)
    twins = Twins()
    for params in ({"temperature": 3.0}, {"temperature": 0}, {"temperature": 3.0, "top_k": 2}, {"temperature": 3.0}):
        for _ in range(3):
            twins.compare([2, 4], [2, 1], {2: state_of(seq_seed=5, **params), 4: state_of(seq_seed=5, top_p=0.5)})


def test_a_capture_that_fails_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """It clears the inputs; the next step fills them again, and its own sizes are launched one by one."""
    failing: set[int] = set()

    def capture(pool: GraphPool, run: Any) -> Any:
        found = capture_on_cpu(pool, run)
        if len(found[1].positions) in failing:
            raise RuntimeError("no capture")
        return found

    monkeypatch.setattr(GraphPool, "capture", capture)
    failing |= {4}
    twins = Twins()
    states = {slot: state_of(temperature=0) for slot in range(1, SLOTS)}
    twins.compare([1, 2], [1, 1], states)
    twins.forward([1, 2, 3], [1, 1, 1], 4, ())
    sampling = sampling_of([1, 2, 3], [1, 1, 1], [states[slot] for slot in (1, 2, 3)], 4)
    assert twins.step.graphs.size_for(4) == 8  # a larger one, whose forward did not run
    assert twins.step.sample(sampling) is None
    twins.compare([1, 2], [1, 1], states)


def test_the_worker_takes_the_graph_where_it_can() -> None:
    taken = SimpleNamespace(takes=lambda sampling: sampling == "plain", sample=lambda sampling: ("graph", sampling))
    verifier = SimpleNamespace(
        sampled_rows=lambda sampling, tokens: SimpleNamespace(firsts=0), verify=lambda sampling, sampled: "launches"
    )
    sampling: Any = SimpleNamespace(
        slots=[1], rows=torch.zeros(1), step=SimpleNamespace(result=SimpleNamespace(ngram_ids=None))
    )
    advanced: list[Any] = []
    tokens: Any = SimpleNamespace(advance=lambda *values: advanced.append(values))
    worker: Any = SimpleNamespace(sample_step=taken, _verifier=verifier)
    assert Worker._choose(worker, "plain", tokens) == ("graph", "plain")  # type: ignore[arg-type]
    assert not advanced
    assert Worker._choose(worker, sampling, tokens)[0] == "launches"  # type: ignore[comparison-overlap]
    assert len(advanced) == 1
    taken.takes, taken.sample = lambda sampling: True, lambda sampling: None  # no graph of this size
    assert Worker._choose(worker, sampling, tokens)[0] == "launches"  # type: ignore[comparison-overlap]
    worker.sample_step = None
    assert Worker._choose(worker, sampling, tokens)[0] == "launches"  # type: ignore[comparison-overlap]
    assert len(advanced) == 3


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
    assert not takes(golden_token_ids=[3])
    # The first sampled row is at position 20, behind a prompt of 4: its token is output number 17.
    assert takes(min_tokens=17, max_tokens=50, stop_token_ids=[3])
    assert not takes(min_tokens=18, max_tokens=50, stop_token_ids=[3])
    with_grammar = sampling_of([1], [1], [state_of()], 2)
    with_grammar.owners[0].grammar = object()  # type: ignore[misc]
    assert not step.takes(with_grammar)
    assert not step.takes(sampling_of([1, 2, 3], [1, 1, 1], [state_of(), None, state_of()], 4))  # one has ended
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
