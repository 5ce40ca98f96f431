"""A step that is padded to the size of a graph gives what its launches give, and so does one whose capture failed."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

from deepinfer.layers.fused.device_rows import Column
from deepinfer.messages import Chunk, StepPlan
from deepinfer.worker import fused_runner as fused_runner_module
from deepinfer.worker.device_step import HostTable
from deepinfer.worker.forward_graphs import ForwardGraphs
from deepinfer.worker.graph_set import GraphPool
from deepinfer.worker.step_verifier import Sampling
from tests.engine.support import chunk_of, make_checkpoint, make_engine, random_ids
from tests.worker.draft_support import capture_on_cpu
from tests.worker.test_fused_model import fused_runner

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the interpreter is not used; see tests/gpu"),
]


def test_graph_and_failed_capture_give_what_launches_give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(self: GraphPool, run: Any) -> Any:
        raise RuntimeError("no capture")

    path = make_checkpoint(tmp_path / "model", hc_sinkhorn_iters=2)
    engine = make_engine(path, num_speculative_tokens=0)
    runner, ids = fused_runner(engine, path), random_ids(3)
    runner.fused.layers = runner.fused.layers[:5]  # for speed
    plans = [StepPlan(0, (chunk_of(ids, 0, 1, (5,), slot),)) for slot in (1, 2, 3)]
    expected = runner.run(plans[0]).sample_logits()
    monkeypatch.setattr(GraphPool, "capture", capture_on_cpu)
    runner.graphs = ForwardGraphs(runner, (2,), 4, runner.graph_pool)
    result = runner.run(plans[1])
    assert torch.equal(result.sample_logits(), expected)
    assert result.samples_every_row
    assert torch.equal(result.row_logits(slice(None)), expected)
    assert runner.graphs.graphs.num_replays == 1
    monkeypatch.setattr(GraphPool, "capture", failing)
    runner.graphs = ForwardGraphs(runner, (2,), 4, runner.graph_pool)
    assert torch.equal(runner.run(plans[2]).sample_logits(), expected)
    assert runner.graphs.graphs.num_replays == 0


def test_a_graph_takes_chunks_of_any_length_beside_decoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step launched in one pair of state slots and replayed in another leaves the same in rings and blocks."""
    path = make_checkpoint(tmp_path / "model", hc_sinkhorn_iters=2)
    runner = fused_runner(make_engine(path, num_speculative_tokens=0), path)
    runner.fused.layers = runner.fused.layers[:5]  # for speed; windows and both ratios are among them
    monkeypatch.setattr(GraphPool, "capture", capture_on_cpu)
    geometry, ids, other = runner.caches.geometry, random_ids(8), random_ids(1, seed=1)

    def step(first: int, second: int) -> Tensor:
        def chunk(tokens: list[int], slot: int, is_prefill: bool) -> Chunk:
            made = chunk_of(tokens, 0, len(tokens), (slot + 4,), slot, str(slot))
            return made._replace(is_prefill=is_prefill, num_sampled=1)

        # Eight rows are more than the rings have to spare.
        return runner.run(StepPlan(0, (chunk(other, second, False), chunk(ids, first, True)))).sample_logits()

    expected = step(1, 2)
    graphs = ForwardGraphs(runner, (10,), 4, runner.graph_pool, "prompts", keys_first=False)
    runner.prompt_graphs = graphs
    assert torch.equal(step(3, 4), expected)
    assert graphs.graphs.num_replays == 1
    assert sum(layer.entries is not None for layer in runner.caches.layers[:5]) == 2
    for layer in runner.caches.layers[:5]:
        by_slot = [layer.window.data, layer.pairs]
        by_block = [store.data for store in (layer.entries, layer.index_keys) if store is not None]
        for data in [each for each in by_slot if each is not None]:
            parts = data.view(torch.uint8).unflatten(0, (geometry.num_slots, -1))
            assert parts[1].any()
            assert torch.equal(parts[3:5], parts[1:3])
        for data in by_block:
            parts = data.unflatten(0, (geometry.num_blocks, -1))
            assert parts[5].any()
            assert torch.equal(parts[7:9], parts[5:7])


def test_steps_that_scan_much_are_launched(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "model")
    runner, replayed = fused_runner(make_engine(path, num_speculative_tokens=0), path), []
    runner.prompt_graphs = SimpleNamespace(replay=lambda host, ngrams: replayed.append(host) or ("outputs", 512))
    most = fused_runner_module.MAX_SCANNED // 128
    for rows, blocks, is_cut, is_replayed in (
        (512, most // 512, False, True),
        (512, most // 512 + 1, False, False),
        (1, most, False, True),
        (16, 3, True, False),
    ):
        host = HostTable(np.zeros((len(Column), rows), np.int32), np.zeros((1, blocks), np.int32), np.zeros(1))
        assert (runner._replay_prompt(host, None, is_cut) is not None) == is_replayed
    assert len(replayed) == 2


class EchoRunner:
    """A runner whose forward gives back what it was given."""

    device, ngram_size = torch.device("cpu"), 0

    def move(self, array: Any) -> Tensor:
        return torch.from_numpy(array).clone()

    def step_of(self, table: Tensor, tables: Tensor, ngrams: None, keys_first: bool) -> Any:
        return SimpleNamespace(table=table, tables=tables, ngram_ids=None)

    def forward(self, step: Any) -> tuple[Tensor, Tensor]:
        return step.table.T.clone(), step.tables.clone()


def test_every_replay_sees_its_own_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GraphPool, "capture", capture_on_cpu)
    graphs = ForwardGraphs(EchoRunner(), (1, 2, 4), 3, GraphPool())  # type: ignore[arg-type]
    blocks = {"a": (7,), "b": (8, 9), "c": (1, 2, 3), "longer a": (7, 5)}
    steps = ["a", "ab", "ab", "ba", "abc", "b", ("longer a", "b"), ("longer a", "b"), "ab", "c", "c", "ab"]
    for number, names in enumerate(steps, 1):
        rows = len(names)
        tables = np.zeros((rows, max(len(blocks[name]) for name in names)), np.int32)
        for row, name in enumerate(names):
            tables[row, : len(blocks[name])] = blocks[name]
        table = np.arange(len(Column) * rows, dtype=np.int32).reshape(len(Column), rows) + 100 * number
        replayed = graphs.replay(HostTable(table, tables, np.arange(rows)), None)
        assert replayed is not None
        found, size = replayed
        assert size == min(size for size in (1, 2, 4) if size >= rows)
        assert np.array_equal(found[0].numpy(), table.T)
        assert np.array_equal(found[1][:, : tables.shape[1]].numpy(), tables), (number, names)
        assert np.array_equal(found[3].numpy(), table)
    assert graphs.graphs.num_replays == len(steps)


def test_whole_steps_are_known() -> None:
    def sampling(samples_every_row: bool, owners: list[Any]) -> Sampling:
        chunks = tuple(chunk_of([5, 6], 0, count, (1,), slot) for slot, count in ((1, 1), (2, 2)))
        result = SimpleNamespace(sample_rows=torch.arange(3), samples_every_row=samples_every_row)
        found = Sampling.of(SimpleNamespace(plan=SimpleNamespace(chunks=chunks), result=result), owners)  # type: ignore[arg-type]
        assert found is not None
        return found

    assert sampling(True, ["x", "y"]).has_every_row
    assert not sampling(False, ["x", "y"]).has_every_row
    ended = sampling(True, [None, "y"])
    assert not ended.has_every_row
    assert (ended.rows.tolist(), ended.counts.tolist()) == ([1, 2], [2])
