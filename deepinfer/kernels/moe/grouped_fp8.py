"""The routed experts for many rows in ``numerics="fast"``: launches of ``cuda/moe_fp8.cu``, FP4 weights times e4m3.

Four launches behind the order of the pairs: rows gathered in the order of their experts; gate-up with SwiGLU and Q8;
one power of two for each row of its results; down. The weights are those of :mod:`.grouped_wgmma`, in the same memory.

Every activation row and every weight row is e4m3 with one power of two, which keeps what Q8 and FP4 rounded: an
element differs where it is more than 2**14 below the largest of its activation row, or its scale more than 2**11 below
the largest of its weight row. What ``fast`` gives up is the sum: the FP8 tensor cores of Hopper cut every addend of a
step of 32 columns, the sum so far included, off some 13 bits below the largest. A step's error is below 33 * 2**-13 of
its largest addend; over 5,120 random columns a model of it is off by 0.1 % (rms) of the sum, half a rounding to bf16.
So the sums stay in the tensor cores' accumulators: adding them up in float32 now and then would take registers that the
width of a tile needs.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.kernels import nvrtc
from deepinfer.kernels.dense.row_scaled import RowCodes
from deepinfer.kernels.moe import packing
from deepinfer.kernels.moe.expert_blocks import ExpertBlocks, order_pairs

_PRODUCT, _ROWS = "moe_fp8.cu", "moe_fp8_rows.cu"
_LINE_BYTES, _ROOM_STRIDE = 128, 144
LINE = 128
"""Columns of a line."""
_BINADES = 12
"""Exponents of e4m3 that a group's scale can choose from: with them every code is a normal number."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Size and pipeline of a CTA, one per multiprocessor. Without influence on a result."""

    pairs: int
    """Most pairs of one expert in a piece of work: a multiple of the order's block, at most 160."""
    warpgroups: int
    """That multiply: 2, 3 or 4."""
    fragments: int
    """Tiles of 64 weight rows of each, 1 or 2."""
    stages: int

    @property
    def threads(self) -> int:
        return 128 * self.warpgroups + 128

    def shared_bytes(self, num_experts: int) -> int:
        tiles = self.warpgroups * self.fragments
        stage = self.pairs * _LINE_BYTES + 2 * tiles * packing.TILE_BYTES + 32
        sides = (self.stages + 1) * (4 * self.pairs + packing.TILE * tiles)
        return 1024 + self.stages * stage + self.warpgroups * self.pairs * _ROOM_STRIDE + sides + 4 * (num_experts + 1)


FEW, MANY = Tile(80, 4, 1, 6), Tile(160, 2, 2, 4)
FEW_PAIRS = 72
"""Up to so many pairs per expert on average, ``FEW``."""
BLOCK = 16
"""Pairs to whose multiple an expert's are filled up."""


def row_powers(packed: Tensor) -> Tensor:
    """uint8 ``[experts, N]``: what the kernel relates the scales of a row to, in the order of the packed rows.

    A stored scale byte less this is an exponent of e4m3: ``_BINADES`` for the row's largest. The power of two by which
    the row's sums are multiplied is the byte less 247.
    """
    num_experts, _, rows, _ = packed.shape
    largest = packed[..., packing.CODE_BYTES :].amax(1)  # [experts, N / 64, 128]: [g, m, half, r]
    largest = largest.view(num_experts, rows, 8, 4, 2, 2).amax(4).permute(0, 1, 3, 4, 2)  # [experts, tile, m, r, g]
    # From 121 on the power is a normal float32; such rows are zero beside any other.
    return (largest.int() - _BINADES).clamp_min(121).to(torch.uint8).reshape(num_experts, rows * packing.TILE)


class _Arguments(ctypes.Structure):
    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in (
                "weights", "row_powers", "x", "pair_powers", "pair_weights", "out", "exponents", "offsets", "counter"
            )
        ),
        ("capacity", ctypes.c_int),
        ("limit", ctypes.c_float),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Lines:
    """Rows of activations as the product reads them; see the head of ``cuda/moe_fp8.cu``."""

    codes: Tensor
    """uint8 ``[K / 128, capacity, 128]``: e4m3."""
    powers: Tensor
    """float32 ``[capacity]``: powers of two by which the rows' codes are multiplied."""


class GroupedProduct:
    """One matrix of every expert.

    Args:
        packed: uint8 ``[experts, K / 64, N / 64, 2176]`` of :mod:`.packing`.
        swiglu: rows come from ``pair_gate_and_up``; results are activations, else products in bf16.
    """

    def __init__(self, packed: Tensor, swiglu: bool, limit: float = 0.0) -> None:
        self.packed, self.swiglu, self.limit = packed, swiglu, limit
        self.num_experts, self.column_tiles, self.row_tiles, _ = packed.shape
        self.row_powers = row_powers(packed)

    def defines(self, tile: Tile, block: int) -> dict[str, int]:
        """Compile-time constants of the kernel."""
        return {
            "EXPERTS": self.num_experts, "ROW_TILES": self.row_tiles, "K_TILES": self.column_tiles,
            "SWIGLU": int(self.swiglu), "BLOCK": block, "WGS": tile.warpgroups, "MF": tile.fragments,
            "NMAX": tile.pairs, "STAGES": tile.stages,
        }  # fmt: skip

    def accepts(self, tile: Tile) -> bool:
        fits = tile.shared_bytes(self.num_experts) <= nvrtc.MAX_SHARED_BYTES
        return fits and self.column_tiles % 2 == 0 and (not self.swiglu or self.row_tiles % 4 == 0)

    def __call__(
        self,
        x: Lines,
        weights: Tensor,
        out: Tensor,
        exponents: Tensor | None,
        blocks: ExpertBlocks,
        counter: Tensor,
        tile: Tile,
        ctas: int,
    ) -> None:
        """Multiply the lines ``x`` of all pairs.

        Args:
            weights: float32 ``[capacity]``: the pairs' route weights.
            out: with SwiGLU codes ``[N / 256, capacity, 128]`` of rows in the form of ``x`` but for their powers,
                else bf16 ``[capacity, N]``.
            exponents: with SwiGLU, uint8 ``[N / 64, capacity]``: power of every 32 columns of ``out``, plus 128.
            counter: int32, 0 before.
        """
        pointers = (self.packed, self.row_powers, x.codes, x.powers, weights, out, exponents, blocks.offsets, counter)
        arguments = _Arguments(*map(nvrtc.pointer, pointers), x.codes.shape[1], self.limit)
        shared = tile.shared_bytes(self.num_experts)
        kernel = nvrtc.load_kernel(
            _PRODUCT, "moe_fp8", self.defines(tile, blocks.block), self.packed.device, shared_bytes=shared
        )
        kernel.launch((ctas, 1, 1), tile.threads, [arguments], shared_bytes=shared, overlap=True)


def gather(x: Tensor | RowCodes, weights: Tensor, blocks: ExpertBlocks, counters: Tensor) -> tuple[Lines, Tensor]:
    """Rows in the order of their experts, as lines; the pairs' weights in the same order. Padding stays undefined.

    Args:
        x: bf16 ``[rows, hidden]``, contiguous, hidden a multiple of 128; or its codes.
        weights: float32 ``[rows, k]``, contiguous.
        counters: int32 ``[2]``, set to 0.
    Returns:
        lines, and float32 ``[capacity]``, capacity being the size of ``blocks.ordered``.
    """
    given, scales = (x.codes[0], x.scales) if isinstance(x, RowCodes) else (x, None)
    (rows, hidden), capacity = given.shape, blocks.ordered.shape[0]
    assert given.is_contiguous(), given.stride()
    assert weights.is_contiguous(), weights.stride()
    codes = torch.empty(hidden // LINE, capacity, LINE, dtype=torch.uint8, device=given.device)
    powers, ordered_weights = torch.empty(2, capacity, dtype=torch.float32, device=given.device)
    defines = {"GATHER": 1 if scales is None else 2, "LINES": hidden // LINE, "TOP": weights.shape[1]}
    kernel = nvrtc.load_kernel(_ROWS, "moe_fp8_gather", defines, given.device)
    inputs = (given,) if scales is None else (given, scales)
    arguments = (*inputs, blocks.place, weights, codes, powers, ordered_weights, counters, capacity)
    kernel.launch((rows, 1, 1), -(-hidden // 512) * 32, arguments, overlap=True)
    return Lines(codes, powers), ordered_weights


def align(codes: Tensor, exponents: Tensor, blocks: ExpertBlocks) -> Lines:
    """Codes with a power for every 32 columns to one for each row, in place.

    Args:
        codes: uint8 ``[lines, capacity, 128]``.
        exponents: uint8 ``[4 * lines, capacity]``: the powers' exponents plus 128.
    """
    lines, capacity, _ = codes.shape
    powers = torch.empty(capacity, dtype=torch.float32, device=codes.device)
    num_experts, block = blocks.offsets.shape[0] - 1, blocks.block
    defines = {"GATHER": 0, "LINES": lines, "BLOCK": block, "EXPERTS": num_experts}
    kernel = nvrtc.load_kernel(_ROWS, "moe_fp8_align", defines, codes.device)
    kernel.launch((capacity // block, 1, 1), 256, (codes, exponents, powers, blocks.offsets, capacity), overlap=True)
    return Lines(codes, powers)


class GroupedFp8Experts:
    """The routed experts of one layer, for many rows.

    Args:
        gate_up: packed ``[experts, hidden / 64, 2 * width / 64, 2176]`` of ``pair_gate_and_up``'s rows.
        down: packed ``[experts, width / 64, hidden / 64, 2176]``.
        limit: clamp of SwiGLU.
        few, many: up to ``few_pairs`` pairs per expert on average and above.
        block: 8 or 16; the order's block.
        ctas: of a launch, default one per multiprocessor.
    """

    def __init__(
        self,
        gate_up: Tensor,
        down: Tensor,
        limit: float,
        *,
        few: Tile = FEW,
        many: Tile = MANY,
        few_pairs: int = FEW_PAIRS,
        block: int = BLOCK,
        ctas: int | None = None,
    ) -> None:
        self.gate_up, self.down = GroupedProduct(gate_up, True, limit), GroupedProduct(down, False)
        self.num_experts, self.hidden = self.down.num_experts, packing.TILE * self.down.row_tiles
        self.few, self.many, self.few_pairs, self.block, self.ctas = few, many, few_pairs, block, ctas

    def forward(
        self, x: Tensor | RowCodes, experts: Tensor, weights: Tensor, blocks: ExpertBlocks | None = None
    ) -> tuple[Tensor, Tensor]:
        """Every pair's output, weighted: arguments and results as :meth:`.grouped_wgmma.GroupedExperts.forward`; or the
        input as codes with one scale per row."""
        if blocks is None or blocks.block != self.block:
            blocks = order_pairs(experts, self.num_experts, self.block)
        capacity, device = blocks.ordered.shape[0], weights.device
        tile = self.few if blocks.num_pairs <= self.few_pairs * self.num_experts else self.many
        ctas = self.ctas or nvrtc.num_multiprocessors(device)
        counters = torch.empty(2, dtype=torch.int32, device=device)
        lines, ordered_weights = gather(x, weights, blocks, counters)
        groups = self.gate_up.row_tiles  # 32 results of each
        codes = torch.empty(groups // 4, capacity, LINE, dtype=torch.uint8, device=device)
        exponents = torch.empty(groups, capacity, dtype=torch.uint8, device=device)
        self.gate_up(lines, ordered_weights, codes, exponents, blocks, counters[:1], tile, ctas)
        del lines  # the results may take its memory
        inner = align(codes, exponents, blocks)
        values = torch.empty(capacity, self.hidden, dtype=torch.bfloat16, device=device)
        self.down(inner, ordered_weights, values, None, blocks, counters[1:], tile, ctas)
        return values, blocks.place
