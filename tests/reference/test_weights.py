"""The checkpoint reader: storage kinds, spellings and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from deepinfer.errors import CheckpointError, CheckpointFileError
from deepinfer.reference.parameters import RowTable
from deepinfer.reference.weights import dequantise_fp4, dequantise_fp8, load_weights


def scale_bytes(*rows: list[int]) -> Tensor:
    return torch.tensor(rows, dtype=torch.uint8).view(torch.float8_e8m0fnu)


def test_fp8_has_one_scale_per_tile() -> None:
    codes = torch.ones(40, 64).to(torch.float8_e4m3fn)
    values = dequantise_fp8(codes, scale_bytes([127, 128], [126, 120]))
    assert values[:32, :32].unique().tolist() == [1.0]
    assert values[:32, 32:].unique().tolist() == [2.0]
    assert values[32:, :32].unique().tolist() == [0.5]
    assert values[32:, 32:].unique().tolist() == [2.0**-7]


def test_fp4_holds_even_columns_in_the_low_nibble() -> None:
    packed = torch.zeros(2, 32, dtype=torch.int8)
    packed[0, 0] = 0x71  # column 0: code 1, column 1: code 7
    packed[1, 31] = -0x08  # 0xF8: column 62: code 8, column 63: code 15
    values = dequantise_fp4(packed, scale_bytes([127, 127], [127, 128]))
    assert values.shape == (2, 64)
    assert values[0, :3].tolist() == [0.5, 6.0, 0.0]
    assert values[1, 62:].tolist() == [0.0, -12.0]


def test_nan_scale_is_refused() -> None:
    with pytest.raises(CheckpointError, match="255"):
        dequantise_fp8(torch.ones(32, 32).to(torch.float8_e4m3fn), scale_bytes([255]))


def stored_linear() -> dict[str, Tensor]:
    return {"a.weight": torch.ones(32, 32).to(torch.float8_e4m3fn), "a.scale": scale_bytes([128])}


def test_prefix_is_dropped_and_two_spellings_are_refused(tmp_path: Path) -> None:
    save_file({f"model.{name}": value for name, value in stored_linear().items()}, tmp_path / "one.safetensors")
    weights = load_weights(tmp_path)
    assert list(weights) == ["a.weight"]
    value = weights["a.weight"]
    assert isinstance(value, Tensor)
    assert value.unique().tolist() == [2.0]
    save_file(stored_linear(), tmp_path / "two.safetensors")
    with pytest.raises(CheckpointError, match="twice"):
        load_weights(tmp_path)


def test_missing_scale_and_missing_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointFileError, match="no weights"):
        load_weights(tmp_path)
    save_file({"a.weight": stored_linear()["a.weight"]}, tmp_path / "one.safetensors")
    with pytest.raises(CheckpointError, match=r"a\.scale"):
        load_weights(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a.weight": "gone.safetensors"}}')
    with pytest.raises(CheckpointFileError, match="gone"):
        load_weights(tmp_path)


def test_table_rows_are_read_on_demand(golden_dir: Path) -> None:
    weights = load_weights(golden_dir / "s1_basic")
    table = weights["layers.1.engram.embed.weight"]
    assert isinstance(table, RowTable)
    assert not isinstance(table, Tensor)
    assert table.shape == (434, 32)
    rows = table.gather(torch.tensor([5, 0, 5]))
    assert torch.equal(rows[0], rows[2])
    everything = table.gather(torch.arange(434))
    assert torch.equal(rows, everything[[5, 0, 5]])
    assert everything.std() > 0.05
