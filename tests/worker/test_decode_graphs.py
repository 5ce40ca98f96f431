"""A step that is padded to the size of a graph gives what its launches give, and so does one whose capture failed."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

from deepinfer.messages import StepPlan
from deepinfer.worker.decode_graphs import DecodeGraphs
from deepinfer.worker.graph_set import GraphPool
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
    plans = [StepPlan(0, (chunk_of(ids, 0, 1, (5,), slot),)) for slot in (1, 2, 3)]
    expected = runner.run(plans[0]).sample_logits()
    monkeypatch.setattr(GraphPool, "capture", capture_on_cpu)
    runner.graphs = DecodeGraphs(runner, (2,), 4, runner.graph_pool)
    assert torch.equal(runner.run(plans[1]).sample_logits(), expected)
    assert runner.graphs.graphs.num_replays == 1
    monkeypatch.setattr(GraphPool, "capture", failing)
    runner.graphs = DecodeGraphs(runner, (2,), 4, runner.graph_pool)
    assert torch.equal(runner.run(plans[2]).sample_logits(), expected)
    assert runner.graphs.graphs.num_replays == 0
