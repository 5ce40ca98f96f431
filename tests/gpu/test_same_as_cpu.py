"""On a GPU: the reference operators (``numerics="float32"``) give what they give on the CPU.

Run with ``pytest -m gpu tests/gpu``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deepinfer.messages import StepPlan
from deepinfer.sampling.params import SamplingParams
from tests.engine.requests import random_cases, run_crowd
from tests.engine.support import chunk_of, logits_in_pieces, make_engine, random_ids

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_logits_and_chunking(path: Path) -> None:
    ids = random_ids(150)
    cpu = logits_in_pieces(make_engine(path, numerics="float32"), ids, [150])
    engine = make_engine(path, numerics="float32", accelerator="nvidia")
    whole = logits_in_pieces(engine, ids, [150]).cpu()
    pieces = logits_in_pieces(engine, ids, [64, 1, 1, 84], slot=4).cpu()
    assert torch.equal(whole, pieces)
    assert (whole - cpu).abs().max() < 1e-5


@pytest.mark.parametrize("name", ["s1_basic", "s2_real_heads"])
def test_golden_cases(golden_dir: Path, name: str) -> None:
    golden: dict[str, Any] = dict(np.load(golden_dir / f"{name}.npz"))
    prompt = golden["prompt_ids"].tolist()
    engine = make_engine(golden_dir / name, numerics="float32", accelerator="nvidia", max_model_len=256)
    result = engine.runner.run(StepPlan(0, (chunk_of(prompt, 0, len(prompt), (3, 1), 2),)))
    assert np.abs(result.sample_logits().cpu().numpy() - golden["prefill_logits_fp32"]).max() < 5e-5
    engine.add_request(prompt, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    tokens: list[int] = []
    while engine.has_work():
        for output in engine.step():
            tokens = output.outputs[0].token_ids
    assert tokens == golden["greedy_tokens_fp32"].tolist()


def test_requests_with_speculation_and_asynchrony(path: Path) -> None:
    cases = random_cases(16, seed=2)
    expected = run_crowd(make_engine(path, numerics="float32", num_speculative_tokens=0), cases, seed=1)
    found = run_crowd(
        make_engine(path, numerics="float32", num_speculative_tokens=4, accelerator="nvidia"), cases, seed=3
    )
    same = sum(a[0] == b[0] for a, b in zip(expected, found, strict=True))
    assert same >= 15, f"{same} of 16 outputs are equal"
