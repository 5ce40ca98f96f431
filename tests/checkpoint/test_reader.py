"""Reading tensors: exact values, both access paths, the golden checkpoints, and tables far larger than memory."""

from __future__ import annotations

import json
import logging
import math
import sys
from pathlib import Path

import pytest
import torch

from deepinfer.checkpoint import Kind, Part, open_checkpoint, reader, released_config, tiny_config
from deepinfer.checkpoint.reader import select_parts
from deepinfer.checkpoint.tensor_specs import ITEM_BYTES, expected_tensors
from deepinfer.config.model_file import model_config_to_dict
from deepinfer.errors import CheckpointError, CheckpointFileError
from tests.checkpoint.raw_files import INDEX, RawCheckpoint, read_raw

GOLDEN = Path(__file__).parents[1] / "golden"
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E2M1 += [-value for value in E2M1]


def e4m3(code: int) -> float:
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code >> 3) & 15, code & 7
    return sign * (mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10))


@pytest.mark.parametrize("case", ["s1_basic", "s2_real_heads"])
def test_golden_checkpoint_loads_completely(case: str) -> None:
    checkpoint = open_checkpoint(GOLDEN / case, parts=("text", "draft", "vision"))
    assert checkpoint.warnings == ()
    raw = read_raw(GOLDEN / case)
    names = {name for shard in raw.shards.values() for name in shard}
    scales = {spec.scale_name for spec in checkpoint.specs.values() if spec.scale_name}
    assert names == set(checkpoint.specs) | scales
    for tensor in checkpoint.load_all(progress=False):
        assert tensor.data.view(torch.uint8).flatten().numpy().tobytes() == raw[tensor.name].data
        values = tensor.dequantize()
        assert values.shape == checkpoint.specs[tensor.name].shape
        assert values.dtype == torch.float32
        assert bool(torch.isfinite(values).all())
        assert float(values.abs().max()) > 0


def test_values_equal_an_independent_decoding_of_the_bytes() -> None:
    checkpoint = open_checkpoint(GOLDEN / "s1_basic")
    raw = read_raw(GOLDEN / "s1_basic")
    row, column = 37, 101
    fp8, tiles = raw["layers.2.attn.wq_b.weight"], raw["layers.2.attn.wq_b.scale"]
    expected = e4m3(fp8.data[row * 64 + column % 64]) * 2.0 ** (tiles.data[(row // 32) * 2 + column % 64 // 32] - 127)
    assert checkpoint.tensor("layers.2.attn.wq_b.weight").dequantize()[row, column % 64] == expected
    fp4, groups = raw["mtp.1.ffn.experts.1.w2.weight"], raw["mtp.1.ffn.experts.1.w2.scale"]
    value = checkpoint.tensor("mtp.1.ffn.experts.1.w2.weight").dequantize()
    for col in (10, 11):
        byte = fp4.data[row * 16 + col // 2]
        code = byte & 15 if col % 2 == 0 else byte >> 4
        assert value[row, col] == E2M1[code] * 2.0 ** (groups.data[row] - 127)


def test_rows_of_a_tensor_equal_rows_of_its_values(pristine: Path) -> None:
    checkpoint = open_checkpoint(pristine)
    for name in (
        "layers.0.attn.wq_a.weight",
        "layers.0.ffn.experts.1.w2.weight",
        "embed.weight",
        "layers.0.attn.attn_sink",
    ):
        tensor = checkpoint.tensor(name)
        values = tensor.dequantize()
        start, stop = (32, 50) if len(values) > 50 else (0, 3)
        assert torch.equal(tensor.rows(start, stop).dequantize(), values[start:stop])
        assert torch.equal(tensor.row(5), values[5])
    tensor = checkpoint.tensor("layers.0.attn.wq_a.weight")
    assert torch.equal(tensor.row(63), tensor.dequantize()[63])
    with pytest.raises(ValueError, match="tile"):
        tensor.rows(5, 40)
    with pytest.raises(ValueError, match="inside"):
        tensor.rows(32, 65)


def test_dequantised_values_are_a_copy(pristine: Path) -> None:
    checkpoint = open_checkpoint(pristine)
    tensor = checkpoint.tensor("layers.0.attn.attn_sink")
    tensor.dequantize().zero_()
    assert torch.equal(tensor.data, checkpoint.tensor("layers.0.attn.attn_sink").data)


def test_mapped_tensors_equal_read_ones_and_never_change_the_file(pristine: Path) -> None:
    checkpoint = open_checkpoint(pristine, parts=("text", "draft", "vision"))
    for name, spec in checkpoint.specs.items():
        read, mapped = checkpoint.tensor(name), checkpoint.tensor(name, mapped=True)
        assert torch.equal(read.data.view(torch.uint8), mapped.data.view(torch.uint8)), spec
        assert (read.scale is None and mapped.scale is None) or torch.equal(read.scale, mapped.scale)
    mapped = checkpoint.tensor("embed.weight", mapped=True)
    mapped.data.zero_()  # copy on write
    assert bool(open_checkpoint(pristine).tensor("embed.weight").data.any())


def test_memory_maps_cover_every_tensor_in_a_few_windows(pristine: Path, monkeypatch) -> None:
    monkeypatch.setattr(reader, "_MAX_WINDOW_BYTES", 100_000)
    checkpoint = open_checkpoint(pristine)
    for name in checkpoint.specs:
        read, mapped = checkpoint.tensor(name), checkpoint.tensor(name, mapped=True)
        assert torch.equal(read.data.view(torch.uint8), mapped.data.view(torch.uint8)), name
    num_windows = sum(len(windows) for windows in checkpoint._windows.values())
    assert 20 < num_windows < len(checkpoint.specs) / 2
    assert all(end - start <= 270_000 for windows in checkpoint._windows.values() for start, end in windows)


def test_tensor_outlives_its_closed_checkpoint(pristine: Path) -> None:
    checkpoint = open_checkpoint(pristine)
    mapped = checkpoint.tensor("norm.weight", mapped=True)
    table = checkpoint.engram_table(1)
    checkpoint.close()
    assert torch.equal(mapped.data, checkpoint.tensor("norm.weight").data)  # opens the shard again
    assert table.gather(torch.tensor([0]))[0].shape == (1, 32)


def test_alternatives_are_read_in_their_logical_form(broken: RawCheckpoint) -> None:
    stored = {name: broken[name] for name in ("layers.1.engram.q_weight", "mtp.1.confidence_head.proj.weight")}
    expected = {}
    for name, tensor in stored.items():
        values = torch.frombuffer(bytearray(tensor.data), dtype=torch.bfloat16).float() + 2.0**-20
        expected[name] = values
        tensor.dtype, tensor.data = "F32", values.numpy().tobytes()
    broken["vision.patch_embed.proj.weight"].shape = [64, 3, 14, 14]
    broken.write()
    checkpoint = open_checkpoint(broken.directory, parts=("text", "draft", "vision"))
    for name, values in expected.items():
        tensor = checkpoint.tensor(name)
        assert tensor.kind is Kind.F32
        assert torch.equal(tensor.dequantize().flatten(), values)  # not rounded to bf16
    assert checkpoint.tensor("vision.patch_embed.proj.weight").data.shape == (64, 588)


def test_tensor_at_an_odd_offset_is_read(broken: RawCheckpoint) -> None:
    name = "layers.0.attn.attn_sink"
    expected = broken[name].data
    shard = broken.shard_of(name)
    tensors = {"mtp.0.embed.weight": type(broken[name])("U8", [3], b"abc"), name: shard.pop(name), **shard}
    broken.index["mtp.0.embed.weight"] = broken.index[name]
    broken.shards[broken.index[name]] = tensors
    broken.write()
    checkpoint = open_checkpoint(broken.directory)
    assert checkpoint.tensor(name).data.numpy().tobytes() == expected
    assert checkpoint.tensor(name, mapped=True).data.numpy().tobytes() == expected


@pytest.mark.parametrize("name", ["layers.0.attn.wq_a.scale", "mtp.1.ffn.experts.0.w3.scale"])
def test_nan_scale_is_refused_when_its_tensor_is_loaded(broken: RawCheckpoint, name: str) -> None:
    broken[name].data = broken[name].data[:-1] + b"\xff"
    broken.write()
    checkpoint = open_checkpoint(broken.directory)
    weight = name.removesuffix("scale") + "weight"
    with pytest.raises(CheckpointError, match=rf"{weight} holds byte 255 in 1 of") as caught:
        checkpoint.tensor(weight)
    assert "NaN" in str(caught.value)


def test_nan_scale_of_a_table_row_is_refused_when_it_is_fetched(broken: RawCheckpoint) -> None:
    tensor = broken["layers.3.engram.embed.scale"]
    tensor.data = tensor.data[:100] + b"\xff" + tensor.data[101:]
    broken.write()
    table = open_checkpoint(broken.directory).engram_table(3)
    table.gather(torch.tensor([99, 101]))
    with pytest.raises(CheckpointError, match=r"row 100 of layers\.3\.engram\.embed\.weight"):
        table.gather(torch.tensor([99, 100]))


def test_table_rows_equal_rows_of_the_whole_table(pristine: Path) -> None:
    checkpoint = open_checkpoint(pristine)
    table = checkpoint.engram_table(1)
    whole = checkpoint.tensor("layers.1.engram.embed.weight")
    assert (table.rows, table.width) == (6126, 32)
    ids = torch.randint(0, 6126, (3000,), generator=torch.Generator().manual_seed(1))  # enough for several threads
    ids[7] = ids[8] = 6125
    codes, scales = table.gather(ids)
    assert torch.equal(codes, whole.data.view(torch.uint8)[ids])
    assert torch.equal(scales, whole.scale[ids])
    assert torch.equal(table.gather_dequantized(ids), whole.dequantize()[ids])
    assert table.gather(torch.empty(0, dtype=torch.int64))[0].shape == (0, 32)
    assert checkpoint.engram_table(1) is table


@pytest.mark.parametrize("bad", [-1, 6126])
def test_row_outside_the_table_is_refused(pristine: Path, bad: int) -> None:
    table = open_checkpoint(pristine).engram_table(1)
    with pytest.raises(IndexError, match="6126 rows"):
        table.gather(torch.tensor([0, bad]))


def test_unknown_names_and_layers_are_refused(pristine: Path) -> None:
    checkpoint = open_checkpoint(pristine, parts=("text",))
    for name in ("mtp.0.main_norm.weight", "vision.norm.weight", "layers.0.attn.wq_a.scale"):
        with pytest.raises(CheckpointError, match=name):
            checkpoint.tensor(name)
    with pytest.raises(CheckpointError, match=r"layers\.2\.engram"):
        checkpoint.engram_table(2)


def test_parts_follow_the_configuration() -> None:
    config = tiny_config()
    assert select_parts(config, None) == {Part.TEXT, Part.DRAFT}
    assert select_parts(config, ["text", "vision"]) == {Part.TEXT, Part.VISION}
    assert select_parts(config, "text") == {Part.TEXT}
    with pytest.raises(CheckpointError, match="'audio'"):
        select_parts(config, ["audio"])
    with pytest.raises(CheckpointError, match="'vision'"):
        select_parts(tiny_config(vision=False), ["vision"])
    plain = tiny_config(
        num_nextn_predict_layers=0, compress_ratios=(0, 0, 2, 2, 1, 1, 1, 1), dspark_target_layer_ids=()
    )
    assert select_parts(plain, None) == {Part.TEXT}
    with pytest.raises(CheckpointError, match="'draft'"):
        select_parts(plain, ["draft"])


def test_load_all_reads_forward_and_logs_the_rate(pristine: Path, caplog, capsys) -> None:
    checkpoint = open_checkpoint(pristine)
    with caplog.at_level(logging.INFO):
        names = [tensor.name for tensor in checkpoint.load_all()]
    expected = {name for name, spec in checkpoint.specs.items() if spec.kind is not Kind.TABLE}
    assert set(names) == expected
    assert names == checkpoint.load_order(names)
    assert f"loaded {len(expected)} tensors" in caplog.text
    assert "GB/s" in caplog.text
    assert "weights" in capsys.readouterr().err
    chosen = ["norm.weight", "embed.weight"]
    assert {tensor.name for tensor in checkpoint.load_all(chosen, progress=False)} == set(chosen)
    assert capsys.readouterr().err == ""


def test_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(CheckpointFileError, match="does not exist"):
        open_checkpoint(tmp_path / "absent")


def write_sparse_checkpoint(directory: Path, config) -> dict[str, tuple[Path, int]]:
    """A checkpoint of full size whose files are holes: headers are real, all data is zero and takes no disk.

    Returns file and byte offset of every tensor.
    """
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(model_config_to_dict(config)))
    shards: dict[str, list] = {"tables.safetensors": [], "rest.safetensors": []}
    for spec in expected_tensors(config).values():
        shard = shards["tables.safetensors" if spec.kind is Kind.TABLE else "rest.safetensors"]
        shard.append((spec.name, spec.dtypes[0], spec.stored_shape))
        if spec.scale_name is not None:
            shard.append((spec.scale_name, "F8_E8M0", spec.scale_shape))
    weight_map, places = {}, {}
    for file, tensors in shards.items():
        header, offset = {}, 0
        for name, dtype, shape in tensors:
            end = offset + math.prod(shape) * ITEM_BYTES[dtype]
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
            weight_map[name] = file
            offset = end
        text = json.dumps(header).encode()
        with (directory / file).open("wb") as shard_file:
            shard_file.write(len(text).to_bytes(8, "little") + text)
            shard_file.truncate(8 + len(text) + offset)
        for name, entry in header.items():
            places[name] = (directory / file, 8 + len(text) + entry["data_offsets"][0])
    (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return places


def resident_bytes() -> int:
    fields = Path("/proc/self/status").read_text().split("VmRSS:")[1].split()
    return int(fields[0]) * 1024


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads resident memory from /proc")
def test_released_size_checkpoint_opens_and_serves_rows_without_reading_the_tables(tmp_path: Path) -> None:
    places = write_sparse_checkpoint(tmp_path / "full", released_config())
    rows = torch.tensor([0, 1, 384016681, 200_000_000])
    for tensor, width, byte in (("embed.weight", 256, 0x3A), ("embed.scale", 8, 130)):
        path, start = places[f"layers.14.engram.{tensor}"]
        with path.open("r+b") as file:
            for row in rows.tolist():
                file.seek(start + row * width)
                file.write(bytes([byte]) * width)
    before = resident_bytes()
    checkpoint = open_checkpoint(tmp_path / "full", parts=("text", "draft", "vision"))
    opened = resident_bytes()
    table = checkpoint.engram_table(14)
    assert (table.rows, table.width) == (384016682, 256)
    assert torch.equal(table.gather_dequantized(rows), torch.full((4, 256), 1.25 * 8))
    spread = torch.arange(0, 384_000_000, 200_000)  # 1920 rows over 98 GB
    values = table.gather_dequantized(spread)
    assert int((values != 0).any(1).sum()) == 2  # rows 0 and 200,000,000
    assert opened - before < 300e6  # 96,085 header entries and 48,496 specs
    assert resident_bytes() - opened < 100e6  # the pages of the rows that were fetched
    assert checkpoint.tensor("layers.39.ffn.gate.bias", mapped=True).data.shape == (384,)
    with pytest.raises(CheckpointError, match="engram_table"):
        checkpoint.tensor("layers.1.engram.embed.weight")
