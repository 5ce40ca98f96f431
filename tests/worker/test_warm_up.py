"""What an engine compiles at its start covers what requests launch, on a CPU: launches are recorded in place of run."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

from deepinfer.checkpoint.device_loader import DeviceLoader
from deepinfer.checkpoint.reader import open_checkpoint
from deepinfer.messages import Chunk, StepPlan
from deepinfer.worker.warm_up import null_prompts
from tests.engine.support import chunk_of, make_checkpoint, make_engine, random_ids
from tests.worker.launch_recorder import Recorder
from tests.worker.test_launch_order import WIDTHS

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="launches are recorded in place of the interpreter"),
]
KEEP, MOST = 100, 700
BLOCKS = tuple(range(1, 9))
Key = tuple[str, tuple[tuple[str, int], ...]]


@contextmanager
def nothing(name: str, show_progress: bool) -> Iterator[None]:
    yield


def test_prompts_launch_what_was_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from deepinfer.kernels import nvrtc
    from deepinfer.models.fused_loading import load_fused
    from deepinfer.worker import fused_runner

    path = make_checkpoint(tmp_path / "model", **WIDTHS)
    engine = make_engine(path, num_speculative_tokens=0, num_blocks=250, max_num_seqs=64, max_model_len=1000)
    monkeypatch.setattr(fused_runner, "compiling", nothing)
    monkeypatch.setattr("deepinfer.kernels.moe.experts_hopper.is_usable", lambda *_: True)
    recorder = Recorder()
    with recorder.installed(monkeypatch):
        load_kernel, loaded = nvrtc.load_kernel, set[Key]()

        def noted(source: str, entry: str, defines: dict[str, int], *more: Any, **named: Any) -> Any:
            loaded.add((entry, tuple(sorted(defines.items()))))
            return load_kernel(source, entry, defines, *more, **named)

        monkeypatch.setattr(nvrtc, "load_kernel", noted)
        loader = DeviceLoader(open_checkpoint(path, parts=("text",), config=engine.model_config), torch.device("cpu"))
        model = load_fused(engine.model_config, loader, torch.device("cpu"), precision="faithful", max_rows=2048)
        geometry = engine.runner.caches.geometry
        runner = fused_runner.FusedRunner(
            engine.model_config.text, model, geometry, torch.device("cpu"), graph_sizes=(1, 4, 16), max_blocks=8
        )
        loaded.clear()
        graphs = runner.graphs
        runner.compile_kernels(null_prompts(MOST, KEEP), show_progress=False)
        assert runner.graphs is graphs
        assert graphs is not None
        assert not any(graphs.graphs.is_captured(size) for size in (1, 4, 16))
        compiled = set(loaded)
        assert len({entry for entry, _ in compiled}) > 8
        runner.graphs = None
        ids = random_ids(990)
        for count in (9, 17, 30, 50, 70, 100, 129, 170, 200, 250, 300, 350, 400, 500, 520, 600, 699):
            prompt = replace(chunk_of(ids, 0, count, BLOCKS, 3, "p"), num_sampled=1, decoder_floor=max(0, count - KEEP))
            loaded.clear()
            runner.run(StepPlan(0, (prompt,)))
            assert loaded, count
            assert loaded <= compiled, (count, loaded - compiled)
        loaded.clear()
        first = replace(chunk_of(ids, 0, MOST, BLOCKS, 3, "p"), num_sampled=0, decoder_floor=900)
        runner.run(StepPlan(0, (first,)))
        assert loaded
        assert loaded <= compiled
        for size in (1, 4, 16):
            loaded.clear()
            graphs.launch(size)
            assert loaded
            assert loaded <= compiled


def test_the_null_prompt_is_a_chunk_of_nobody() -> None:
    prompts: list[Chunk] = null_prompts(64, 0)
    assert {prompt.state_slot for prompt in prompts} == {0}
    assert {block for prompt in prompts for block in prompt.block_table} == {0}
