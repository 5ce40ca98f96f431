"""The fused model with attention outputs that are left in parts: the same bits, wherever they are added up."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

from deepinfer.kernels.dense.linear import Fp8Linear
from deepinfer.messages import StepPlan
from deepinfer.sampling.params import SamplingParams
from tests.engine.support import chunk_of, make_checkpoint, make_engine, random_ids
from tests.worker.draft_support import drafting_engine, fused_drafter
from tests.worker.test_fused_model import fused_runner

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the interpreter is not used; see tests/gpu"),
]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a draft of one stage, for speed."""
    ratios = (0, 0, 2, 2, 1, 1, 1, 1, 0)
    overrides = {"hc_sinkhorn_iters": 2, "num_nextn_predict_layers": 1, "compress_ratios": ratios}
    return make_checkpoint(tmp_path_factory.mktemp("tiny") / "model", **overrides)


class InParts:
    """In the place of :meth:`Fp8Linear.partial_sums`: three parts whose sum is exact."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_calls = 0
        monkeypatch.setattr(Fp8Linear, "partial_sums", lambda linear, *arguments, **_: self(linear, *arguments))

    def __call__(self, linear: Fp8Linear, xq: Tensor) -> Tensor:
        self.num_calls += 1
        whole = linear.forward(xq, dtype=torch.float32)
        high = whole.bfloat16().float()
        return torch.stack((high, whole - high, torch.zeros_like(whole)))


def test_logits_have_the_same_bits(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, ids = make_engine(path, num_speculative_tokens=0), random_ids(60)

    def logits() -> Tensor:
        runner = fused_runner(engine, path)
        layers = runner.fused.layers[:3]  # for speed
        assert any(layer.engram is not None for layer in layers[1:])
        runner.fused.layers = layers
        return runner.run(StepPlan(0, (chunk_of(ids, 0, 3, (5, 2, 9), 3),))).sample_logits()

    expected = logits()
    parts = InParts(monkeypatch)
    assert torch.equal(logits(), expected)
    assert parts.num_calls == 3


def test_drafts_have_the_same_bits(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def proposed() -> list[tuple[list[list[int]], list[list[float]]]]:
        engine = drafting_engine(path, 2)
        fused_drafter(engine, path)
        found: list[tuple[list[list[int]], list[list[float]]]] = []
        propose = engine.worker.slots.propose

        def noted(slots: Sequence[int], drafts: np.ndarray, confidence: np.ndarray) -> None:
            found.append((drafts.tolist(), confidence.tolist()))
            propose(slots, drafts, confidence)

        engine.worker.slots.propose = noted  # type: ignore[method-assign]
        engine.add_request(random_ids(9), SamplingParams(max_tokens=3, temperature=0, ignore_eos=True))
        while engine.has_work():
            engine.step()
        return found

    expected = proposed()
    parts = InParts(monkeypatch)
    assert expected
    assert proposed() == expected
    assert parts.num_calls > 0
