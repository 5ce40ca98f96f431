"""The engine against numbers of independent implementations (see docs/executable_specification.md)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from deepinfer.messages import StepPlan
from deepinfer.sampling.params import SamplingParams
from tests.engine.support import chunk_of, make_engine

CASES = ("s1_basic", "s2_real_heads")


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, golden_dir: Path) -> tuple[Path, dict[str, np.ndarray]]:
    return golden_dir / request.param, dict(np.load(golden_dir / f"{request.param}.npz"))


def rows_of(engine, ids: list[int], first: int) -> np.ndarray:
    """Logits of rows ``first ..``: the prompt in one step, then one token after the other."""
    blocks = (3, 1)
    rows = [engine.runner.run(StepPlan(0, (chunk_of(ids, 0, first, blocks, 2),))).sample_logits()]
    rows += [
        engine.runner.run(StepPlan(0, (chunk_of(ids, start, 1, blocks, 2),))).sample_logits()
        for start in range(first, len(ids))
    ]
    return torch.cat(rows).numpy()


def relative(found: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Relative root mean square per row."""
    return np.sqrt(((found - expected) ** 2).sum(-1) / (expected**2).sum(-1))


def test_float32_rows_and_greedy_tokens(case) -> None:
    path, golden = case
    engine = make_engine(path, numerics="float32", max_model_len=256)
    prompt, tokens = golden["prompt_ids"].tolist(), golden["greedy_tokens_fp32"].tolist()
    rows = rows_of(engine, prompt + tokens[:-1], len(prompt))
    expected = np.concatenate((golden["prefill_logits_fp32"], golden["decode_logits_fp32"][1:]))
    assert np.abs(rows - expected).max() < 5e-5
    request = engine.add_request(prompt, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    while engine.has_work():
        for output in engine.step():
            assert output.request_id == request
    assert output.outputs[0].token_ids == tokens


def test_table_rows_and_token_map(case) -> None:
    path, golden = case
    engine = make_engine(path, numerics="float32", max_model_len=256)
    ids = golden["prompt_ids"].tolist()
    trace: dict[str, torch.Tensor] = {}
    engine.runner.run(StepPlan(0, (chunk_of(ids, 0, len(ids), (1, 2), 1),)), trace=trace)
    layers = engine.model_config.text.engram_layer_ids
    assert layers
    for place, layer in enumerate(layers):
        assert np.array_equal(trace[f"layers.{layer}.engram.rows"].numpy(), golden["engram_hash"][:, place])
        engram = engine.runner.model.layers[layer].engram
        assert engram is not None
        assert np.array_equal(engram.token_map.numpy(), golden["token_map"])


def test_faithful_rows_are_as_close_as_rounding_allows(case) -> None:
    """A smoke test: where each rounding sits is shown by the comparison with the executable specification."""
    path, golden = case
    engine = make_engine(path, max_model_len=256)
    prompt, tokens = golden["prompt_ids"].tolist(), golden["greedy_tokens_fp32"].tolist()
    rows = rows_of(engine, prompt + tokens[:-1], len(prompt))
    for mode in ("qat-woa", "bf16"):
        expected = np.concatenate((golden[f"prefill_logits_{mode}"], golden[f"forced_decode_logits_{mode}"][1:]))
        difference = rows - expected
        assert np.sqrt((difference**2).sum() / (expected**2).sum()) < 0.25
        assert np.mean(rows.argmax(-1) == expected.argmax(-1)) > 0.65
        assert np.median(relative(rows, expected)) < 0.12
