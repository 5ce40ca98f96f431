"""On a GPU: the fused path gives the CPU's tokens, a graph what its launches give, and nobody sees his neighbours.

Run with ``pytest -m gpu tests/gpu``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deepinfer.engine.engine import Engine
from deepinfer.messages import StepPlan
from deepinfer.sampling.params import SamplingParams
from tests.engine.requests import random_cases, run_crowd
from tests.engine.support import chunk_of, logits_in_pieces, make_checkpoint, make_engine, random_ids

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TIE = 2**-6
"""Of the largest logit: what the last roundings of a few layers can move."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny") / "model")


def nvidia(path: Path, **arguments: Any) -> Engine:
    engine = make_engine(path, accelerator="nvidia", num_speculative_tokens=0, **arguments)
    assert type(engine.runner).__name__ == "FusedRunner"
    return engine


def greedy(engine: Engine, prompt: list[int], count: int) -> list[int]:
    engine.add_request(prompt, SamplingParams(temperature=0, max_tokens=count, ignore_eos=True))
    while engine.has_work():
        for output in engine.step():
            if output.finished:
                assert output.error is None, output.error
                tokens: list[int] = output.outputs[0].token_ids
    return tokens


def explain(engine: Engine, prompt: list[int], expected: list[int], found: list[int]) -> None:
    """Tokens are equal, or where they part the CPU's own two best logits are a rounding apart."""
    if expected == found:
        return
    place = next(index for index, pair in enumerate(zip(expected, found, strict=True)) if pair[0] != pair[1])
    ids = prompt + expected[:place]
    logits = engine.runner.run(StepPlan(0, (chunk_of(ids, 0, len(ids), (3, 1, 2), 2),))).sample_logits()[-1]
    gap = float(logits[expected[place]] - logits[found[place]])
    assert 0 <= gap < TIE * float(logits.abs().max()), f"token {place}: {expected[place]} -> {found[place]}, {gap=}"


@pytest.mark.parametrize("name", ["s1_basic", "s2_real_heads"])
def test_golden_cases(golden_dir: Path, name: str) -> None:
    golden: dict[str, Any] = dict(np.load(golden_dir / f"{name}.npz"))
    prompt = golden["prompt_ids"].tolist()
    cpu = make_engine(golden_dir / name, max_model_len=256, num_speculative_tokens=0)
    expected = greedy(cpu, prompt, 24)
    explain(cpu, prompt, expected, greedy(nvidia(golden_dir / name, max_model_len=256), prompt, 24))


def test_logits_near_the_reference(path: Path) -> None:
    ids = random_ids(150)
    expected = logits_in_pieces(make_engine(path, num_speculative_tokens=0), ids, [150])
    engine = nvidia(path)
    for sizes in ([150], [64, 1, 1, 6, 78]):
        found = logits_in_pieces(engine, ids, sizes, slot=4).cpu()
        error = (found - expected).norm() / expected.norm()
        assert error < 0.02, f"{sizes}: {float(error):.4f}"
        assert (found.argmax(-1) == expected.argmax(-1)).float().mean() > 0.9


def test_graph_equals_launches(path: Path) -> None:
    ids = random_ids(140)
    engine = nvidia(path)
    with_graphs = logits_in_pieces(engine, ids, [100, *[1] * 20, 3, 5, 6, 6])
    engine.runner.graphs = None  # type: ignore[attr-defined]
    assert torch.equal(with_graphs, logits_in_pieces(engine, ids, [100, *[1] * 20, 3, 5, 6, 6], slot=5))


def test_unused_cache_full_of_nan(path: Path) -> None:
    ids = random_ids(150)
    clean = logits_in_pieces(nvidia(path), ids, [140, *[1] * 10])
    engine = nvidia(path)
    for layer in engine.runner.caches.layers:
        for store in (layer.window, layer.entries, layer.index_keys):
            if store is not None:
                store.data.fill_(0xFF)
        if layer.pairs is not None:
            layer.pairs.fill_(torch.nan)
    assert torch.equal(clean, logits_in_pieces(engine, ids, [140, *[1] * 10]))


@pytest.mark.parametrize("seed", [2, 3])
def test_requests_in_a_crowd(path: Path, seed: int) -> None:
    cases = random_cases(16, seed=seed)
    expected = run_crowd(make_engine(path, num_speculative_tokens=0), cases, seed=1)
    found = run_crowd(nvidia(path), cases, seed=3)
    same = sum(a[0] == b[0] for a, b in zip(expected, found, strict=True))
    assert same >= 12, f"{same} of 16 outputs are equal"


def test_speculation_changes_no_token(path: Path) -> None:
    prompts = [random_ids(10 + 7 * number, seed=number) for number in range(4)]
    plain = [greedy(nvidia(path), prompt, 20) for prompt in prompts]
    engine = make_engine(path, accelerator="nvidia", num_speculative_tokens=4, adaptive_verification=False)
    same = [greedy(engine, prompt, 20) == expected for prompt, expected in zip(prompts, plain, strict=True)]
    # Rows of a verification step go through kernels for more rows, whose sums round differently.
    assert sum(same) >= 3, same


def test_batch_invariance(path: Path) -> None:
    """In batch-invariant mode a row is the same alone, among 7 and among 200."""
    prompts = [random_ids(5 + number % 90, seed=number) for number in range(200)]
    params = [SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0) for _ in prompts]

    def run(indices: list[int]) -> dict[int, Any]:
        engine = nvidia(path, batch_invariant=True, max_num_seqs=200, num_blocks=600)
        place = {engine.add_request(prompts[index], params[index]): index for index in indices}
        found = {}
        while engine.has_work():
            for output in engine.step():
                if output.finished:
                    entries = output.outputs[0].logprobs or []
                    found[place[output.request_id]] = (output.outputs[0].token_ids, [str(entry) for entry in entries])
        return found

    crowd = run(list(range(200)))
    few = run(list(range(7)))
    for index in range(7):
        assert few[index] == crowd[index]
    assert run([3])[3] == crowd[3]
