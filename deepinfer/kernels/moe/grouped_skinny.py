"""Launcher of ``moe_skinny.cu``: products of routed experts with few pairs each, bound by reading the weights once."""

from __future__ import annotations

import ctypes
import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.kernels import nvrtc
from deepinfer.kernels.moe import packing
from deepinfer.kernels.moe.expert_blocks import ExpertBlocks


@dataclass(frozen=True, slots=True)
class Plan:
    """How the kernel works on a product."""

    pair_tiles: int
    """Blocks have 8 times as many pairs; up to 3 with 12 warps, 2 with 16, 1 with 20. No influence on a result."""
    split: int
    """Warps along K: fixes the order of summation."""
    depth: int
    """Pairs of tiles that each warp has in flight. No influence on a result."""
    warps: int = 16
    """Of a CTA, a multiple of ``split``. No influence on a result."""
    evict_first: bool = False
    """The weights leave L2 first, so that what the kernels between hand on stays there: for few rows."""
    ahead: bool = False
    """The first activations are loaded before the kernel waits, where it begins ``early``."""

    @property
    def block(self) -> int:
        return 8 * self.pair_tiles

    @property
    def shared_bytes(self) -> int:
        sums = 2 * (self.warps // self.split) * (self.split - 1) * 16 * self.pair_tiles * 128
        return self.warps * self.depth * 2 * packing.TILE_BYTES + sums

    @property
    def barrier_bytes(self) -> int:
        """Of shared memory that no launch asks for, because the kernel declares it."""
        return 8 * self.warps * self.depth


@dataclass(frozen=True, slots=True)
class SharedActivation:
    """The shared expert's activation, which the gated product makes along the way."""

    gate_up: Tensor
    """float32 ``[rows, 2 * width]``, gate first."""
    out: Tensor
    """bf16 ``[rows, width]``"""


class _Arguments(ctypes.Structure):
    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in (
                *("weights", "ordered", "block_expert", "num_ordered", "x"),
                *("route", "shared", "shared_out", "y"),
            )
        ),
        *((name, ctypes.c_int) for name in ("num_pairs", "shared_rows", "early")),
        ("limit", ctypes.c_float),
    )


class GroupedSkinny:
    """One matrix of every expert, ready to multiply few pairs each.

    Args:
        packed: uint8 ``[experts, K / 64, N / 64, 2176]`` of :mod:`deepinfer.kernels.moe.packing`.
        top: pairs per row of the input: pair ``p`` reads row ``p // top``.
        limit: of the clamp in SwiGLU, for rows in the order of ``packing.pair_gate_and_up``; None: a plain product.
    """

    def __init__(self, packed: Tensor, top: int, limit: float | None = None) -> None:
        self.packed, self.top, self.limit = packed, top, limit
        self.num_chunks, self.num_tiles = packed.shape[1:3]
        self.num_outputs = self.num_tiles * (32 if limit is not None else 64)

    def fit(self, plan: Plan) -> Plan:
        """The plan with no more warps along K than there are pairs of tiles."""
        return dataclasses.replace(plan, split=min(plan.split, 1 << (self.num_chunks // 2).bit_length() - 1))

    def _kernel(self, plan: Plan) -> nvrtc.Kernel:
        defines = {
            "K": packing.TILE * self.num_chunks, "TILES": self.num_tiles, "TOP": self.top, "WARPS": plan.warps,
            "SPLIT": plan.split, "DEPTH": plan.depth, "NT": plan.pair_tiles, "GATED": int(self.limit is not None),
            "EVICT_FIRST": int(plan.evict_first), "AHEAD": int(plan.ahead),
        }  # fmt: skip
        device, shared_bytes = self.packed.device, plan.shared_bytes
        return nvrtc.load_kernel("moe_skinny.cu", "moe_skinny", defines, device, shared_bytes=shared_bytes)

    def __call__(
        self,
        x: Tensor,
        blocks: ExpertBlocks,
        out: Tensor,
        plan: Plan,
        *,
        weights: Tensor | None = None,
        shared: SharedActivation | None = None,
        early: bool = False,
    ) -> None:
        """Multiply every pair with its expert; pairs of no expert are left alone.

        Args:
            x: bf16 ``[rows, K]``, contiguous, rounded by Q8.
            blocks: in blocks of ``plan.block``.
            out: bf16 ``[pairs, N]``; with SwiGLU ``[pairs, N / 2]``, rounded by Q8.
            weights: float32 ``[pairs]`` (any shape), route weight of each pair, with SwiGLU.
            early: ``blocks`` are complete when this kernel begins, so weights may be read beside the one before it;
                with ``plan.ahead`` so is ``x``.
        """
        assert blocks.block == plan.block
        assert x.is_contiguous()
        assert (weights is None) == (self.limit is None)
        plan = self.fit(plan)
        assert plan.shared_bytes + plan.barrier_bytes <= nvrtc.MAX_SHARED_BYTES, plan
        grid = nvrtc.num_multiprocessors(self.packed.device)
        arguments = _Arguments(
            self.packed.data_ptr(), blocks.ordered.data_ptr(), blocks.block_expert.data_ptr(),
            blocks.num_ordered.data_ptr(), x.data_ptr(), nvrtc.pointer(weights),
            nvrtc.pointer(shared.gate_up if shared else None), nvrtc.pointer(shared.out if shared else None),
            out.data_ptr(), blocks.num_pairs, shared.gate_up.shape[0] if shared else 0, int(early), self.limit or 0.0,
        )  # fmt: skip
        self._kernel(plan).launch(
            (grid, 1, 1), 32 * plan.warps, (arguments, grid), shared_bytes=plan.shared_bytes, overlap=True
        )


def new_output(pairs: int, product: GroupedSkinny) -> Tensor:
    """Room for a product's result."""
    return torch.empty(pairs, product.num_outputs, dtype=torch.bfloat16, device=product.packed.device)
