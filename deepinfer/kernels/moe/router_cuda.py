"""Launches of ``cuda/route_logits.cu`` and ``cuda/route_select.cu``: routing, and the order of any number of pairs."""

from __future__ import annotations

import ctypes
import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.kernels import nvrtc

SLICE = 512
"""Columns of hidden per partial sum: fixed, so that the order of summation does not depend on the batch."""
MAX_EXPERTS = 512
MAX_ORDERED_ROWS = 16384
"""One cluster orders at most this many rows: their marks lie in its shared memory."""
PACKED_ROWS = 512
"""Up to here a selection without order takes few multiprocessors, since the shared expert's product runs beside it."""
_PACKED_ROWS_PER_CTA = 32
_CLUSTER = 8
_WORD = 32
_NUM_SMS = 132


class _Arguments(ctypes.Structure):
    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in (
                *("partial", "bias", "image_bias", "is_image", "positions", "experts", "weights"),
                *("ordered", "block_expert", "total", "offsets", "place"),
            )
        ),
        *((name, ctypes.c_int) for name in ("rows", "rows_per_cta", "block")),
        ("scale", ctypes.c_float),
    )


@dataclass(frozen=True, slots=True)
class LogitsShape:
    """What a CTA of the logits has, beside a slice; no influence on the result."""

    row_tiles: int
    """Of 8 rows."""
    expert_tiles: int
    """Of 16 experts, for each warp."""
    groups: int
    """Of warps, each with its own experts."""

    @property
    def num_experts(self) -> int:
        return 16 * self.expert_tiles * self.groups

    @property
    def shared_bytes(self) -> int:
        return (self.num_experts + 8 * self.row_tiles) * 2 * SLICE

    def grid(self, rows: int, num_experts: int, hidden: int) -> tuple[int, int, int]:
        return (-(-num_experts // self.num_experts), -(-hidden // SLICE), -(-rows // (8 * self.row_tiles)))


def choose_logits_shape(rows: int, num_experts: int, hidden: int) -> LogitsShape:
    """The smallest CTAs that all run at once: the more rows, the more experts one has, so that rows are loaded less
    often. The released model's 384 experts and 5,120 columns make 120 of them, up to 384 rows.
    """
    row_tiles = next((tiles for tiles in (1, 2, 4) if rows <= 8 * tiles), 8)
    shapes = (*(LogitsShape(row_tiles, *experts) for experts in ((1, 2), (1, 4), (2, 4))), LogitsShape(12, 2, 4))
    fits = (shape for shape in shapes if math.prod(shape.grid(rows, num_experts, hidden)) <= _NUM_SMS)
    return next(fits, shapes[-1])


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


def logits(x: Tensor, gate: Tensor, *, shape: LogitsShape | None = None, overlap: bool = True) -> Tensor:
    """Partial sums float32 ``[slices, rows, experts]``, to be added in order.

    Args:
        x: bf16 ``[rows, hidden]``, gate: bf16 ``[experts, hidden]``, contiguous.
        shape: default by the number of rows.
        overlap: the gate's loads begin before the preceding kernel has ended.
    """
    (rows, hidden), num_experts = x.shape, gate.shape[0]
    assert x.is_contiguous()
    shape = shape or choose_logits_shape(rows, num_experts, hidden)
    grid = shape.grid(rows, num_experts, hidden)
    partial = torch.empty(grid[1], rows, num_experts, dtype=torch.float32, device=x.device)
    defines = {
        "HIDDEN": hidden, "EXPERTS": num_experts,
        "NT": shape.row_tiles, "MT": shape.expert_tiles, "GROUPS": shape.groups,
    }  # fmt: skip
    shared = shape.shared_bytes
    kernel = nvrtc.load_kernel("route_logits.cu", "route_logits", defines, x.device, shared_bytes=shared)
    kernel.launch(grid, 128 * shape.groups, (x, gate, partial, rows), shared_bytes=shared, overlap=overlap)
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
        cluster, threads = 1, 512 if rows <= PACKED_ROWS else 128
        rows_per_cta = _PACKED_ROWS_PER_CTA if rows <= PACKED_ROWS else 4 if rows <= 2048 else 8
    else:
        cluster, threads = cluster or (1 if rows <= 2 else _CLUSTER), MAX_EXPERTS
        rows_per_cta = -(-rows // cluster)
        assert rows_per_cta <= _WORD, (rows, cluster)
    vector = 1 if rows_per_cta == 1 else 2 if rows_per_cta == 2 else 4
    has_image = image_bias is not None and is_image is not None
    defines = _defines(num_experts, experts.shape[1], threads, cluster, order is not None)
    defines |= {"SLICES": num_slices, "VECTOR": vector}
    defines |= {"HAS_IMAGE": int(has_image), "HAS_POSITIONS": int(positions is not None)}
    words = 3 * num_experts + threads // 32 if order is not None else 0
    shared = 4 * (rows_per_cta * (num_experts + experts.shape[1]) + words)
    arguments = _arguments(rows, rows_per_cta, block, experts, order)
    arguments.partial, arguments.bias, arguments.scale = partial.data_ptr(), bias.data_ptr(), scale
    arguments.weights, arguments.positions = weights.data_ptr(), nvrtc.pointer(positions)
    if has_image:
        arguments.image_bias, arguments.is_image = nvrtc.pointer(image_bias), nvrtc.pointer(is_image)
    room = 4 * (_WORD * (num_experts + experts.shape[1]) + 3 * num_experts + threads // 32)  # the same for all rows
    kernel = nvrtc.load_kernel("route_select.cu", "route_select", defines, partial.device, shared_bytes=room)
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
    assert shared <= nvrtc.MAX_SHARED_BYTES, (rows, num_experts)
    defines = _defines(num_experts, num_selected, threads, cluster, True)
    limit = 4 * (2 * num_experts + 32) + MAX_ORDERED_ROWS // (_CLUSTER * _WORD) * num_experts * 6
    room = min(max(shared, limit), nvrtc.MAX_SHARED_BYTES)  # one loaded kernel for all numbers of rows
    kernel = nvrtc.load_kernel("route_select.cu", "order_pairs", defines, experts.device, shared_bytes=room)
    arguments = _arguments(rows, rows_per_cta, block, experts, order)
    kernel.launch((cluster, 1, 1), threads, [arguments], shared_bytes=shared, cluster=cluster, overlap=overlap)


def _defines(num_experts: int, num_selected: int, threads: int, cluster: int, order: bool) -> dict[str, int]:
    return {
        "EXPERTS": num_experts, "TOP": num_selected, "THREADS": threads, "CLUSTER": cluster, "ORDER": int(order),
        "SLICES": 1, "VECTOR": 1, "HAS_IMAGE": 0, "HAS_POSITIONS": 0,
    }  # fmt: skip


def _arguments(
    rows: int, rows_per_cta: int, block: int, experts: Tensor, order: tuple[Tensor, ...] | None
) -> _Arguments:
    arguments = _Arguments(rows=rows, rows_per_cta=rows_per_cta, block=block, experts=experts.data_ptr())
    if order is not None:
        names = ("ordered", "block_expert", "total", "offsets", "place")
        for name, tensor in zip(names, order, strict=True):
            setattr(arguments, name, tensor.data_ptr())
    return arguments
