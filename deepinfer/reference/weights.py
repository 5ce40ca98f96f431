"""A small checkpoint reader, apart from the engine's: every tensor dequantised to float32 (spec 3.1 and 3.2)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from deepinfer.errors import CheckpointError, CheckpointFileError
from deepinfer.reference.number_formats import E2M1_VALUES, power_of_two
from deepinfer.reference.parameters import RowTable


def _expand(scale: Tensor, shape: torch.Size, row_size: int) -> Tensor:
    """Scales of tiles ``row_size`` x 32 -> one float32 per element of ``shape`` (rows, columns)."""
    rows, columns = shape
    bytes_ = scale.view(torch.uint8).long()
    if (bytes_ == 255).any():
        raise CheckpointError("a scale byte is 255", why="that stands for NaN in ue8m0", fix="download the file again")
    factors = power_of_two(bytes_ - 127).float()
    return factors.repeat_interleave(row_size, 0)[:rows].repeat_interleave(32, 1)[:, :columns]


def dequantise_fp8(codes: Tensor, scale: Tensor) -> Tensor:
    """e4m3 ``[O, I]`` with one ue8m0 scale per 32 x 32 tile -> float32 ``[O, I]``."""
    return codes.float() * _expand(scale, codes.shape, row_size=32)


def dequantise_rows(codes: Tensor, scale: Tensor) -> Tensor:
    """e4m3 ``[rows, width]`` with one ue8m0 scale per row and 32 columns -> float32."""
    return codes.float() * _expand(scale, codes.shape, row_size=1)


def dequantise_fp4(packed: Tensor, scale: Tensor) -> Tensor:
    """int8 ``[O, I / 2]``, low nibble first, one ue8m0 scale per row and 32 columns -> float32 ``[O, I]``."""
    values = torch.tensor(E2M1_VALUES + tuple(-value for value in E2M1_VALUES))
    bits = packed.view(torch.uint8).long()
    codes = torch.stack((bits & 15, bits >> 4), -1).flatten(1)
    return values[codes] * _expand(scale, codes.shape, row_size=1)


@dataclass(frozen=True, slots=True)
class StoredTable:
    """An Engram table that stays in its file."""

    codes: tuple[Path, str]
    """File and spelling there."""
    scales: tuple[Path, str]
    shape: tuple[int, ...]

    def gather(self, rows: Tensor) -> Tensor:
        """Rows ``[n]`` int64 -> ``[n, width]`` float32."""
        wanted, places = rows.unique(return_inverse=True)
        codes, scales = (self._read(place, wanted.tolist()) for place in (self.codes, self.scales))
        return dequantise_rows(codes.view(torch.float8_e4m3fn), scales)[places]

    @staticmethod
    def _read(place: tuple[Path, str], rows: list[int]) -> Tensor:
        file, spelling = place
        with safe_open(file, "pt") as shard:
            stored = shard.get_slice(spelling)
            return torch.cat([stored[row : row + 1].view(torch.uint8) for row in rows])


def _stored_names(folder: Path) -> Iterator[tuple[str, Path, str]]:
    """``(plain name, file, spelling in the file)`` of every tensor; a leading ``model.`` is dropped."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = sorted({folder / shard for shard in json.loads(index.read_text())["weight_map"].values()})
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointFileError(f"no weights in {folder}", why="no safetensors file is there", fix="check the path")
    for file in files:
        if not file.is_file():
            raise CheckpointFileError(f"{file} is missing", why="the index names it", fix="download it again")
        with safe_open(file, "pt") as shard:
            for spelling in shard.keys():  # noqa: SIM118 (not a dict)
                yield spelling.removeprefix("model."), file, spelling


def load_weights(folder: str | Path) -> dict[str, Tensor | RowTable]:
    """All tensors of a checkpoint by plain name, in float32, without the scales. Engram tables stay in their file.

    Raises:
        CheckpointFileError: a shard is missing.
        CheckpointError: a scale is missing, or a tensor is stored under two spellings.
    """
    places: dict[str, tuple[Path, str]] = {}
    for name, file, spelling in _stored_names(Path(folder)):
        if name in places:
            raise CheckpointError(
                f"tensor {name} is there twice", why="spelled with and without model.", fix="drop one"
            )
        places[name] = (file, spelling)
    return {name: _load(name, places) for name in places if not name.endswith(".scale")}


def _load(name: str, places: dict[str, tuple[Path, str]]) -> Tensor | RowTable:
    file, spelling = places[name]
    with safe_open(file, "pt") as shard:
        stored = shard.get_slice(spelling)
        kind = stored.get_dtype()
        if kind not in ("F8_E4M3", "I8"):
            return shard.get_tensor(spelling).float()
    scale_name = name.removesuffix("weight") + "scale"
    if scale_name not in places:
        raise CheckpointError(
            f"tensor {name} has no {scale_name}", why="it is quantised", fix="download the file again"
        )
    scale_file, scale_spelling = places[scale_name]
    if name.endswith("engram.embed.weight"):
        return StoredTable(places[name], places[scale_name], tuple(stored.get_shape()))
    with safe_open(file, "pt") as shard:
        codes = shard.get_tensor(spelling)
    with safe_open(scale_file, "pt") as shard:
        scale = shard.get_tensor(scale_spelling)
    return dequantise_fp4(codes, scale) if kind == "I8" else dequantise_fp8(codes, scale)
