"""Written checkpoints: read back exactly, readable by the format's own library, and random ones as specified."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer

from deepinfer.checkpoint import (
    Kind,
    expected_tensors,
    make_random_checkpoint,
    open_checkpoint,
    store_tensor,
    tiny_config,
    write_checkpoint,
)
from deepinfer.config.model_file import load_model_config
from deepinfer.errors import CheckpointError
from tests.checkpoint.raw_files import INDEX, read_raw

PARTS = ("text", "draft", "vision")


@pytest.fixture(scope="module")
def floats(config) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {name: torch.randn(spec.shape, generator=generator) for name, spec in expected_tensors(config).items()}


@pytest.mark.parametrize("prefix", ["", "model."])
def test_written_floats_are_read_back_as_quantised(tmp_path: Path, config, floats, prefix: str) -> None:
    write_checkpoint(tmp_path, config, floats, max_shard_bytes=1_000_000, prefix=prefix)
    checkpoint = open_checkpoint(tmp_path, parts=PARTS)
    assert checkpoint.config == config == load_model_config(tmp_path)
    for name, spec in checkpoint.specs.items():
        stored = checkpoint.tensor(name)
        expected = store_tensor(spec, floats[name])
        assert torch.equal(stored.data.view(torch.uint8), expected.data.view(torch.uint8))
        assert (stored.scale is None) == (expected.scale is None)
        assert stored.scale is None or torch.equal(stored.scale, expected.scale)
        limit = {Kind.F32: 0.0, Kind.BF16: 2**-8, Kind.FP8: 2**-4, Kind.TABLE: 2**-4, Kind.FP4: 0.34}[spec.kind]
        error = (stored.dequantize() - floats[name]).abs() - limit * floats[name].abs()
        assert float(error.max()) <= (0.26 if spec.kind is Kind.FP4 else 1e-2), name
    assert all(name.startswith(prefix or "") for shard in read_raw(tmp_path).shards.values() for name in shard)


def test_stored_tensors_are_written_as_they_are(tmp_path: Path, pristine: Path, config) -> None:
    source = open_checkpoint(pristine, parts=PARTS)
    write_checkpoint(tmp_path, config, {name: source.tensor(name) for name in source.specs})
    assert len(list(tmp_path.glob("*.safetensors"))) == 1
    copy = open_checkpoint(tmp_path, parts=PARTS)
    for name in source.specs:
        one, two = source.tensor(name), copy.tensor(name)
        assert torch.equal(one.data.view(torch.uint8), two.data.view(torch.uint8))
        assert one.scale is None or torch.equal(one.scale, two.scale)


def test_shards_keep_to_their_size_and_tables_to_their_scales(pristine: Path) -> None:
    raw = read_raw(pristine)
    sizes = [sum(len(tensor.data) for tensor in shard.values()) for shard in raw.shards.values()]
    assert len(sizes) > 2
    assert max(sizes) <= 2_000_000
    for name, shard in raw.index.items():
        if name.endswith(".scale"):
            assert raw.index[name.removesuffix("scale") + "weight"] == shard
    index = json.loads((pristine / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(sizes)
    assert not list(pristine.glob("*.partial"))


def test_files_are_readable_by_the_safetensors_library(pristine: Path, config) -> None:
    checkpoint = open_checkpoint(pristine)
    for path in pristine.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                shape = tuple(file.get_slice(name).get_shape())
                if name in checkpoint.specs:
                    assert shape == checkpoint.specs[name].stored_shape
                if name == "norm.weight":
                    assert torch.equal(file.get_tensor(name), checkpoint.tensor(name).data)


def test_vision_may_be_left_out_but_only_as_a_whole(tmp_path: Path, config, floats) -> None:
    text_only = {name: value for name, value in floats.items() if not name.startswith(("vision", "aligner", "image"))}
    write_checkpoint(tmp_path, config, text_only)
    assert open_checkpoint(tmp_path).warnings == ()
    with pytest.raises(CheckpointError, match=r"missing.*vision\.patch_embed"):
        write_checkpoint(tmp_path, config, {**text_only, "image_end": floats["image_end"]})


def test_wrong_sets_of_tensors_are_refused(tmp_path: Path, config, floats) -> None:
    without = {name: value for name, value in floats.items() if name != "mtp.0.main_norm.weight"}
    with pytest.raises(CheckpointError, match=r"1 tensors missing: mtp\.0\.main_norm\.weight"):
        write_checkpoint(tmp_path, config, without)
    with pytest.raises(CheckpointError, match=r"unknown to this configuration: extra\.weight"):
        write_checkpoint(tmp_path, config, {**floats, "extra.weight": torch.zeros(1)})
    with pytest.raises(CheckpointError, match=r"norm\.weight has shape \[3\]"):
        write_checkpoint(tmp_path, config, {**floats, "norm.weight": torch.zeros(3)})
    with pytest.raises(CheckpointError, match=r"norm\.weight holds NaN"):
        write_checkpoint(tmp_path, config, {**floats, "norm.weight": torch.full((256,), torch.nan)})
    with pytest.raises(CheckpointError, match="prefix"):
        write_checkpoint(tmp_path, config, floats, prefix="transformer.")
    assert not (tmp_path / INDEX).exists()


def test_random_checkpoint_is_reproducible(tmp_path: Path, pristine: Path, config) -> None:
    make_random_checkpoint(tmp_path / "same", config, seed=7, max_shard_bytes=2_000_000)
    for path in pristine.iterdir():
        assert (tmp_path / "same" / path.name).read_bytes() == path.read_bytes()
    make_random_checkpoint(tmp_path / "other", config, seed=8, prefix="model.")
    other = open_checkpoint(tmp_path / "other")
    one = open_checkpoint(pristine)
    assert all(not torch.equal(one.tensor(name).dequantize(), other.tensor(name).dequantize()) for name in one.specs)


def test_random_values_follow_the_specified_distributions(pristine: Path) -> None:
    checkpoint = open_checkpoint(pristine, parts=PARTS)
    exponents: dict[Kind, set[int]] = {kind: set() for kind in Kind}
    for name, spec in checkpoint.specs.items():
        tensor = checkpoint.tensor(name)
        values = tensor.dequantize()
        if tensor.scale is not None:
            exponents[spec.kind] |= set((tensor.scale.int() - 127).flatten().tolist())
        if spec.kind.is_quantized and spec.kind is not Kind.TABLE:
            assert float(values.std()) * spec.shape[1] ** 0.5 == pytest.approx(1.0, abs=0.25), name
        if name.endswith("norm.weight"):
            assert float(values.mean()) == pytest.approx(1.0, abs=0.15), name
            assert float(values.std()) == pytest.approx(0.2, abs=0.08), name
    for kind in (Kind.FP8, Kind.FP4, Kind.TABLE):
        assert min(exponents[kind]) <= -8, kind
        assert max(exponents[kind]) >= 2, kind
        assert len(exponents[kind]) >= 9, kind
    table = checkpoint.tensor("layers.1.engram.embed.weight").dequantize()
    assert float(table.std()) == pytest.approx(0.5, abs=0.02)
    base = checkpoint.tensor("layers.6.hc_attn_base").dequantize()
    assert int(base[:4].argmax()) == 6 % 4
    assert bool((base[8:].view(4, 4).diagonal() > 1).all())
    biases = [checkpoint.tensor(f"layers.2.ffn.gate.{name}").data for name in ("bias", "bias_vl")]
    assert not torch.equal(*biases)


def test_random_checkpoint_takes_a_given_tokenizer(tmp_path: Path, config, pristine: Path) -> None:
    given = tmp_path / "given.json"
    given.write_text('{"any": "file"}')
    make_random_checkpoint(tmp_path / "model", config, seed=1, tokenizer_json=given)
    assert (tmp_path / "model" / "tokenizer.json").read_text() == '{"any": "file"}'
    assert Tokenizer.from_file(str(pristine / "tokenizer.json")).get_vocab_size() == config.text.vocab_size


def test_text_model_without_vision_and_draft_can_be_written(tmp_path: Path) -> None:
    config = tiny_config(
        vision=False,
        num_nextn_predict_layers=0,
        compress_ratios=(0, 0, 2, 2, 1, 1, 1, 1),
        dspark_target_layer_ids=(),
        hc_shifted=False,
        n_routed_experts=2,
    )
    make_random_checkpoint(tmp_path, config, seed=1)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.tensor("hc_head_fn").data.shape == (4, 1024)
    assert not any(name.startswith("mtp") for name in checkpoint.specs)
