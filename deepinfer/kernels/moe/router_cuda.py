"""Launches of ``cuda/route.cu``: routing in one launch or two, and the order of any number of pairs."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.kernels import nvrtc

SLICE = 512
"""Columns of hidden per partial sum: fixed, so that the order of summation does not depend on the batch."""
MAX_EXPERTS = 512
MAX_ORDERED_ROWS = 16384
"""One cluster orders at most this many rows: their marks lie in its shared memory."""
MAX_ROWS = 512
"""Rows of :func:`route`."""
_CLUSTER = 8
_WORD = 32
_SELECTING_ROWS = 8
_LOGITS_THREADS = 256
_MAX_SHARED_BYTES = 227 * 1024


class _Arguments(ctypes.Structure):
    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in (
                *("x", "gate", "partial", "bias", "image_bias", "is_image", "positions", "experts", "weights"),
                *("ordered", "block_expert", "total", "offsets", "place", "arrivals"),
            )
        ),
        *((name, ctypes.c_int) for name in ("rows", "rows_per_cta", "block")),
        ("scale", ctypes.c_float),
    )


@functools.cache
def is_available(device: torch.device) -> bool:
    return nvrtc.is_available(device)


def accepts_router(gate: Tensor, num_selected: int) -> bool:
    """Whether the kernels route by this ``[experts, hidden]``."""
    num_experts, hidden = gate.shape
    fits = num_experts <= MAX_EXPERTS and num_experts % 4 == 0 and hidden % 8 == 0 and num_selected <= 32
    return fits and is_available(gate.device)


def accepts_order(experts: Tensor, num_experts: int) -> bool:
    """Whether the kernel orders the pairs of ``[rows, k]``."""
    rows, num_selected = experts.shape
    fits = num_experts <= MAX_EXPERTS and rows <= MAX_ORDERED_ROWS and num_selected <= min(32, num_experts)
    return fits and is_available(experts.device)


@dataclass(frozen=True, slots=True)
class LogitsTile:
    """What a CTA multiplies: no influence on a result."""

    row_tiles: int
    """Of 8 rows: 1, 2, 4 or 8."""
    groups: int = 1
    """Of 32 experts: 1, 2 or 4."""

    @property
    def shared_bytes(self) -> int:
        return (32 * self.groups + 8 * self.row_tiles) * (2 * SLICE + 16)

    @property
    def defines(self) -> dict[str, int]:
        return {"NT": self.row_tiles, "GROUPS": self.groups, "THREADS": _LOGITS_THREADS}

    def grid(self, rows: int, num_experts: int, num_slices: int) -> tuple[int, int, int]:
        return (-(-num_experts // (32 * self.groups)), num_slices, -(-rows // (8 * self.row_tiles)))


def choose_tile(rows: int) -> LogitsTile:
    """Few rows: few experts per CTA, so that many read the gate. Many: large tiles read both less often."""
    few = next((tiles for tiles in (1, 2, 4, 8) if rows <= 8 * tiles), None)
    return LogitsTile(few) if few is not None else LogitsTile(8, 2 if rows <= 128 else 4)


def num_counters() -> int:
    """Counters that :func:`route` needs, zero before the first launch; every launch leaves them at zero."""
    return 1 + MAX_ROWS // 8


def can_route(rows: int, tile: LogitsTile, device: torch.device) -> bool:
    """Whether :func:`route` takes so many rows: those of its CTAs that wait for others must leave these room."""
    row_tiles = -(-rows // (8 * tile.row_tiles))
    room = nvrtc.num_multiprocessors(device) if device.type == "cuda" else MAX_ROWS
    return rows <= MAX_ROWS and row_tiles * (tile.row_tiles - 1) < room


def route(
    x: Tensor,
    gate: Tensor,
    bias: Tensor,
    image_bias: Tensor | None,
    is_image: Tensor | None,
    positions: Tensor | None,
    scale: float,
    experts: Tensor,
    weights: Tensor,
    order: tuple[Tensor, ...] | None,
    block: int,
    *,
    arrivals: Tensor,
    tile: LogitsTile | None = None,
    overlap: bool = True,
) -> None:
    """:func:`logits` and :func:`select` in one launch, with the same bits.

    Args:
        x: bf16 ``[rows, hidden]``, gate: bf16 ``[experts, hidden]``, contiguous.
        order: as of :func:`select`, for any number of rows that :func:`can_route`.
        arrivals: int32 ``[num_counters()]``, of this router alone: one launch at a time may use them.
        overlap: the gate's loads begin before the preceding kernel has ended.
        Others as of :func:`select`.
    """
    (rows, hidden), num_experts = x.shape, gate.shape[0]
    num_selected, num_slices = experts.shape[1], -(-hidden // SLICE)
    tile = tile or choose_tile(rows)
    assert x.is_contiguous()
    assert can_route(rows, tile, x.device), (rows, tile)
    partial = torch.empty(num_slices, rows, num_experts, dtype=torch.float32, device=x.device)
    has_image = image_bias is not None and is_image is not None
    defines = {
        "EXPERTS": num_experts, "HIDDEN": hidden, "TOP": num_selected, "CLUSTER": 1, "SLICES": num_slices,
        "VECTOR": 1 if rows == 1 else 2 if rows == 2 else 4, "LOGITS": 1, "SELECT": 1, "ORDER": int(order is not None),
        "HAS_IMAGE": int(has_image), "HAS_POSITIONS": int(positions is not None),
    } | tile.defines  # fmt: skip

    def shared_bytes(rows: int) -> int:
        words = -(-rows // _WORD)
        of_order = 4 * (rows * num_selected + 2 * num_experts + _LOGITS_THREADS // 32) + 6 * words * num_experts
        return max(tile.shared_bytes, 4 * _SELECTING_ROWS * num_experts, of_order if order is not None else 0)

    most = next(limit for limit in (8, 64, 128, MAX_ROWS) if rows <= limit)  # few loaded kernels for all rows
    room = min(shared_bytes(most), _MAX_SHARED_BYTES)
    kernel = nvrtc.load_kernel("route.cu", "route", defines, x.device, shared_bytes=room)
    arguments = _arguments(rows, 0, block, experts, order)
    arguments.x, arguments.gate, arguments.partial = x.data_ptr(), gate.data_ptr(), partial.data_ptr()
    arguments.bias, arguments.weights, arguments.scale = bias.data_ptr(), weights.data_ptr(), scale
    arguments.positions, arguments.arrivals = nvrtc.pointer(positions), arrivals.data_ptr()
    if has_image:
        arguments.image_bias, arguments.is_image = nvrtc.pointer(image_bias), nvrtc.pointer(is_image)
    grid = tile.grid(rows, num_experts, num_slices)
    kernel.launch(grid, _LOGITS_THREADS, [arguments], shared_bytes=shared_bytes(rows), overlap=overlap)


def logits(x: Tensor, gate: Tensor, *, tile: LogitsTile | None = None, overlap: bool = True) -> Tensor:
    """Partial sums float32 ``[slices, rows, experts]``, to be added in order.

    Args:
        x: bf16 ``[rows, hidden]``, gate: bf16 ``[experts, hidden]``, contiguous.
        overlap: the gate's loads begin before the preceding kernel has ended.
    """
    (rows, hidden), num_experts = x.shape, gate.shape[0]
    assert x.is_contiguous()
    num_slices = -(-hidden // SLICE)
    partial = torch.empty(num_slices, rows, num_experts, dtype=torch.float32, device=x.device)
    tile = tile or choose_tile(rows)
    defines = {
        "HIDDEN": hidden,
        "EXPERTS": num_experts,
        "CLUSTER": 1,
        "LOGITS": 1,
        "SELECT": 0,
        "ORDER": 0,
    } | tile.defines
    kernel = nvrtc.load_kernel("route.cu", "route_logits", defines, x.device, shared_bytes=tile.shared_bytes)
    arguments = _Arguments(x.data_ptr(), gate.data_ptr(), partial.data_ptr(), rows=rows)
    grid = tile.grid(rows, num_experts, num_slices)
    kernel.launch(grid, _LOGITS_THREADS, [arguments], shared_bytes=tile.shared_bytes, overlap=overlap)
    return partial


def select(
    partial: Tensor,
    bias: Tensor,
    image_bias: Tensor | None,
    is_image: Tensor | None,
    positions: Tensor | None,
    scale: float,
    experts: Tensor,
    weights: Tensor,
    order: tuple[Tensor, ...] | None,
    block: int,
    *,
    cluster: int | None = None,
    overlap: bool = True,
) -> None:
    """Experts and weights of every row.

    Args:
        partial: float32 ``[slices, rows, experts]``.
        is_image: uint8 ``[rows]``; with ``image_bias``.
        experts, weights: int32 and float32 ``[rows, k]``, written.
        order: ``ordered, block_expert, total, offsets, place`` of :class:`ExpertBlocks`, written, for at most
            :func:`max_cluster_rows` rows.
        cluster: CTAs that select and order together, 1 or 8; no influence on the result.
    """
    num_slices, rows, num_experts = partial.shape
    if order is None:
        cluster, threads = 1, 128
        rows_per_cta = 4 if rows <= 2048 else 8
    else:
        cluster, threads = cluster or (1 if rows <= 2 else _CLUSTER), MAX_EXPERTS
        rows_per_cta = -(-rows // cluster)
        assert rows_per_cta <= _WORD, (rows, cluster)
    vector = 1 if rows_per_cta == 1 else 2 if rows_per_cta == 2 else 4
    has_image = image_bias is not None and is_image is not None
    defines = {
        "EXPERTS": num_experts, "TOP": experts.shape[1], "THREADS": threads, "CLUSTER": cluster, "SLICES": num_slices,
        "VECTOR": vector, "LOGITS": 0, "SELECT": 1, "ORDER": int(order is not None), "HAS_IMAGE": int(has_image),
        "HAS_POSITIONS": int(positions is not None),
    }  # fmt: skip
    words = 3 * num_experts + threads // 32 if order is not None else 0
    shared = 4 * (rows_per_cta * (num_experts + experts.shape[1]) + words)
    arguments = _arguments(rows, rows_per_cta, block, experts, order)
    arguments.partial, arguments.bias, arguments.scale = partial.data_ptr(), bias.data_ptr(), scale
    arguments.weights, arguments.positions = weights.data_ptr(), nvrtc.pointer(positions)
    if has_image:
        arguments.image_bias, arguments.is_image = nvrtc.pointer(image_bias), nvrtc.pointer(is_image)
    room = 4 * (_WORD * (num_experts + experts.shape[1]) + 3 * num_experts + threads // 32)  # the same for all rows
    kernel = nvrtc.load_kernel("route.cu", "route_select", defines, partial.device, shared_bytes=room)
    grid = (cluster if order is not None else -(-rows // rows_per_cta), 1, 1)
    kernel.launch(grid, threads, [arguments], shared_bytes=shared, cluster=cluster, overlap=overlap)


def max_cluster_rows() -> int:
    """Rows that :func:`select` can order."""
    return _CLUSTER * _WORD


def order_pairs(experts: Tensor, num_experts: int, order: tuple[Tensor, ...], block: int, overlap: bool = True) -> None:
    """Order the pairs of ``experts`` (int32 ``[rows, k]`` contiguous, distinct within a row) into ``order``."""
    rows, num_selected = experts.shape
    cluster, threads = (1, MAX_EXPERTS) if rows <= _WORD else (_CLUSTER, 1024)
    rows_per_cta = -(-rows // (cluster * _WORD)) * _WORD
    shared = 4 * (2 * num_experts + threads // 32) + rows_per_cta // _WORD * num_experts * 6
    assert shared <= _MAX_SHARED_BYTES, (rows, num_experts)
    defines = {
        "EXPERTS": num_experts, "TOP": num_selected, "THREADS": threads, "CLUSTER": cluster,
        "LOGITS": 0, "SELECT": 0, "ORDER": 1,
    }  # fmt: skip
    limit = 4 * (2 * num_experts + 32) + MAX_ORDERED_ROWS // (_CLUSTER * _WORD) * num_experts * 6
    room = min(max(shared, limit), _MAX_SHARED_BYTES)  # one loaded kernel for all numbers of rows
    kernel = nvrtc.load_kernel("route.cu", "order_pairs", defines, experts.device, shared_bytes=room)
    arguments = _arguments(rows, rows_per_cta, block, experts, order)
    kernel.launch((cluster, 1, 1), threads, [arguments], shared_bytes=shared, cluster=cluster, overlap=overlap)


def _arguments(
    rows: int, rows_per_cta: int, block: int, experts: Tensor, order: tuple[Tensor, ...] | None
) -> _Arguments:
    arguments = _Arguments(rows=rows, rows_per_cta=rows_per_cta, block=block, experts=experts.data_ptr())
    if order is not None:
        names = ("ordered", "block_expert", "total", "offsets", "place")
        for name, tensor in zip(names, order, strict=True):
            setattr(arguments, name, tensor.data_ptr())
    return arguments
