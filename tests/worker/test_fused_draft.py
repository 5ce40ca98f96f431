"""Drafting behind verification, in fixed shapes and before the host has seen what was accepted, gives the same drafts.

The function that a graph replays runs here as it is, through Triton's interpreter; replays are imitated.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

from deepinfer.engine.engine import Engine
from deepinfer.sampling.params import SamplingParams
from deepinfer.sampling.sampler import SamplerOutput
from deepinfer.sampling.state import SamplingState
from deepinfer.speculative.draft_sampling import IndependentDraftSampler
from deepinfer.speculative.verification import Verified
from deepinfer.structured.spec import Choice
from deepinfer.worker.graph_set import GraphPool
from tests.engine.support import make_checkpoint, random_ids
from tests.worker.draft_support import capture_on_cpu, drafting_engine, fused_drafter

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the interpreter is not used; see tests/gpu"),
]
NUM_DRAFTS = 2


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Few iterations: the interpreter spends half its time on them.
    return make_checkpoint(tmp_path_factory.mktemp("tiny") / "model", hc_sinkhorn_iters=2)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a draft of one stage, for speed."""
    ratios = (0, 0, 2, 2, 1, 1, 1, 1, 0)
    overrides = {"hc_sinkhorn_iters": 2, "num_nextn_predict_layers": 1, "compress_ratios": ratios}
    return make_checkpoint(tmp_path_factory.mktemp("tiny") / "model", **overrides)


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GraphPool, "capture", capture_on_cpu)


HOT = {"temperature": 3.0, "ignore_eos": True}  # drafts of random weights agree now and then

REQUESTS = (
    # (step at which it arrives, length of the prompt, parameters)
    (0, 9, {"max_tokens": 7, "temperature": 0, "ignore_eos": True}),
    (0, 5, {"max_tokens": 4, "seq_seed": 1, **HOT}),
    (1, 30, {"max_tokens": 5, "seq_seed": 2, "top_p": 0.8, "top_k": 40, **HOT}),
    (2, 2, {"max_tokens": 3, "seq_seed": 3, "min_p": 0.05, **HOT}),
    (4, 1, {"max_tokens": 3, "seq_seed": 4, **HOT, "temperature": 0.7}),
)


class Ways:
    """How the drafts of an engine were made, and what was proposed for whom."""

    def __init__(self, engine: Engine, drafter: Any) -> None:
        self.proposed: list[tuple[int, list[int], list[float]]] = []
        self.behind_host = self.launched = 0
        propose, behind_host, run = engine.worker.slots.propose, drafter.propose, drafter.step.run

        def noted(slots: list[int], drafts: Any, confidence: Any) -> None:
            self.proposed += zip(slots, drafts.tolist(), confidence.tolist(), strict=True)
            propose(slots, drafts, confidence)

        def counted(*arguments: Any) -> Any:
            self.behind_host += 1
            return behind_host(*arguments)

        def counted_run(size: int, choose: Any = None) -> Any:
            self.launched += 1
            return run(size, choose)

        engine.worker.slots.propose = noted  # type: ignore[method-assign]
        drafter.propose = counted
        drafter.step.run = counted_run

    def assert_same(self, expected: Ways) -> None:
        for one, other in zip(self.proposed, expected.proposed, strict=True):
            assert one[:2] == other[:2]
            # Context keys stand at other places among the padding, so a sum may round differently.
            assert np.allclose(one[2], other[2], atol=0.02)


def serve(engine: Engine, requests: Any) -> list[tuple[Any, ...]]:
    """Run requests that arrive while others decode. Returns tokens and acceptance by request."""
    names: list[str] = []
    done: dict[str, tuple[Any, ...]] = {}
    for number in range(100):
        for seed, (arrival, length, values) in enumerate(requests):
            if arrival == number:
                names.append(engine.add_request(random_ids(length, seed=seed), SamplingParams(**values)))
        if len(names) == len(requests) and not engine.has_work():
            break
        for output in engine.step():
            if output.finished:
                assert output.error is None, output.error
                each = output.outputs[0]
                done[output.request_id] = (each.token_ids, each.num_drafts_verified, each.num_drafts_accepted)
        engine.check()
    return [done[name] for name in names]


def run_both(path: Path, requests: Any, sizes: tuple[int, ...] = (), **arguments: Any) -> tuple[Ways, Ways, Any]:
    """Drafts behind a wait for the host, and drafts that follow on the device; results have to be the same."""
    sampler = arguments.pop("draft_sampler", None)
    waiting = drafting_engine(path, NUM_DRAFTS, **arguments)
    drafter = fused_drafter(waiting, path, sampler=sampler)
    drafter.can_follow = lambda *_: False
    one = Ways(waiting, drafter)
    expected = serve(waiting, requests)
    following = drafting_engine(path, NUM_DRAFTS, **arguments)
    drafter = fused_drafter(following, path, sizes, sampler)
    other = Ways(following, drafter)
    assert serve(following, requests) == expected
    other.assert_same(one)
    return one, other, drafter


def test_graphs_draft_what_the_present_path_drafts(stages: Path) -> None:
    """Requests come and go between the steps; batches of 1 to 4, mixed settings, one size is padded."""
    waiting, following, drafter = run_both(stages, REQUESTS, sizes=(1, 2, 4))
    assert waiting.behind_host > 5
    assert following.behind_host == 0
    assert drafter.step.graphs.num_replays == waiting.behind_host
    accepted = [len(drafts) for _, drafts, _ in following.proposed]
    assert set(accepted) == {NUM_DRAFTS}


def test_requests_whose_logits_are_edited_are_launched_and_others_wait_for_the_host(path: Path) -> None:
    edited = ((0, 4, {"max_tokens": 3, "seq_seed": 5, "logit_bias": {7: 30.0, 9: -5.0}, **HOT}),)
    early = ((0, 6, {"max_tokens": 4, "min_tokens": 3, "stop_token_ids": [7, 8, 9], "seq_seed": 6, **HOT}),)
    penalised = ((0, 3, {"max_tokens": 3, "seq_seed": 7, "frequency_penalty": 0.5, **HOT}),)
    constrained = ((0, 3, {"max_tokens": 9, "temperature": 0, "structured": Choice(["no", "yes"])}),)
    for requests, behind_host, can_be_graph in (
        (edited, False, False),
        (early, False, True),  # once the output is past the bans
        (penalised, True, False),
        (constrained, True, False),
    ):
        _, ways, drafter = run_both(path, requests, sizes=(1,))
        assert (ways.behind_host > 0) == behind_host, requests
        assert (drafter.step.graphs.num_replays > 0) == can_be_graph, requests
        assert behind_host or ways.launched > drafter.step.graphs.num_replays


def test_rejection_keeps_what_drafts_were_drawn_from(path: Path) -> None:
    requests = ((0, 4, {"max_tokens": 5, "seq_seed": 5, **HOT}),)
    _, ways, drafter = run_both(path, requests, sampler="rejection", draft_sampler=IndependentDraftSampler)
    assert ways.behind_host == 0
    assert drafter._stored


def verified_of(tokens: list[list[int]], accepted: list[int], bad: list[bool]) -> Verified:
    """Results of a step; only what drafting reads."""
    nothing = torch.empty(0)
    rows = SamplerOutput(nothing, nothing, None, None, None, None, ())
    return Verified(torch.tensor(tokens), torch.tensor(accepted), torch.tensor(bad), nothing, rows, nothing)


class Blocks:
    """A drafter whose rings hold context keys of four sequences in slots 1 to 4, and NaN everywhere else."""

    LENGTHS = (12, 3, 1, 25)

    def __init__(self, path: Path, sizes: tuple[int, ...] = ()) -> None:
        self.engine = drafting_engine(path, NUM_DRAFTS)
        self.drafter = fused_drafter(self.engine, path, sizes)
        self.rings = [layer.window.data for layer in self.engine.runner.caches.draft]
        length, used = self.engine.runner.caches.geometry.ring_length, []
        for slot, count in enumerate(self.LENGTHS, 1):
            used += [slot * length + position % length for position in range(count)]
        for layer in self.engine.runner.caches.draft:
            layer.window.data.fill_(0xFF)
            keys = torch.randn(len(used), self.engine.model_config.text.head_dim, generator=torch.manual_seed(1))
            layer.window.write(torch.tensor(used), layer.window.format.encode(keys.to(torch.float64)))
        vocab = self.engine.model_config.text.vocab_size
        self.owners = [
            SamplingState(SamplingParams(temperature=t, seq_seed=slot), [0], vocab_size=vocab)
            for slot, t in enumerate((0.0, 1.0, 2.0, 3.0))
        ]

    def follow(self, places: list[int], bad: tuple[int, ...] = ()) -> list[tuple[list[int], list[float]]]:
        """Drafts of some of the sequences, each with one draft accepted where it is long enough."""
        accepted = [min(1, self.LENGTHS[place] - 1) for place in places]
        tokens = [[[40 + place, 50 + place, -1][offset] for offset in range(3)] for place in places]
        found = self.drafter.follow(
            [self.owners[place] for place in places],
            [place + 1 for place in places],
            [self.LENGTHS[place] - 1 - count for place, count in zip(places, accepted, strict=True)],
            verified_of(tokens, accepted, [place in bad for place in places]),
        )
        return list(zip(found.token_ids.tolist(), found.confidence.tolist(), strict=True))

    def propose(self, places: list[int]) -> list[tuple[list[int], list[float]]]:
        """The same through the present path."""
        tokens = [[40 + place, 50 + place][: min(2, self.LENGTHS[place])] for place in places]
        anchors = [self.LENGTHS[place] - 1 for place in places]
        owners, slots = [self.owners[place] for place in places], [place + 1 for place in places]
        ids, confidence = self.drafter.propose(owners, [None] * len(places), slots, anchors, tokens)
        return list(zip(ids.tolist(), confidence.tolist(), strict=True))


def test_padding_reads_nothing_and_changes_nothing(path: Path) -> None:
    alone, padded = Blocks(path), Blocks(path, sizes=(4,))
    before = [ring.clone() for ring in padded.rings]
    expected = alone.propose([2, 0, 3])
    for found in (alone.follow([2, 0, 3]), padded.follow([2, 0, 3])):
        for one, other in zip(found, expected, strict=True):
            assert one[0] == other[0]
            assert np.allclose(one[1], other[1], atol=0.02)
    assert padded.drafter.step.graphs.num_replays == 1
    for ring, old in zip(padded.rings, before, strict=True):
        assert torch.equal(ring, old)
    # Another membership of the same size, then a bad request: its row is padding, and the others do not notice.
    assert [each[0] for each in padded.follow([3, 1])] == [each[0] for each in alone.propose([3, 1])]
    assert padded.follow([3, 1, 0], bad=(1,))[::2] == padded.follow([3, 2, 0], bad=(2,))[::2]


def test_a_failed_capture_is_launched(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(self: GraphPool, run: Any) -> Any:
        raise RuntimeError("no capture")

    expected = Blocks(path).follow([0, 1])
    monkeypatch.setattr(GraphPool, "capture", failing)
    blocks = Blocks(path, sizes=(2,))
    assert blocks.follow([0, 1]) == expected
    assert blocks.drafter.step.graphs.num_replays == 0


def test_nothing_is_read_back_while_a_draft_is_launched(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.engine.no_sync import NoSync

    blocks = Blocks(path)
    step = blocks.drafter.step
    # The interpreter itself reads tensors, so the kernels' work is left out: layout, inputs and outputs remain.
    laid_out: list[Any] = []

    def constant(newest: torch.Tensor, block: int, rows: Any, *_: Any) -> Any:
        laid_out.append(rows)
        return _constant(newest, block)

    monkeypatch.setattr(step._model, "draft", constant)
    with NoSync() as guard:
        found = step.draft(
            np.array([[5, 7, 8], [0, 0, 0], [1, 2, 3]], np.int32),
            verified_of([[1, 2, 3]] * 3, [0, 1, 2], [False, True, False]),
        )
    assert not guard.found
    assert found.token_ids.tolist() == [[1, 1], [2, 2], [3, 3]]
    assert laid_out[0].positions.tolist() == [6, 7, -1, -1, 11, 12], "what a bad request drafts reaches no expert"


def _constant(newest: torch.Tensor, block: int) -> Any:
    from deepinfer.models.dspark import Proposal

    ids = newest[:, None].expand(-1, block)
    return Proposal(ids, torch.zeros(ids.shape), None)
