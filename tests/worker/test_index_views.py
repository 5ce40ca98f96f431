"""What the indexer is told of a step's chunks: how long they are, and room for every entry that a row may see."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

from deepinfer.messages import PLACEHOLDER_TOKEN, StepPlan
from tests.engine.support import chunk_of, make_checkpoint, make_engine, random_ids
from tests.worker.test_fused_model import fused_runner

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the interpreter is not used; see tests/gpu"),
]


def test_no_row_sees_more_entries_than_the_indexer_has_room_for(tmp_path: Path) -> None:
    """Two drafts were accepted that the host does not know of: its guess of the last position is two too low."""
    from deepinfer.layers.fused.indexer import _view

    path = make_checkpoint(tmp_path / "model")
    engine = make_engine(path, num_speculative_tokens=0)
    runner = fused_runner(engine, path)
    steps: list[Any] = []

    def forward(step: Any, caches: Any) -> tuple[torch.Tensor, torch.Tensor]:
        steps.append(step)
        kept = len(step.cut.kept)
        return torch.zeros(kept, 4, 8), torch.zeros(kept, 4)

    runner.fused.forward = forward
    slot, guess, accepted = 2, 100, 5
    runner.device_tokens.drafts = torch.zeros(runner.caches.geometry.num_slots, 5, dtype=torch.int64)
    runner.device_tokens.next_position[slot] = guess + accepted
    ids = random_ids(60)
    opened = chunk_of(ids, 0, 6, (1,), slot, "open")._replace(
        start=guess,
        token_ids=(PLACEHOLDER_TOKEN,) * 6,
        history=(),
        is_prefill=False,
    )
    prompt = chunk_of(ids, 0, 40, (2,), 3, "prompt")._replace(num_sampled=1, decoder_floor=16)
    runner.run(StepPlan(0, (opened, prompt)))
    (step,) = steps
    rows = step.cut.rows
    for ratio, stream in rows.streams.items():
        view = _view(rows, stream)
        seen = int(stream.num_visible.max())
        assert view.capacity >= seen, f"ratio {ratio}: a row sees {seen} entries, there is room for {view.capacity}"


def test_a_prompt_is_scored_as_a_chunk(tmp_path: Path) -> None:
    """Rows of a long chunk share their keys; row by row the scores of a prompt take several times as long."""
    from deepinfer.layers.fused.indexer import _view

    path = make_checkpoint(tmp_path / "model")
    runner = fused_runner(make_engine(path, num_speculative_tokens=0), path)
    steps: list[Any] = []

    def forward(step: Any, caches: Any) -> tuple[torch.Tensor, torch.Tensor]:
        steps.append(step)
        return torch.zeros(step.rows.num_rows, 4, 8), torch.zeros(step.rows.num_rows, 4)

    runner.fused.forward = forward
    prompt = chunk_of(random_ids(60), 0, 40, (2,), 3, "prompt")._replace(num_sampled=1)
    runner.run(StepPlan(0, (prompt,)))
    for ratio, stream in steps[0].rows.streams.items():
        view = _view(steps[0].rows, stream)
        assert view.long_rows == (0, 40)
        assert view.capacity == 40 // ratio
