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
from deepinfer.kernels.hyper_connection import stages
from deepinfer.kernels.hyper_connection.parts import Mixes

GROUP = 256
"""Columns whose sums are added pairwise; see the kernels."""
_THREADS = 160
_COLUMNS = 32
_STREAMS = 4
_NUM_SMS = 132
_FN_BYTES = 4 * 3 * 3 * 32 * 16
_TILE_BYTES = 16 * 28 * 4
_SCALES = {None: 0, torch.uint8: 1, torch.float32: 2}
_ROW_SCALES = 3


@dataclass(frozen=True, slots=True)
class Shape:
    """How the blocks of the first kernel are cut; no influence on any result."""

    warps: int
    """Side by side, each with ``serial`` slices of 32 columns: 1, 2, 4 or 8."""
    tiles: int
    """Sets of such warps, each with 16 rows at a time, that share ``fn``."""
    row_groups: int = 0
    """Blocks below one another; 0: one for each ``tiles`` tiles of 16 rows."""
    serial: int = 1
    """Slices that a warp has one after the other: 1, 2 or 4; ``warps * serial`` is at most 8."""
    resident: int = 1
    """Blocks for which a multiprocessor's registers have to suffice."""
    depth: int = 0
    """With ``row_groups``: slices of a warp in shared memory, all but one on their way; 0: one, in registers."""

    @property
    def has_loop(self) -> bool:
        return self.row_groups > 0

    @property
    def reads_ahead(self) -> bool:
        """Whether a warp's first streams and mixes are loaded before the kernel waits: into registers that few rows
        leave free, or to shared memory."""
        return self.depth > 0 or (self.resident == 1 and self.serial == 1 and not self.has_loop)

    @property
    def threads(self) -> int:
        return 32 * self.warps * self.tiles

    def shared_bytes(self, kind: int, parts: int) -> int:
        """Of a block, for an update of this kind (``stages``) and number of parts."""
        turns = 2 if self.has_loop and self.warps > 1 else 1
        of_update = {stages.NO_UPDATE: 0, stages.EXPERT_UPDATE: parts + 1, stages.SPLIT_UPDATE: 2 * parts}
        pieces = _STREAMS + of_update.get(kind, 1)
        ring = self.depth * 2 * pieces * 32 * 16
        return self.warps * (self.serial * _FN_BYTES + self.tiles * (turns * _TILE_BYTES + ring))

    def grid(self, rows: int, hidden: int) -> tuple[int, int, int]:
        row_blocks = -(-rows // (16 * self.tiles))
        slices = hidden // (_COLUMNS * self.warps * self.serial)
        return (slices, min(row_blocks, self.row_groups or row_blocks), 1)

    def defines(self) -> dict[str, int]:
        """Compile-time constants."""
        return {
            "WARPS": self.warps, "SERIAL": self.serial, "TILES": self.tiles, "LOOPS": int(self.has_loop),
            "RESIDENT": self.resident, "DEPTH": self.depth,
        }  # fmt: skip


def choose_shape(rows: int, hidden: int, kind: int, parts: int) -> Shape:
    """Few rows: every 16 of them, with 32 columns, are a warp's, and warps share ``fn`` as soon as they can. Many rows:
    every multiprocessor keeps its share of ``fn`` for many tiles, and the next slices are on their way to its shared
    memory while one is worked on. Fastest on an H200 for a hidden size of 5,120, together with the second kernel
    (``bench/gpu/check_hyper_connection.py``).

    Args:
        kind: of the update (``stages``).
        parts: tensors that the update is a sum of.
    """
    if rows <= 16:
        return Shape(1, 1)
    if rows <= 32:
        return Shape(1, 2)
    if rows <= 64:
        return Shape(4, 2)
    has_parts = kind in (stages.EXPERT_UPDATE, stages.SPLIT_UPDATE)
    if rows <= 128 and not has_parts:
        return Shape(1, 4, resident=3)
    groups = max(1, _NUM_SMS // (hidden // (4 * _COLUMNS)))
    # Up to 16 * 6 * groups rows each warp has a tile of its own; beyond, 4 leave the fewest without one at the end.
    for tiles in (6, 4) if 16 * 4 * groups < rows <= 16 * 6 * groups else (4,):
        ringed = Shape(1, tiles, groups, serial=4, depth=2)
        if ringed.shared_bytes(kind, parts) <= nvrtc.MAX_SHARED_BYTES:
            return ringed
    if rows <= 512:
        return Shape(1, 4, 4 if rows > 256 else 0, resident=3 if rows <= 128 else 5)
    return Shape(1, 4, 6, serial=4, resident=2)


@dataclass(frozen=True, slots=True)
class FinishShape:
    """How the blocks of the second kernel are cut; no influence on any result."""

    vectors: int
    """Of 8 columns, for each of 160 threads: 1, 2 or 4."""
    shares_block: bool
    """Five rows' mixes are made in one block, a warp each, instead of a block for each row's."""

    def grid(self, rows: int, hidden: int, has_mixes: bool) -> tuple[int, int, int]:
        blocks = -(-rows // (_THREADS // 32 if self.shares_block else 1)) if has_mixes else 0
        return (blocks + rows * -(-hidden // (8 * _THREADS * self.vectors)), 1, 1)


def choose_finish_shape(rows: int, whole_rows: bool = False) -> FinishShape:
    """Few rows: many small blocks. Many rows: as few blocks as keep their threads busy.

    Args:
        whole_rows: a block has a whole row, where :func:`accepts_row_codes`.
    """
    if whole_rows:
        return FinishShape(4, rows > 512)
    if rows <= 512:
        return FinishShape(1 if rows <= 256 else 2, False)
    return FinishShape(2, True)


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

    With an update, ``trunk`` and all mixes are older than the kernel before this one: a sublayer made the update.

    Args:
        update: from ``update_arguments``.
        partial: ``[rows, stride]`` float32 for ``shape.grid(rows, hidden)[0]`` slices.
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
    defines = shape.defines() | {"HIDDEN": hidden, "KIND": kind, "K": parts, "FEATURE": int(feature is not None)}
    defines["AHEAD"] = int(shape.reads_ahead and update[0] != stages.NO_UPDATE)
    source, entry, shared = "hyper_connection_write_read.cu", "hc_write_read", shape.shared_bytes(kind, parts)
    kernel = nvrtc.load_kernel(source, entry, defines, trunk.device, shared_bytes=shared)
    kernel.launch(grid, shape.threads, [arguments], shared_bytes=shared, overlap=overlap)


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
    shape: FinishShape,
    overlap: bool,
) -> None:
    """Fill ``x``, ``rounded``, ``codes``, ``scales`` and ``mixes`` ``[rows, 24]``; arguments as of ``hc_finish``.

    Args:
        scales: ``[rows, hidden / 32]``, or float32 ``[rows]`` for codes of whole rows.
    """
    rows, hidden = h.shape
    if rows == 0:
        return
    arguments = _FinishArguments(
        partial.data_ptr(), h.data_ptr(), norm_weight.data_ptr(), scale.data_ptr(), base.data_ptr(), x.data_ptr(),
        *map(nvrtc.pointer, (rounded, codes, scales, mixes)), rows, partial.stride(0), norm_eps, hc_eps,
    )  # fmt: skip
    scales_kind = _SCALES[None if scales is None else scales.dtype]
    if scales is not None and scales.dim() == 1:
        assert accepts_row_codes(hidden)
        scales_kind = _ROW_SCALES
    defines = {
        "HIDDEN": hidden, "SLICES": num_slices, "ITERATIONS": iterations, "MIXES": int(mixes is not None),
        "NORM_BF16": int(norm_weight.dtype == torch.bfloat16), "ROUNDED": int(rounded is not None),
        "CODES": int(codes is not None), "SCALES": scales_kind,
        "VECTORS": shape.vectors, "MIX_ROWS": _THREADS // 32 if shape.shares_block else 1,
    }  # fmt: skip
    kernel = nvrtc.load_kernel("hyper_connection_finish.cu", "hc_finish", defines, h.device)
    kernel.launch(shape.grid(rows, hidden, mixes is not None), _THREADS, [arguments], overlap=overlap)


def accepts_row_codes(hidden: int) -> bool:
    """Whether :func:`finish` can leave codes with one scale for each row: a block has to hold the row."""
    return hidden <= 8 * _THREADS * choose_finish_shape(1, whole_rows=True).vectors


def accepts_slices(num_slices: int, hidden: int) -> bool:
    """Whether :func:`finish` takes partial sums over this many slices."""
    return num_slices * GROUP in (hidden, 2 * hidden, 4 * hidden, 8 * hidden)
