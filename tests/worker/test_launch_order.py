"""No kernel reads before its wait what may still be written: over the launches of whole steps, on a CPU."""

from __future__ import annotations

import importlib.util
import os
from itertools import pairwise
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

from deepinfer.checkpoint.device_loader import DeviceLoader
from deepinfer.checkpoint.reader import open_checkpoint
from deepinfer.messages import Chunk, StepPlan
from tests.engine.support import chunk_of, make_checkpoint, make_engine, random_ids
from tests.worker.launch_recorder import Kind, Launch, Recorder, violations

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="launches are recorded in place of the interpreter"),
]
WIDTHS = {  # that the CUDA kernels take
    "moe_intermediate_size": 128,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "index_n_heads": 16,
    "index_head_dim": 128,
    "q_lora_rank": 128,
    "o_lora_rank": 128,
}
BLOCKS = tuple(range(1, 9))


def _steps() -> dict[str, tuple[Chunk, ...]]:
    ids = random_ids(990)

    def decoding(count: int) -> tuple[Chunk, ...]:
        chunks = (chunk_of(ids, 500, 1, BLOCKS, slot, str(slot)) for slot in range(count))
        return tuple(chunk._replace(is_prefill=False, num_sampled=1) for chunk in chunks)

    def prompt(start: int, count: int) -> Chunk:
        return chunk_of(ids, start, count, BLOCKS, 3, "p")

    steps = {f"decode {count}": decoding(count) for count in (1, 2, 4, 5, 9, 17, 33, 60)}
    steps |= {f"prefill {count}": (prompt(0, count),) for count in (12, 65, 129, 300, 520, 700)}
    steps["mixed"] = (prompt(600, 40), *decoding(2))
    for count in (100, 700):
        steps[f"cut {count}"] = (prompt(0, count)._replace(num_sampled=1, decoder_floor=count - 30),)
        steps[f"nothing kept of {count}"] = (prompt(0, count)._replace(num_sampled=0, decoder_floor=count + 50),)
    return steps


@pytest.mark.parametrize(
    ("precision", "invariant", "few"),
    [("faithful", False, True), ("faithful", True, True), ("fast", False, True), ("fast", False, False)],
)
def test_what_is_read_ahead_is_older_than_the_kernel_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str, invariant: bool, few: bool
) -> None:
    from deepinfer.kernels.dense import plans
    from deepinfer.kernels.moe import experts_hopper
    from deepinfer.layers.fused.draft_rows import DraftExpander, draft_rows
    from deepinfer.models.fused_loading import load_fused, load_fused_draft
    from deepinfer.worker.fused_runner import FusedRunner

    path = make_checkpoint(tmp_path / "model", **WIDTHS)
    engine = make_engine(path, num_speculative_tokens=0, num_blocks=250, max_num_seqs=64, max_model_len=1000)
    config, device = engine.model_config, torch.device("cpu")
    monkeypatch.setattr("deepinfer.kernels.dense.row_scaled.MIN_OUTPUTS", 16)
    monkeypatch.setattr("deepinfer.kernels.moe.experts_hopper.MIN_FP8_PAIRS", 160)
    monkeypatch.setattr("deepinfer.kernels.moe.experts_hopper.is_usable", lambda *_: True)
    if precision == "fast":  # FP8 products beside either kernel of the experts
        monkeypatch.setattr("deepinfer.kernels.dense.row_scaled.MIN_ROWS", 129)
        monkeypatch.setattr("deepinfer.kernels.dense.row_scaled.MIN_ROWS_OF_GROUPS", 520)
    if few:  # the experts' kernel for few pairs at every length, as the released sizes have it up to 1,024
        last = experts_hopper.PLANS[-1]
        monkeypatch.setattr(experts_hopper, "PLANS", (*experts_hopper.PLANS, (0, 1e9, *last[2:])))
        monkeypatch.setattr(plans, "DEFAULT", (plans.Few(16), plans.Many(2048)))
    recorder = Recorder()
    read_ahead: set[str] = set()
    early: set[tuple[str, str]] = set()
    with recorder.installed(monkeypatch):
        loader = DeviceLoader(open_checkpoint(path, parts=("text", "draft"), config=config), device)
        model = load_fused(config, loader, device, precision=precision, max_rows=2048, invariant=invariant)
        draft = load_fused_draft(model, loader, precision)
        runner = FusedRunner(config.text, model, engine.runner.caches.geometry, device, draft=draft)
        for name, chunks in _steps().items():
            recorder.launches.clear()
            runner.run(StepPlan(0, chunks))
            assert len(recorder.launches) > 50, name
            assert not violations(recorder.launches), name
            read_ahead |= {launch.name for launch in recorder.launches if launch.ahead}
            early |= {
                (before.name, after.name)
                for before, after in pairwise(recorder.launches)
                if before.kind is Kind.EARLY and after.ahead
            }
        expander = DraftExpander(runner.caches.geometry, 5, runner.plain_frequencies)
        for count in (1, 3, 13):
            recorder.launches.clear()
            zeros, slots = torch.zeros(count, dtype=torch.int32), torch.arange(count, dtype=torch.int32)
            rows = draft_rows(*expander.reference(zeros + 20, zeros, slots))
            draft.draft(
                zeros.long(), 5, rows, runner.caches, lambda logits, step: torch.zeros(len(logits), dtype=torch.int64)
            )
            assert recorder.launches
            assert not violations(recorder.launches), f"draft {count}"
    expected = {"hc_write_read", "dense_wgmma"} | (set() if invariant else {"moe_skinny", "dense_skinny"})
    assert read_ahead >= expected
    assert ("route_select", "dense_wgmma") in early  # the shared expert's product, beside the router


def test_the_check_sees_what_has_not_ended() -> None:
    made = Launch("maker", Kind.OVERLAPPED, {1})
    middle, early = Launch("middle", Kind.OVERLAPPED, {2}), Launch("early", Kind.EARLY, {3})
    reader = Launch("reader", Kind.OVERLAPPED, {1, 4}, {"x": 1})
    ordinary = Launch("ordinary", Kind.ORDINARY, {5})
    assert not violations([made, middle, reader])
    assert not violations([made, early, middle, reader])
    assert not violations([made, middle, early, early, reader])
    assert not violations([made, ordinary, reader])
    assert not violations([made, early, ordinary, early, reader])
    assert len(violations([ordinary, Launch("reader", Kind.OVERLAPPED, {6}, {"x": 5})])) == 1
    assert len(violations([made, reader])) == 1
    assert len(violations([made, early, reader])) == 1
    assert len(violations([made, early, early, reader])) == 1
