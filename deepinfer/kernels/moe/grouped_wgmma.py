"""The routed experts for many rows: launches of ``cuda/moe_wgmma.cu``, FP4 weights times bf16 activations.

Three launches behind the order of the pairs: rows gathered in the order of their experts; gate-up with SwiGLU and Q8;
down. Both products are exact but for their float32 sums. A pair's bits do not depend on the rest of the batch.

Activations between the launches are lines of 128 bytes as shared memory has to hold them: see the kernel's head.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.kernels import nvrtc
from deepinfer.kernels.moe import packing
from deepinfer.kernels.moe.expert_blocks import ExpertBlocks, order_pairs

_SOURCE = "moe_wgmma.cu"
_LINE_BYTES, _ROOM_STRIDE = 128, 144
MAX_PAIRS = 160
"""Most pairs of a CTA's piece of work."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Size and pipeline of a CTA. Without influence on a result."""

    pairs: int
    """Most pairs of one expert in a piece of work: a multiple of the order's block, at most ``MAX_PAIRS``."""
    warpgroups: int
    """That multiply: 2, 3 or 4."""
    fragments: int
    """Tiles of 64 weight rows of each, 1 or 2."""
    depth: int
    """Tiles along the columns in a stage, 1 or 2; together with ``fragments`` an even number of tiles."""
    stages: int
    min_ctas: int = 1

    @property
    def threads(self) -> int:
        is_register_bound = self.fragments * self.pairs > 128 or self.warpgroups > 2
        return 128 * self.warpgroups + (128 if is_register_bound else 32)

    @property
    def stage_bytes(self) -> int:
        return self.depth * (self.pairs * _LINE_BYTES + self.warpgroups * self.fragments * packing.TILE_BYTES)

    def shared_bytes(self, num_experts: int) -> int:
        rooms = self.warpgroups * self.pairs * _ROOM_STRIDE
        return 1024 + self.stages * (self.stage_bytes + 32) + rooms + 4 * (num_experts + 1)


FEW, MANY = Tile(80, 4, 1, 2, 4), Tile(160, 2, 2, 1, 6)
FEW_PAIRS = 72
"""Up to so many pairs per expert on average, ``FEW``: on an H200 (``bench/gpu/check_grouped.py``) 3.3 against 3.8 ms
for both products of 4,096 rows, 6.9 against 5.3 ms for 8,192."""
BLOCK = 16
"""Pairs to whose multiple an expert's are filled up."""


class _Arguments(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weights", "x", "pair_weights", "out", "offsets", "counter")),
        ("capacity", ctypes.c_int),
        ("limit", ctypes.c_float),
    )


class GroupedProduct:
    """One matrix of every expert.

    Args:
        packed: uint8 ``[experts, K / 64, N / 64, 2176]`` of :mod:`.packing`.
        swiglu: rows come from ``pair_gate_and_up``; results are rounded activations, else products in bf16.
    """

    def __init__(self, packed: Tensor, swiglu: bool, limit: float = 0.0) -> None:
        self.packed, self.swiglu, self.limit = packed, swiglu, limit
        self.num_experts, self.column_tiles, self.row_tiles, _ = packed.shape

    def defines(self, tile: Tile, block: int) -> dict[str, int]:
        """Compile-time constants of the kernel."""
        return {
            "GATHER": 0, "EXPERTS": self.num_experts, "ROW_TILES": self.row_tiles, "K_TILES": self.column_tiles,
            "SWIGLU": int(self.swiglu), "BLOCK": block, "WGS": tile.warpgroups, "MF": tile.fragments,
            "KT": tile.depth, "NMAX": tile.pairs, "STAGES": tile.stages, "MIN_CTAS": tile.min_ctas,
        }  # fmt: skip

    def accepts(self, tile: Tile) -> bool:
        fits = tile.shared_bytes(self.num_experts) * tile.min_ctas <= nvrtc.MAX_SHARED_BYTES
        return fits and self.column_tiles % tile.depth == 0 and tile.depth * tile.fragments % 2 == 0

    def kernel(self, tile: Tile, block: int) -> nvrtc.Kernel:
        shared = tile.shared_bytes(self.num_experts)
        return nvrtc.load_kernel(
            _SOURCE, "moe_wgmma", self.defines(tile, block), self.packed.device, shared_bytes=shared
        )

    def __call__(
        self, x: Tensor, weights: Tensor, out: Tensor, blocks: ExpertBlocks, counter: Tensor, tile: Tile, ctas: int
    ) -> None:
        """Multiply the lines ``x`` of all pairs.

        Args:
            x: bf16 ``[K / 64, capacity, 64]`` lines in the order of ``blocks``.
            weights: float32 ``[capacity]``: the pairs' route weights.
            out: lines ``[N / 128, capacity, 64]`` with SwiGLU, else bf16 ``[capacity, N]``.
            counter: int32, 0 before.
        """
        pointers = (self.packed, x, weights, out, blocks.offsets, counter)
        arguments = _Arguments(*(t.data_ptr() for t in pointers), x.shape[1], self.limit)
        self.kernel(tile, blocks.block).launch(
            (ctas, 1, 1), tile.threads, [arguments], shared_bytes=tile.shared_bytes(self.num_experts), overlap=True
        )


def gather(x: Tensor, weights: Tensor, blocks: ExpertBlocks, counters: Tensor) -> tuple[Tensor, Tensor]:
    """Rows in the order of their experts, as lines; the pairs' weights in the same order. Padding stays undefined.

    Args:
        x: bf16 ``[rows, hidden]``, contiguous, hidden a multiple of 64.
        weights: float32 ``[rows, k]``, contiguous.
        counters: int32 ``[2]``, set to 0.
    Returns:
        bf16 ``[hidden / 64, capacity, 64]`` and float32 ``[capacity]``, capacity being the size of ``blocks.ordered``.
    """
    (rows, hidden), capacity = x.shape, blocks.ordered.shape[0]
    assert x.is_contiguous(), x.stride()
    assert weights.is_contiguous(), weights.stride()
    lines = torch.empty(hidden // 64, capacity, 64, dtype=torch.bfloat16, device=x.device)
    ordered_weights = torch.empty(capacity, dtype=torch.float32, device=x.device)
    defines = {"GATHER": 1, "K_TILES": hidden // 64, "TOP": weights.shape[1]}
    kernel = nvrtc.load_kernel(_SOURCE, "moe_gather", defines, x.device)
    threads = -(-hidden // 1024) * 32
    arguments = (x, blocks.place, weights, lines, ordered_weights, counters, capacity)
    kernel.launch((rows, 1, 1), threads, arguments, overlap=True)
    return lines, ordered_weights


class GroupedExperts:
    """The routed experts of one layer, for many rows.

    Args:
        gate_up: packed ``[experts, hidden / 64, 2 * width / 64, 2176]`` of ``pair_gate_and_up``'s rows.
        down: packed ``[experts, width / 64, hidden / 64, 2176]``.
        limit: clamp of SwiGLU.
        few, many: up to ``few_pairs`` pairs per expert on average and above.
        block: 8 or 16; the order's block.
        ctas: of a launch, default as many as fit.
    """

    def __init__(
        self,
        gate_up: Tensor,
        down: Tensor,
        hidden: int,
        width: int,
        num_experts: int,
        limit: float,
        *,
        few: Tile = FEW,
        many: Tile = MANY,
        few_pairs: int = FEW_PAIRS,
        block: int = BLOCK,
        ctas: int | None = None,
    ) -> None:
        assert gate_up.shape == (num_experts, hidden // 64, 2 * width // 64, packing.TILE_BYTES), gate_up.shape
        assert down.shape == (num_experts, width // 64, hidden // 64, packing.TILE_BYTES), down.shape
        self.hidden, self.width, self.num_experts, self.block = hidden, width, num_experts, block
        self.gate_up, self.down = GroupedProduct(gate_up, True, limit), GroupedProduct(down, False)
        self.few, self.many, self.few_pairs, self.ctas = few, many, few_pairs, ctas

    def tile_for(self, product: GroupedProduct, num_pairs: int) -> Tile:
        tile = self.few if num_pairs <= self.few_pairs * self.num_experts else self.many
        return tile if product.accepts(tile) else self.many

    def forward(
        self, x: Tensor, experts: Tensor, weights: Tensor, blocks: ExpertBlocks | None = None
    ) -> tuple[Tensor, Tensor]:
        """Every pair's output, weighted.

        Args:
            x: bf16 ``[rows, hidden]``, rounded by Q8, contiguous.
            experts, weights: int32 (-1 for none) and float32 ``[rows, k]``, contiguous.
            blocks: the order of the pairs in blocks of ``block``; default it is made here.
        Returns:
            bf16 ``[capacity, hidden]`` in the order of the experts, undefined where a block is filled up, and int32
            ``[pairs]``: the row of each pair there, -1 for none.
        """
        if blocks is None or blocks.block != self.block:
            blocks = order_pairs(experts, self.num_experts, self.block)
        capacity, device = blocks.ordered.shape[0], x.device
        counters = torch.empty(2, dtype=torch.int32, device=device)
        lines, ordered_weights = gather(x, weights, blocks, counters)
        inner = torch.empty(self.width // 64, capacity, 64, dtype=torch.bfloat16, device=device)
        self._multiply(self.gate_up, lines, ordered_weights, inner, blocks, counters[:1])
        del lines  # the results may take its memory
        values = torch.empty(capacity, self.hidden, dtype=torch.bfloat16, device=device)
        self._multiply(self.down, inner, ordered_weights, values, blocks, counters[1:])
        return values, blocks.place

    def _multiply(
        self, product: GroupedProduct, x: Tensor, weights: Tensor, out: Tensor, blocks: ExpertBlocks, counter: Tensor
    ) -> None:
        tile = self.tile_for(product, blocks.num_pairs)
        ctas = self.ctas or tile.min_ctas * nvrtc.num_multiprocessors(x.device)
        product(x, weights, out, blocks, counter, tile, ctas)
