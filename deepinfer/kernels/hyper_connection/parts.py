"""What the hyper-connection kernels take and pass on: forms of an update, mixes, tiles, partial sums."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from deepinfer.kernels.hyper_connection import stages


@dataclass(frozen=True, slots=True)
class ExpertOutputs:
    """A sublayer output that is still in parts: it is their sum, rounded once."""

    routed: Tensor
    """``[rows, k, hidden]`` bf16, already weighted."""
    shared: Tensor
    """``[rows, hidden]`` bf16."""
    experts: Tensor | None = None
    """``[rows, k]`` int32; outputs of expert -1 do not count, whatever they hold. None: all count."""


@dataclass(frozen=True, slots=True)
class SplitSums:
    """A sublayer output as partial sums ``[splits, rows, hidden]`` float32: their sum, rounded once to bf16."""

    sums: Tensor


TILE_ROWS = 16
Update = Tensor | ExpertOutputs | SplitSums


class Mixes(NamedTuple):
    """Mixes of one sublayer, float32: views of one ``[rows, (2 + M) * M]`` tensor."""

    read: Tensor
    """``[rows, M]``, for the next sublayer's read."""
    write: Tensor
    """``[rows, M]``"""
    stream: Tensor
    """``[rows, M, M]``"""


def new_mixes(like: Tensor, rows: int, streams: int) -> tuple[Tensor, Mixes]:
    """Storage ``[rows, (2 + M) * M]`` float32 and its views."""
    packed = like.new_empty(rows, (2 + streams) * streams, dtype=torch.float32)
    return packed, Mixes(
        packed[:, :streams],
        packed[:, streams : 2 * streams],
        packed[:, 2 * streams :].unflatten(1, (streams, streams)),
    )


@dataclass(frozen=True, slots=True)
class Tile:
    """Shape of one program of :func:`hc_write_read`."""

    columns: int = 64
    """Of the hidden width. Part of the numerical meaning, since it fixes the order of sums, like ``num_warps``."""
    num_warps: int = 4
    row_tiles: int = 0
    """Tiles of 16 rows that a program does one after the other, with one look at ``fn``; 0: chosen by the number of
    rows. No influence on the result."""

    num_stages: int = 1
    """Above 1: loads run ahead by this many ``row_tiles``, through shared memory. No influence on the result."""

    def num_slices(self, hidden: int) -> int:
        """Programs side by side."""
        return triton.cdiv(hidden, self.columns)

    def row_tiles_for(self, rows: int, hidden: int) -> int:
        """``row_tiles``, or as many as still leave a few programs for every multiprocessor: a power of two, since it is
        a constant of the kernel, which must not be compiled anew for every length of a prompt."""
        if self.row_tiles:
            return self.row_tiles
        most = triton.cdiv(rows, TILE_ROWS) * self.num_slices(hidden) // 400
        return 1 << max(0, most.bit_length() - 1)

    def row_limits(self, hidden: int) -> list[int]:
        """Rows up to which :meth:`row_tiles_for` gives one number, of all steps that may be."""
        if self.row_tiles:
            return []
        doublings = [triton.cdiv(400 << power, self.num_slices(hidden)) for power in range(1, 16)]
        return [TILE_ROWS * (tiles - 1) for tiles in doublings]


DEFAULT_TILE = Tile()


class PartialSums(NamedTuple):
    """What :func:`hc_write_read` leaves for :func:`hc_finish`."""

    records: Tensor
    """``[rows, stride]`` float32: per slice the products, then squares of h, then squares of the trunk."""
    num_slices: int


def mix_width(streams: int) -> int:
    """Products per slice of a record: ``(2 + M) * M`` padded to a power of two."""
    return max(16, triton.next_power_of_2((2 + streams) * streams))


def record_stride(num_slices: int, streams: int) -> int:
    """Floats of a row's record of partial sums, a multiple of 32."""
    return triton.cdiv(num_slices * (mix_width(streams) + 2), 32) * 32


def new_partial_sums(trunk: Tensor, num_slices: int) -> PartialSums:
    """Room for the records of all rows of ``trunk`` ``[rows, M, hidden]``."""
    rows, streams, _ = trunk.shape
    return PartialSums(trunk.new_empty(rows, record_stride(num_slices, streams), dtype=torch.float32), num_slices)


def update_arguments(update: Update | None) -> tuple[int, int, Tensor | None, Tensor | None, Tensor | None]:
    """Kind, parts, and the kernels' pointers ``update``, ``shared``, ``experts``."""
    if update is None:
        return stages.NO_UPDATE, 1, None, None, None
    if isinstance(update, ExpertOutputs):
        assert update.routed.is_contiguous()
        assert update.shared.is_contiguous()
        assert update.experts is None or (update.experts.is_contiguous() and update.experts.dtype == torch.int32)
        return stages.EXPERT_UPDATE, update.routed.shape[1], update.routed, update.shared, update.experts
    if isinstance(update, SplitSums):
        assert update.sums.is_contiguous()
        assert update.sums.dtype == torch.float32
        return stages.SPLIT_UPDATE, update.sums.shape[0], update.sums, None, None
    assert update.is_contiguous()
    return stages.PLAIN_UPDATE, 1, update, None, None


def mix_pointers(mixes: Mixes | None) -> tuple[Tensor | None, Tensor | None]:
    """Write and stream mix, after a check that the kernels' addressing fits them."""
    if mixes is None:
        return None, None
    streams = mixes.write.shape[1]
    assert mixes.write.stride(1) == 1
    assert mixes.stream.stride()[1:] == (streams, 1)
    assert mixes.write.shape[0] == 1 or mixes.stream.stride(0) == mixes.write.stride(0)
    return mixes.write, mixes.stream
