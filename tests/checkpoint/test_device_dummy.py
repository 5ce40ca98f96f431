"""Synthetic weights made on a device: a function of seed and name, stacked or single, in a sane size."""

from __future__ import annotations

import math

import pytest
import torch

from deepinfer.checkpoint import Kind, make_random_checkpoint, open_checkpoint, released_config, tiny_config
from deepinfer.checkpoint import device_dummy as module
from deepinfer.checkpoint.device_dummy import DeviceDummyCheckpoint, fill_with_bytes, random_words
from deepinfer.checkpoint.device_loader import DeviceLoader, copy_table
from deepinfer.checkpoint.expert_stack import expert_name, read_expert_stack
from deepinfer.checkpoint.released_slice import released_slice
from deepinfer.config.layer_plan import IndexMode
from deepinfer.errors import CheckpointError

CPU = torch.device("cpu")


def dummy(config=None, seed: int = 3) -> DeviceDummyCheckpoint:
    config = config or tiny_config()
    parts = ("text", "draft", "vision") if config.vision else None
    return DeviceDummyCheckpoint(config, CPU, seed, parts=parts)


def raw(tensor) -> torch.Tensor:
    return tensor.data.contiguous().flatten().view(torch.uint8)


def test_every_tensor_has_the_stored_layout_and_finite_values():
    source = dummy()
    for name, spec in source.specs.items():
        tensor = source.tensor(name)
        assert tuple(tensor.data.shape) == spec.stored_shape
        assert (None if tensor.scale is None else tuple(tensor.scale.shape)) == spec.scale_shape
        values = tensor.dequantize()
        assert bool(torch.isfinite(values).all()), name
        assert float(values.std()) > 0 or spec.shape == (1,), name
    assert source.tensor("layers.0.attn.wq_a.weight").data.dtype == torch.float8_e4m3fn


def test_tensors_depend_on_seed_and_name_only():
    one, again, other = dummy(), dummy(), dummy(seed=4)
    names = list(one.specs)[:40]
    forward = {name: raw(one.tensor(name)) for name in names}
    for name in reversed(names):
        assert torch.equal(raw(again.tensor(name)), forward[name])
        assert not torch.equal(raw(other.tensor(name)), forward[name]), name


def test_slabs_change_nothing(monkeypatch):
    names = ["layers.0.attn.wq_b.weight", "embed.weight", "layers.0.hc_attn_base", "layers.0.ffn.experts.1.w2.weight"]
    whole = {name: dummy().tensor(name) for name in names}
    stack = dummy().expert_stack("layers.0", "w1")
    monkeypatch.setattr(module, "_SLAB_WORDS", 64)
    for name in names:
        part = dummy().tensor(name)
        assert torch.equal(raw(part), raw(whole[name])), name
    assert torch.equal(dummy().expert_stack("layers.0", "w1").codes, stack.codes)


def test_rows_of_bytes_that_are_no_whole_words():
    keys = torch.tensor([5, -7])
    out = torch.empty((2, 21), dtype=torch.uint8)
    fill_with_bytes(out, keys)
    assert torch.equal(out, random_words(keys, 0, 3).view(torch.uint8)[:, :21])


@pytest.mark.parametrize("block", ["layers.5", "mtp.1"])
@pytest.mark.parametrize("projection", ["w1", "w2"])
def test_stacked_experts_equal_single_ones(block, projection):
    source = dummy()
    stack = source.expert_stack(block, projection)
    assert stack.codes.shape[0] == (8 if block.startswith("layers") else 4)
    for expert in range(stack.codes.shape[0]):
        single = source.tensor(expert_name(block, expert, projection))
        assert torch.equal(stack.codes[expert], single.data)
        assert torch.equal(stack.scales[expert], single.scale)
    assert len({codes.numpy().tobytes() for codes in stack.codes}) == len(stack.codes)


@pytest.mark.parametrize("name", ["layers.5.attn.wq_b.weight", "layers.5.ffn.experts.3.w1.weight", "head.weight"])
def test_weights_keep_the_size_of_activations(name):
    weight = dummy().tensor(name).dequantize()
    gain = float(weight.std()) * math.sqrt(weight.shape[1])
    assert 0.4 < gain < 2.0
    assert abs(float(weight.mean())) < 0.05 * float(weight.std()) + 1e-3


def test_norms_are_near_one_and_normal_values_have_their_tails():
    source = dummy(released_config())
    norm = source.tensor("layers.7.attn_norm.weight").data.float()
    assert abs(float(norm.mean()) - 1) < 0.02
    assert 0.17 < float(norm.std()) < 0.23
    gate = source.tensor("layers.7.ffn.gate.weight").data.float().flatten()
    scaled = gate / gate.std()
    assert 0.0020 < float((scaled.abs() > 3).float().mean()) < 0.0034
    assert 4 < float(scaled.abs().max()) < 6


def test_routing_is_uniform():
    source = dummy(released_config(), 0)
    weight = source.tensor("layers.3.ffn.gate.weight").dequantize()
    x = torch.randn(400, 5120, generator=torch.Generator().manual_seed(1))
    scores = torch.nn.functional.softplus(x @ weight.T).sqrt() + source.tensor("layers.3.ffn.gate.bias").data
    chosen = torch.bincount(scores.topk(6).indices.flatten(), minlength=384)
    assert int(chosen.max()) < 5 * 400 * 6 / 384
    assert int((chosen == 0).sum()) < 20


def test_large_tensors_repeat_no_row():
    weight = dummy(released_config()).tensor("layers.0.ffn.experts.0.w1.weight")
    assert len({row.numpy().tobytes() for row in weight.data}) == weight.shape[0]


def test_table_rows_equal_those_of_the_table():
    source = dummy(released_config(), 1)
    table = source.engram_table(14)
    ids = torch.tensor([5, 384016681, 0, 123_456_789])
    codes, scales = source.table_rows(table.name, ids)
    expected = table.gather(ids)
    assert torch.equal(codes, expected[0])
    assert torch.equal(scales, expected[1])


def test_whole_table_is_copied_in_pieces(monkeypatch):
    monkeypatch.setattr("deepinfer.checkpoint.device_loader._TABLE_CHUNK_ROWS", 1000)
    source = dummy()
    table = source.engram_table(1)
    codes = torch.zeros((table.rows, table.width), dtype=torch.uint8)
    scales = torch.zeros((table.rows, table.width // 32), dtype=torch.uint8)
    copy_table(table, codes, scales)
    stored = source.tensor(table.name)
    assert torch.equal(codes, stored.data.view(torch.uint8))
    assert torch.equal(scales, stored.scale)


def test_loader_hands_out_every_byte_of_a_checkpoint(tmp_path):
    make_random_checkpoint(tmp_path / "tiny", tiny_config(vision=False), seed=7)
    source = open_checkpoint(tmp_path / "tiny")
    loader = DeviceLoader(source, CPU)
    blocks = [f"layers.{layer}" for layer in range(8)] + ["mtp.0", "mtp.1"]
    for block in blocks:
        for projection in ("w1", "w2", "w3"):
            stack = loader.expert_stack(block, projection)
            last = source.tensor(expert_name(block, len(stack.codes) - 1, projection))
            assert torch.equal(stack.codes[-1], last.data)
            assert torch.equal(stack.scales[-1], last.scale)
    for name, spec in source.specs.items():
        if spec.kind is not Kind.TABLE and ".experts." not in name:
            assert torch.equal(raw(loader.tensor(name)), raw(source.tensor(name)))
    report = loader.close()
    assert report.num_bytes == sum(spec.num_bytes for spec in source.specs.values() if spec.kind is not Kind.TABLE)
    assert "GB/s" in str(report)
    codes = torch.zeros((6126, 32), dtype=torch.uint8)
    copy_table(loader.engram_table(1), codes, torch.zeros((6126, 1), dtype=torch.uint8))
    assert torch.equal(codes, source.tensor("layers.1.engram.embed.weight").data.view(torch.uint8))


def test_loader_takes_stacks_from_synthetic_weights_whole():
    source = dummy()
    loader = DeviceLoader(source, CPU)
    stack = loader.expert_stack("layers.2", "w3")
    assert torch.equal(stack.codes, source.expert_stack("layers.2", "w3").codes)
    assert loader.close().num_bytes == stack.num_bytes
    assert torch.equal(read_expert_stack(source, "layers.2", "w3", CPU).scales, stack.scales)


def test_unknown_block_is_refused():
    with pytest.raises(CheckpointError, match=r"layers\.9"):
        dummy().expert_stack("layers.9", "w1")


def test_released_slice_has_every_kind_of_layer():
    text = released_slice(draft=True, engram_vocab_size=1_000_000).text
    modes = [layer.mode for layer in text.layers]
    full, reuse, none = IndexMode.FULL, IndexMode.REUSE, IndexMode.NONE
    assert modes == [none, none, full, reuse, reuse, reuse, full, reuse, IndexMode.REINDEX, reuse, reuse, reuse]
    assert [layer.layer_id for layer in text.kv_source_layers] == [2, 6]
    assert [layer.layer_id for layer in text.layers if layer.is_feature_target] == [9, 10, 11]
    assert text.layers[1].has_engram
    assert (text.candidate_topk_blocks, text.candidate_block_size, text.index_topk) == (2048, 8, 512)
    assert (text.num_nextn_predict_layers, text.dspark_n_routed_experts, text.dspark_num_experts_per_tok) == (3, 128, 3)
    assert text.engram_num_embeddings[0] < 25_000_000


def test_released_slice_without_options_has_the_weights_of_the_peers_run():
    source = DeviceDummyCheckpoint(released_slice(), CPU)
    assert source.config.text.num_nextn_predict_layers == 0
    assert not source.config.text.engram_layer_ids
    assert 84 < sum(spec.num_bytes for spec in source.specs.values()) / 2**30 < 86
