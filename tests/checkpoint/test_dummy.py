"""Synthetic weights: reproducible one by one, well scaled, and free of cost for tables of any size."""

from __future__ import annotations

import math

import pytest
import torch

from deepinfer.checkpoint import DummyCheckpoint, Kind, Part, released_config, tiny_config
from deepinfer.checkpoint.dummy import _POOL
from deepinfer.errors import CheckpointError

PARTS = ("text", "draft", "vision")


def raw(tensor) -> torch.Tensor:
    return tensor.data.contiguous().flatten().view(torch.uint8)


def test_every_tensor_has_the_stored_layout_and_finite_values() -> None:
    dummy = DummyCheckpoint(tiny_config(), 3, parts=PARTS)
    assert dummy.parts == set(Part)
    for name, spec in dummy.specs.items():
        tensor = dummy.tensor(name)
        assert tuple(tensor.data.shape) == spec.stored_shape
        assert (None if tensor.scale is None else tuple(tensor.scale.shape)) == spec.scale_shape
        values = tensor.dequantize()
        assert bool(torch.isfinite(values).all()), name
        assert float(values.std()) > 0 or spec.shape == (1,), name
    assert dummy.tensor("embed.weight").data.dtype == torch.bfloat16
    assert dummy.tensor("layers.0.attn.wq_a.weight").data.dtype == torch.float8_e4m3fn


def test_tensors_depend_on_seed_and_name_only() -> None:
    one = DummyCheckpoint(tiny_config(), 3)
    names = list(one.specs)[:40]
    forward = {name: raw(one.tensor(name)) for name in names}
    again = DummyCheckpoint(tiny_config(num_hidden_layers=8, vocab_size=512), 3)
    other = DummyCheckpoint(tiny_config(), 4)
    for name in reversed(names):
        assert torch.equal(raw(again.tensor(name)), forward[name])
        assert not torch.equal(raw(other.tensor(name)), forward[name]), name
    experts = [raw(one.tensor(f"layers.0.ffn.experts.{expert}.w1.weight")) for expert in (0, 1)]
    assert not torch.equal(*experts)


@pytest.mark.parametrize("name", ["layers.0.attn.wq_b.weight", "layers.5.ffn.experts.3.w1.weight", "head.weight"])
def test_weights_keep_the_size_of_activations(name: str) -> None:
    dummy = DummyCheckpoint(tiny_config(), 0)
    weight = dummy.tensor(name).dequantize()
    gain = float(weight.std()) * math.sqrt(weight.shape[1])
    assert 0.4 < gain < 2.0
    assert abs(float(weight.mean())) < 0.05 * float(weight.std()) + 1e-3


def test_router_follows_the_token_rather_than_a_bias() -> None:
    dummy = DummyCheckpoint(released_config(), 0)
    weight = dummy.tensor("layers.3.ffn.gate.weight").dequantize()
    x = torch.randn(400, 5120, generator=torch.Generator().manual_seed(1))
    logits = x @ weight.T
    scores = torch.nn.functional.softplus(logits).sqrt() + dummy.tensor("layers.3.ffn.gate.bias").data
    chosen = torch.bincount(scores.topk(6).indices.flatten(), minlength=384)
    assert int(chosen.max()) < 5 * 400 * 6 / 384
    assert int((chosen == 0).sum()) < 20


def test_large_tensors_repeat_no_row() -> None:
    dummy = DummyCheckpoint(released_config(), 0)
    weight = dummy.tensor("layers.0.ffn.experts.0.w1.weight")
    assert weight.data.numel() > 4 * _POOL
    assert len({row.numpy().tobytes() for row in weight.data}) == weight.shape[0]


def test_released_tables_cost_nothing_and_rows_do_not_depend_on_their_company() -> None:
    dummy = DummyCheckpoint(released_config(), 1)
    table = dummy.engram_table(14)
    assert (table.rows, table.width) == (384016682, 256)
    ids = torch.tensor([5, 384016681, 5, 123_456_789])
    codes, scales = table.gather(ids)
    assert codes.shape == (4, 256)
    assert scales.shape == (4, 8)
    assert torch.equal(codes[0], codes[2])
    assert not torch.equal(codes[0], codes[1])
    for position, row in enumerate(ids):
        alone = table.gather(row[None])
        assert torch.equal(alone[0][0], codes[position])
        assert torch.equal(alone[1][0], scales[position])
    values = table.gather_dequantized(torch.arange(0, 384_000_000, 1_000_000))
    assert bool(torch.isfinite(values).all())
    assert 0.2 < float(values.std()) < 0.8
    assert len(torch.unique(scales)) > 1
    assert not torch.equal(DummyCheckpoint(released_config(), 2).engram_table(14).gather(ids)[0], codes)
    assert not torch.equal(dummy.engram_table(1).gather(ids[:1])[0], codes[:1])
    with pytest.raises(IndexError):
        table.gather(torch.tensor([384016682]))
    with pytest.raises(CheckpointError, match="engram_table"):
        dummy.tensor("layers.14.engram.embed.weight")


def test_small_table_as_one_tensor_equals_its_rows() -> None:
    dummy = DummyCheckpoint(tiny_config(), 1)
    whole = dummy.tensor("layers.1.engram.embed.weight")
    assert whole.kind is Kind.TABLE
    ids = torch.tensor([0, 77, 6125])
    assert torch.equal(whole.dequantize()[ids], dummy.engram_table(1).gather_dequantized(ids))


def test_load_all_offers_the_same_tensors() -> None:
    dummy = DummyCheckpoint(tiny_config(), 1, parts=("text",))
    loaded = {tensor.name: tensor for tensor in dummy.load_all(progress=False)}
    assert set(loaded) == {name for name, spec in dummy.specs.items() if spec.kind is not Kind.TABLE}
    assert torch.equal(loaded["norm.weight"].data, dummy.tensor("model.norm.weight").data)
    with pytest.raises(CheckpointError, match=r"mtp\.0"):
        dummy.tensor("mtp.0.main_norm.weight")
