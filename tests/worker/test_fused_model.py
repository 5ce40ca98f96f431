"""The fused model on a CPU, through Triton's interpreter, gives the bits of the reference.

Its sums are in float32, those of the reference in float64, so some rounding of some layer falls on the other side, and
what lies behind it differs visibly. Up to that place everything has to be equal, and there only few values may differ.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

from deepinfer.checkpoint.reader import open_checkpoint
from deepinfer.engine.engine import Engine
from deepinfer.engine.factory import load_tokenizer
from deepinfer.messages import StepPlan
from deepinfer.tokenizer.compressed_vocab import load_compressed_vocab
from tests.engine.support import chunk_of, make_checkpoint, make_engine, random_ids

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the interpreter is not used; see tests/gpu"),
]
_FEW = 0.01
"""Share of values that the first rounding to fall the other way may touch."""


def fused_runner(engine: Engine, path: Path, precision: Literal["faithful", "fast"] = "faithful") -> Any:
    """A runner of the fused model with the weights and cache sizes of ``engine``."""
    from deepinfer.checkpoint.device_loader import DeviceLoader
    from deepinfer.models.fused_loading import load_fused
    from deepinfer.worker.fused_runner import FusedRunner
    from tests.kernels.interpreter import repair

    repair()
    config, cpu = engine.model_config, torch.device("cpu")
    loader = DeviceLoader(open_checkpoint(path, parts=("text",), config=config), cpu)
    tokenizer = load_tokenizer(engine.config, config)
    assert tokenizer is not None
    vocab = load_compressed_vocab(tokenizer, config.text)
    token_map = torch.tensor(vocab.token_map, dtype=torch.int64)
    model = load_fused(
        config, loader, cpu, precision=precision, token_map=token_map, num_compressed=vocab.size, max_rows=16
    )
    return FusedRunner(config.text, model, engine.runner.caches.geometry, cpu)


def record_layers(runner: Any) -> dict[str, Tensor]:
    """Collects every sublayer's input under the names of the reference's trace."""
    found: dict[str, Tensor] = {}
    for layer in runner.fused.layers:
        for kind, connection in (("attn", layer.attention_hc), ("ffn", layer.ffn_hc)):
            enter, name = connection.enter, f"layers.{layer.plan.layer_id}.{kind}.input"

            def recorded(residual: Any, features: Any = None, enter: Any = enter, name: str = name) -> Any:
                inputs = enter(residual, features)
                found[name] = inputs.x.clone()
                return inputs

            connection.enter = recorded
    return found


def compare(expected: dict[str, Tensor], found: dict[str, Tensor], names: Sequence[str]) -> int:
    """How many of ``names`` are equal bit for bit before the first that is not, which must differ in few values."""
    for place, name in enumerate(names):
        if not torch.equal(found[name], expected[name]):
            share = float((found[name] != expected[name]).double().mean())
            assert share < _FEW, f"{name}: {share:.3f} of the values differ, and all before are equal"
            return place
    return len(names)


def test_layers_are_equal_until_the_first_rounding_that_falls_the_other_way(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "model")
    engine = make_engine(path, num_speculative_tokens=0)
    runner = fused_runner(engine, path)
    found, ids = record_layers(runner), random_ids(60)
    names = [f"layers.{layer}.{kind}.input" for layer in range(8) for kind in ("attn", "ffn")]
    num_equal = []
    for start, count in ((0, 5), (5, 1), (6, 1)):  # a chunk that completes pairs, then rows that continue it
        plan = StepPlan(0, (chunk_of(ids, start, count, (5, 2, 9), 3),))
        expected: dict[str, Tensor] = {}
        reference = engine.runner.run(plan, expected).sample_logits()
        logits = runner.run(plan).sample_logits()
        num_equal.append(compare(expected, found, names))
        error = (logits - reference).norm() / reference.norm()
        assert error < 0.2, f"rows {start} to {start + count}: {float(error):.3f}"
        if num_equal[-1] < len(names):
            break  # the caches differ from here on
    assert num_equal[0] >= 6, f"the first {num_equal[0]} sublayers of {len(names)} are equal"


def test_fast_prefill_stays_near_faithful(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ``fast`` changes in a chunk of many rows, but for the accumulators of FP8 tensor cores."""
    from deepinfer.kernels.dense import row_scaled

    monkeypatch.setattr(row_scaled, "MIN_OUTPUTS", 16)
    num_products, product = 0, row_scaled.product

    def counted(*arguments: Any) -> None:
        nonlocal num_products
        num_products += 1
        product(*arguments)

    monkeypatch.setattr(row_scaled, "product", counted)
    path = make_checkpoint(tmp_path / "model")
    engine = make_engine(path, num_speculative_tokens=0)
    plan = StepPlan(0, (chunk_of(random_ids(60), 0, 4, (5, 2, 9), 3),))
    runner = fused_runner(engine, path, "fast")
    runner.fused.layers = runner.fused.layers[:3]
    found = record_layers(runner)
    names = [f"layers.{layer}.{kind}.input" for layer in range(3) for kind in ("attn", "ffn")]

    def run(min_rows: int, split_weights: bool) -> tuple[Tensor, dict[str, Tensor]]:
        monkeypatch.setattr(row_scaled, "MIN_ROWS", min_rows)
        monkeypatch.setattr(row_scaled, "MIN_ROWS_OF_GROUPS", min_rows)
        for layer in runner.fused.layers:
            layer.attention.split_weights = split_weights
        return runner.run(plan).sample_logits().clone(), dict(found)

    def error(one: Tensor, other: Tensor) -> float:
        return float((one.float() - other.float()).norm() / other.float().norm())

    assert not any(layer.attention.split_weights for layer in runner.fused.layers)
    logits, expected = run(min_rows=5, split_weights=True)  # a row too few
    assert num_products == 0
    by_products, inputs = run(min_rows=4, split_weights=True)
    forms = [part.input_forms(4) for layer in runner.fused.layers for part in (layer.attention, layer.feed_forward)]
    assert all(each.row_codes for each in forms)
    assert num_products == 3 * 5 + 3 * 4 + 1, "six in every layer, one of them in four groups, and the n-gram memory's"
    assert compare(expected, inputs, names) >= 2, "their operands are nearly exact"
    assert 0 < error(by_products, logits) < 0.02
    # Softmax weights in one part flip roundings of the first layer already, and later ones carry them on.
    whole, inputs = run(min_rows=4, split_weights=False)
    assert 0 < error(inputs[names[1]], expected[names[1]]) < 0.02
    assert 0 < error(whole, logits) < 0.1
