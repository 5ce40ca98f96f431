"""The router: scores of all experts, the best of them, their weights, and the pairs in the order of their experts.

On Hopper two CUDA launches (:mod:`.router_cuda`): partial logits, then selection and order, which begins while the
first ends; above ``CLUSTER_ROWS`` rows the order is a third. Elsewhere Triton: up to ``FUSED_ROWS`` rows all of it is
one launch, with more the selection is a second. Every logit is summed in the same order at every batch size (with CUDA
up to ``MAX_OWN_ROWS`` rows, or ``invariant``; above, cuBLAS makes the logits).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.dense.linear import Bf16Linear
from deepinfer.kernels.moe import router_cuda
from deepinfer.kernels.moe.expert_blocks import ExpertBlocks, new_blocks, order_pairs

Way = Literal["cuda", "one launch", "two launches"]
"""CUDA, or Triton in one launch or two."""
MAX_OWN_ROWS = 512
"""CUDA: up to here our kernel makes the logits, above cuBLAS."""
CLUSTER_ROWS = 256
"""CUDA: up to here the selection orders the pairs, above a launch of its own."""
FUSED_ROWS = 32
"""Triton: above this one program per row selects faster than one per 16 rows."""
MAX_FUSED_TILES = 16
ORDERED_PAIRS = 2048
"""Triton: up to this many pairs the last program of the selection orders them; above, a launch of its own."""
SLICE = 1024
"""Triton: columns of hidden per program, fixed, so that the order of summation does not depend on the batch."""


@triton.jit
def _partial_logits(
    x_ptr, gate_ptr, partial_ptr, rows, experts: tl.constexpr, hidden: tl.constexpr,
    SLICE: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    row = tl.program_id(2) * BLOCK_R + tl.arange(0, BLOCK_R)
    part = tl.program_id(1)
    gate_at = gate_ptr + expert[:, None] * hidden
    x_at = x_ptr + row[None, :].to(tl.int64) * hidden
    logits = tl.zeros([BLOCK_E, BLOCK_R], tl.float32)
    for begin in range(0, SLICE, BLOCK_K):
        column = part * SLICE + begin + tl.arange(0, BLOCK_K)
        gate = tl.load(gate_at + column[None, :], (expert < experts)[:, None] & (column < hidden)[None, :], other=0.0)
        x = tl.load(x_at + column[:, None], (row < rows)[None, :] & (column < hidden)[:, None], other=0.0)
        logits = tl.dot(gate, x, logits)
    at = partial_ptr + (part * rows + row)[None, :].to(tl.int64) * experts + expert[:, None]
    tl.store(at, logits, (row < rows)[None, :] & (expert < experts)[:, None])


@triton.jit
def _score(logits):
    """``sqrt(softplus(logits))``. log1p(u) is u * log(1 + u) / ((1 + u) - 1), which keeps its digits for small u."""
    u = tl.exp(tl.minimum(logits, 20.0))
    sum1 = 1.0 + u
    log1p = tl.where(sum1 == 1.0, u, tl.log(sum1) * (u / tl.where(sum1 == 1.0, 1.0, sum1 - 1.0)))
    return tl.sqrt_rn(tl.where(logits > 20.0, logits, log1p))


@triton.jit
def _select(
    partial_ptr, bias_ptr, image_bias_ptr, is_image_ptr, positions_ptr, experts_ptr, weights_ptr, counts_ptr, slots_ptr,
    row, rows, scale,
    experts: tl.constexpr, SLICES: tl.constexpr, TOP: tl.constexpr, HAS_IMAGE: tl.constexpr,
    HAS_POSITIONS: tl.constexpr, COUNT: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_TOP: tl.constexpr,
):  # fmt: skip
    """Experts and weights of the rows ``row`` (a vector)."""
    expert = tl.arange(0, BLOCK_E)
    inside = (row < rows)[:, None] & (expert < experts)[None, :]
    logits = tl.zeros([row.shape[0], BLOCK_E], tl.float32)
    for part in tl.static_range(SLICES):
        at = partial_ptr + (part * rows + row)[:, None].to(tl.int64) * experts + expert[None, :]
        logits += tl.load(at, inside, other=0.0, cache_modifier=".cg")
    scores = _score(logits)
    bias = tl.load(bias_ptr + expert, expert < experts, other=0.0)[None, :]
    if HAS_IMAGE:
        image = tl.load(is_image_ptr + row, row < rows, other=0) != 0
        image_bias = tl.load(image_bias_ptr + expert, expert < experts, other=0.0)[None, :]
        bias = tl.where(image[:, None], image_bias, bias)
    biased = tl.where(inside, scores + bias, float("-inf"))
    live = row < rows
    if HAS_POSITIONS:
        live &= tl.load(positions_ptr + row, row < rows, other=-1) >= 0
    place = tl.arange(0, BLOCK_TOP)
    chosen = tl.full([row.shape[0], BLOCK_TOP], -1, tl.int32)
    weight = tl.zeros([row.shape[0], BLOCK_TOP], tl.float32)
    for index in tl.static_range(TOP):
        best = tl.argmax(biased, 1, tie_break_left=True).to(tl.int32)
        is_best = expert[None, :] == best[:, None]
        score = tl.sum(tl.where(is_best, scores, 0.0), 1)
        biased = tl.where(is_best, float("-inf"), biased)
        chosen = tl.where(place[None, :] == index, best[:, None], chosen)
        weight = tl.where(place[None, :] == index, score[:, None], weight)
    weight = scale * weight / (tl.sum(weight, 1) + 1e-20)[:, None]
    chosen = tl.where(live[:, None], chosen, -1)
    weight = tl.where(live[:, None], weight, 0.0)
    at = row[:, None] * TOP + place[None, :]
    valid = (row < rows)[:, None] & (place < TOP)[None, :]
    tl.store(experts_ptr + at, chosen, valid)
    tl.store(weights_ptr + at, weight, valid)
    if COUNT:
        counted = valid & (chosen >= 0)
        slot = tl.atomic_add(counts_ptr + tl.maximum(chosen, 0), 1, counted, sem="relaxed")
        tl.store(slots_ptr + at, slot, counted)


@triton.jit
def _order(
    experts_ptr, counts_ptr, slots_ptr, ordered_ptr, block_expert_ptr, total_ptr, offsets_ptr, place_ptr, num_pairs,
    experts: tl.constexpr, BLOCK: tl.constexpr, BLOCK_E: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Place the pairs from the counts and from each pair's slot within its expert; leaves the counts at 0."""
    expert = tl.arange(0, BLOCK_E)
    counts = tl.load(counts_ptr + expert, expert < experts, other=0, cache_modifier=".cg")
    blocks = (counts + BLOCK - 1) // BLOCK
    starts = (tl.cumsum(blocks, 0) - blocks) * BLOCK
    total = tl.sum(blocks) * BLOCK
    tl.store(offsets_ptr + expert, starts, expert < experts)
    tl.store(offsets_ptr + experts, total)
    tl.store(total_ptr, total)
    lanes = tl.arange(0, PAIRS)
    begin = 0
    while begin < total:
        tl.store(ordered_ptr + begin + lanes, num_pairs, begin + lanes < total)
        begin += PAIRS
    tl.debug_barrier()
    tl.store(counts_ptr + expert, 0, expert < experts)
    chosen = tl.load(experts_ptr + lanes, lanes < num_pairs, other=-1, cache_modifier=".cg")
    counted = chosen >= 0
    slot = tl.load(slots_ptr + lanes, counted, other=0, cache_modifier=".cg")
    start = tl.load(offsets_ptr + chosen, counted, other=0)
    tl.store(ordered_ptr + start + slot, lanes, counted)
    tl.store(place_ptr + lanes, tl.where(counted, start + slot, -1), lanes < num_pairs)
    tl.store(block_expert_ptr + (start + slot) // BLOCK, chosen, counted & (slot % BLOCK == 0))


@triton.jit
def _last_of(counter_ptr, number):
    """Whether this program is the last of ``number`` that get here; the counter is left at 0 for the next launch."""
    tl.debug_barrier()
    is_last = tl.atomic_add(counter_ptr, 1, sem="acq_rel") == number - 1
    if is_last:
        tl.store(counter_ptr, 0)
    return is_last


@triton.jit
def _route_kernel(
    x_ptr, gate_ptr, bias_ptr, image_bias_ptr, is_image_ptr, positions_ptr, partial_ptr, experts_ptr, weights_ptr,
    counters_ptr, slots_ptr, ordered_ptr, block_expert_ptr, total_ptr, offsets_ptr, place_ptr, rows, num_pairs, scale,
    experts: tl.constexpr, hidden: tl.constexpr, SLICES: tl.constexpr, TOP: tl.constexpr, HAS_IMAGE: tl.constexpr,
    HAS_POSITIONS: tl.constexpr, FUSED: tl.constexpr, BLOCK: tl.constexpr, SLICE: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, ALL_E: tl.constexpr,
    BLOCK_TOP: tl.constexpr, PAIRS: tl.constexpr, SELECT_R: tl.constexpr,
):  # fmt: skip
    _partial_logits(
        x_ptr, gate_ptr, partial_ptr, rows, experts, hidden, SLICE, BLOCK_E, BLOCK_R, BLOCK_K,
    )  # fmt: skip
    if FUSED:
        tile = tl.program_id(2)
        # Counters: one per expert, then one for the row tiles, then one per row tile.
        if _last_of(counters_ptr + experts + 1 + tile, tl.num_programs(0) * tl.num_programs(1)):
            _select(
                partial_ptr, bias_ptr, image_bias_ptr, is_image_ptr, positions_ptr, experts_ptr, weights_ptr,
                counters_ptr, slots_ptr, tile * BLOCK_R + tl.arange(0, SELECT_R), rows, scale,
                experts, SLICES, TOP, HAS_IMAGE, HAS_POSITIONS, BLOCK > 0, ALL_E, BLOCK_TOP,
            )  # fmt: skip
            if BLOCK > 0:
                if _last_of(counters_ptr + experts, tl.num_programs(2)):
                    _order(
                        experts_ptr, counters_ptr, slots_ptr, ordered_ptr, block_expert_ptr, total_ptr, offsets_ptr,
                        place_ptr, num_pairs, experts, BLOCK, ALL_E, PAIRS,
                    )  # fmt: skip


@triton.jit
def _select_kernel(
    partial_ptr, bias_ptr, image_bias_ptr, is_image_ptr, positions_ptr, experts_ptr, weights_ptr,
    counters_ptr, slots_ptr, ordered_ptr, block_expert_ptr, total_ptr, offsets_ptr, place_ptr, rows, num_pairs, scale,
    experts: tl.constexpr, SLICES: tl.constexpr, TOP: tl.constexpr, HAS_IMAGE: tl.constexpr,
    HAS_POSITIONS: tl.constexpr, BLOCK: tl.constexpr, ALL_E: tl.constexpr, BLOCK_TOP: tl.constexpr,
    PAIRS: tl.constexpr,
):  # fmt: skip
    _select(
        partial_ptr, bias_ptr, image_bias_ptr, is_image_ptr, positions_ptr, experts_ptr, weights_ptr,
        counters_ptr, slots_ptr, tl.program_id(0) + tl.arange(0, 1), rows, scale,
        experts, SLICES, TOP, HAS_IMAGE, HAS_POSITIONS, BLOCK > 0, ALL_E, BLOCK_TOP,
    )  # fmt: skip
    if BLOCK > 0:
        if _last_of(counters_ptr + experts, tl.num_programs(0)):
            _order(
                experts_ptr, counters_ptr, slots_ptr, ordered_ptr, block_expert_ptr, total_ptr, offsets_ptr,
                place_ptr, num_pairs, experts, BLOCK, ALL_E, PAIRS,
            )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Routing:
    """The router's decision for the rows of a step."""

    experts: Tensor
    """int32 ``[rows, k]``, best first; -1 in padding rows."""
    weights: Tensor
    """float32 ``[rows, k]``; 0 in padding rows."""
    blocks: ExpertBlocks | None
    """The pairs in the order of their experts, if asked for."""


class Router:
    """Router of one layer: weights, and the counters of Triton's one launch (so one step at a time)."""

    def __init__(self, gate: Tensor, bias: Tensor, image_bias: Tensor | None, num_selected: int, scale: float) -> None:
        """``gate`` bf16 ``[experts, hidden]``; ``bias`` and ``image_bias`` float32 ``[experts]``."""
        assert (gate.dtype, bias.dtype) == (torch.bfloat16, torch.float32), (gate.dtype, bias.dtype)
        self.gate, self.bias, self.image_bias = gate.contiguous(), bias, image_bias
        self.num_experts, self.hidden = gate.shape
        self.num_selected, self.scale = num_selected, scale
        self.has_cuda = router_cuda.accepts_router(gate, num_selected)
        self._many_rows = Bf16Linear(self.gate, skinny=False)
        if self.has_cuda:
            torch.cuda.synchronize(gate.device)  # the kernels read the gate and the bias before they wait for others
        num_counters = self.num_experts + 1 + MAX_FUSED_TILES
        self._counters = torch.zeros(num_counters, dtype=torch.int32, device=gate.device)

    def forward(
        self,
        x: Tensor,
        *,
        positions: Tensor | None = None,
        is_image: Tensor | None = None,
        block: int = 0,
        invariant: bool = False,
        way: Way | None = None,
    ) -> Routing:
        """Route ``x``, bf16 ``[rows, hidden]`` contiguous (not rounded by Q8).

        Args:
            positions: int32 ``[rows]``; rows with -1 are padding: expert -1, weight 0.
            is_image: bool or uint8 ``[rows]``: rows of image spans take ``image_bias``.
            block: order the pairs into blocks of this many, 0 for not.
            invariant: a row's result does not depend on the number of rows, however many.
            way: default by device and number of rows.
        """
        rows, device = x.shape[0], x.device
        if way is None:
            way = "cuda" if self.has_cuda else "one launch" if rows <= FUSED_ROWS else "two launches"
        experts = torch.empty(rows, self.num_selected, dtype=torch.int32, device=device)
        weights = torch.empty(rows, self.num_selected, dtype=torch.float32, device=device)
        if rows == 0:
            return Routing(experts, weights, order_pairs(experts, self.num_experts, block) if block else None)
        image = is_image.view(torch.uint8) if is_image is not None and self.image_bias is not None else None
        is_ordered = rows <= CLUSTER_ROWS if way == "cuda" else experts.numel() <= ORDERED_PAIRS
        blocks = new_blocks(experts.numel(), self.num_experts, block, device) if block and is_ordered else None
        if way == "cuda":
            self._cuda(x, positions, image, experts, weights, blocks, invariant)
        else:
            self._triton(x, positions, image, experts, weights, blocks, way == "one launch")
        if block and blocks is None:
            blocks = order_pairs(experts, self.num_experts, block)
        return Routing(experts, weights, blocks)

    def _cuda(
        self,
        x: Tensor,
        positions: Tensor | None,
        is_image: Tensor | None,
        experts: Tensor,
        weights: Tensor,
        blocks: ExpertBlocks | None,
        invariant: bool,
    ) -> None:
        if invariant or x.shape[0] <= MAX_OWN_ROWS:
            partial = router_cuda.logits(x, self.gate)
        else:
            partial = self._many_rows.forward(x, dtype=torch.float32).unsqueeze(0)
        router_cuda.select(
            partial, self.bias, self.image_bias, is_image, positions, self.scale, experts, weights,
            *((None, 0) if blocks is None else (blocks.buffers, blocks.block)),
        )  # fmt: skip

    def _triton(
        self,
        x: Tensor,
        positions: Tensor | None,
        is_image: Tensor | None,
        chosen: Tensor,
        weights: Tensor,
        blocks: ExpertBlocks | None,
        is_fused: bool,
    ) -> None:
        (rows, top), experts, pairs = chosen.shape, self.num_experts, chosen.numel()
        is_fused &= rows <= 16 * MAX_FUSED_TILES
        slices = triton.cdiv(self.hidden, SLICE)
        partial = torch.empty(slices * rows * experts, dtype=torch.float32, device=x.device)
        slots = torch.empty(pairs, dtype=torch.int32, device=x.device)
        none = partial
        rest = tuple(none if part is None else part for part in (self.image_bias, is_image, positions))
        order = (self._counters, slots, *((none,) * 5 if blocks is None else blocks.buffers))
        common = {
            "experts": experts, "SLICES": slices, "TOP": top, "HAS_IMAGE": is_image is not None,
            "HAS_POSITIONS": positions is not None, "BLOCK": 0 if blocks is None else blocks.block,
            "ALL_E": triton.next_power_of_2(experts), "BLOCK_TOP": triton.next_power_of_2(top),
            "PAIRS": max(128, triton.next_power_of_2(min(pairs, ORDERED_PAIRS))),
        }  # fmt: skip
        block_e, block_r, warps = (16, 16, 4 if rows <= 4 else 8) if is_fused else (64, 64, 2)
        _route_kernel[(triton.cdiv(experts, block_e), slices, triton.cdiv(rows, block_r))](
            x, self.gate, self.bias, *rest, partial, chosen, weights, *order, rows, pairs, self.scale,
            hidden=self.hidden, FUSED=is_fused, SLICE=SLICE, BLOCK_E=block_e, BLOCK_R=block_r, BLOCK_K=128,
            SELECT_R=min(block_r, triton.next_power_of_2(rows)), **common, num_warps=warps, num_stages=4,
        )  # fmt: skip
        if not is_fused:
            _select_kernel[(rows,)](
                partial, self.bias, *rest, chosen, weights, *order, rows, pairs, self.scale, **common, num_warps=4
            )
