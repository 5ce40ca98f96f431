"""Launches of ``cuda/hyper_connection_write_read.cu`` and ``cuda/hyper_connection_finish.cu``.

They take the place of the Triton kernels on Hopper for 4 streams and widths that are multiples of 256. Equal inputs
give the same trunk, h and feature up to float32 rounding; sums over columns are taken in another order.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.kernels import nvrtc
from deepinfer.kernels.hyper_connection.parts import Mixes

GROUP = 256
"""Columns whose sums are added pairwise; see the kernels."""
_THREADS = 160
_COLUMNS = 32
_FN_BYTES = 4 * 3 * 3 * 32 * 16
_SUM_BYTES = 2 * 16 * 28 * 4
_SCALES = {None: 0, torch.uint8: 1, torch.float32: 2}


@dataclass(frozen=True, slots=True)
class Shape:
    """How the blocks of the first kernel are cut; no influence on any result."""

    warps: int
    """Side by side, 32 columns each: 1, 2, 4 or 8."""
    halves: int
    """Sets of such warps that share ``fn``: 1 or 2."""
    row_groups: int = 0
    """Blocks below one another; 0: one for each ``halves`` tiles of 16 rows."""

    @property
    def shared_bytes(self) -> int:
        sums = self.halves * self.warps * _SUM_BYTES if self.warps > 1 else 0
        return self.warps * _FN_BYTES + sums

    def grid(self, rows: int, hidden: int) -> tuple[int, int, int]:
        tiles = -(-rows // (16 * self.halves))
        return (hidden // (_COLUMNS * self.warps), min(tiles, self.row_groups or tiles), 1)


def choose_shape(rows: int, has_parts: bool) -> Shape:
    """Few rows: many small blocks. Many rows: every multiprocessor keeps its share of ``fn`` for many tiles.

    Args:
        has_parts: the update is a sum of several tensors, which takes more registers.
    """
    if rows <= 64:
        return Shape(1, 1)
    if rows <= 512:
        return Shape(2, 1, 8) if has_parts else Shape(2, 2, 4)
    return Shape(8, 1, 6) if has_parts else Shape(8, 2, 6)


class _WriteReadArguments(ctypes.Structure):
    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in (
                *("trunk", "update", "shared", "experts", "write_mix", "stream_mix", "read_mix", "fn"),
                *("new_trunk", "h", "partial", "feature"),
            )
        ),
        *((name, ctypes.c_int) for name in ("rows", "row_groups", "mix_stride", "read_stride", "record_stride")),
    )


class _FinishArguments(ctypes.Structure):
    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("partial", "h", "norm", "scale", "base", "x", "rounded", "codes", "scales", "mixes")
        ),
        *((name, ctypes.c_int) for name in ("rows", "record_stride")),
        *((name, ctypes.c_float) for name in ("norm_eps", "hc_eps")),
    )


@functools.cache
def is_available(device: torch.device) -> bool:
    return nvrtc.is_available(device)


def accepts(streams: int, hidden: int, device: torch.device) -> bool:
    """Whether the kernels take this shape on this device."""
    return streams == 4 and hidden % GROUP == 0 and is_available(device)


def accepts_mix(mix: Tensor) -> bool:
    """Whether rows of a mix can be loaded 16 bytes at a time."""
    return mix.data_ptr() % 16 == 0 and (mix.shape[0] == 1 or mix.stride(0) % 4 == 0)


def write_read(
    trunk: Tensor,
    read_mix: Tensor,
    fn: Tensor,
    update: tuple[int, int, Tensor | None, Tensor | None, Tensor | None],
    mixes: Mixes | None,
    new_trunk: Tensor,
    h: Tensor,
    partial: Tensor,
    feature: Tensor | None,
    shape: Shape,
    overlap: bool,
) -> None:
    """Fill ``new_trunk``, ``h``, ``partial`` and ``feature``; arguments as of ``hc_write_read``.

    Args:
        update: from ``update_arguments``.
        partial: ``[rows, stride]`` float32 for ``hidden / (32 * shape.warps)`` slices.
    """
    rows, _, hidden = trunk.shape
    if rows == 0:
        return
    kind, parts, *pointers = update
    grid = shape.grid(rows, hidden)
    arguments = _WriteReadArguments(
        trunk.data_ptr(), *map(nvrtc.pointer, pointers),
        *((mixes.write.data_ptr(), mixes.stream.data_ptr()) if mixes else (0, 0)), read_mix.data_ptr(), fn.data_ptr(),
        new_trunk.data_ptr(), h.data_ptr(), partial.data_ptr(), nvrtc.pointer(feature),
        rows, grid[1], mixes.write.stride(0) if mixes else 0, read_mix.stride(0), partial.stride(0),
    )  # fmt: skip
    defines = {
        "HIDDEN": hidden, "KIND": kind, "K": parts, "WARPS": shape.warps, "HALVES": shape.halves,
        "FEATURE": int(feature is not None),
    }  # fmt: skip
    source, entry, shared = "hyper_connection_write_read.cu", "hc_write_read", shape.shared_bytes
    kernel = nvrtc.load_kernel(source, entry, defines, trunk.device, shared_bytes=shared)
    kernel.launch(grid, 32 * shape.warps * shape.halves, [arguments], shared_bytes=shared, overlap=overlap)


def finish(
    partial: Tensor,
    num_slices: int,
    h: Tensor,
    norm_weight: Tensor,
    scale: Tensor,
    base: Tensor,
    norm_eps: float,
    hc_eps: float,
    iterations: int,
    x: Tensor,
    rounded: Tensor | None,
    codes: Tensor | None,
    scales: Tensor | None,
    mixes: Tensor | None,
    overlap: bool,
) -> None:
    """Fill ``x``, ``rounded``, ``codes``, ``scales`` and ``mixes`` ``[rows, 24]``; arguments as of ``hc_finish``."""
    rows, hidden = h.shape
    if rows == 0:
        return
    arguments = _FinishArguments(
        partial.data_ptr(), h.data_ptr(), norm_weight.data_ptr(), scale.data_ptr(), base.data_ptr(), x.data_ptr(),
        *map(nvrtc.pointer, (rounded, codes, scales, mixes)), rows, partial.stride(0), norm_eps, hc_eps,
    )  # fmt: skip
    defines = {
        "HIDDEN": hidden, "SLICES": num_slices, "ITERATIONS": iterations, "MIXES": int(mixes is not None),
        "NORM_BF16": int(norm_weight.dtype == torch.bfloat16), "ROUNDED": int(rounded is not None),
        "CODES": int(codes is not None), "SCALES": _SCALES[None if scales is None else scales.dtype],
    }  # fmt: skip
    kernel = nvrtc.load_kernel("hyper_connection_finish.cu", "hc_finish", defines, h.device)
    blocks = -(-hidden // (8 * _THREADS)) + (mixes is not None)
    kernel.launch((rows * blocks, 1, 1), _THREADS, [arguments], overlap=overlap)


def accepts_slices(num_slices: int, hidden: int) -> bool:
    """Whether :func:`finish` takes partial sums over this many slices."""
    return num_slices * GROUP in (hidden, 2 * hidden, 4 * hidden, 8 * hidden)
