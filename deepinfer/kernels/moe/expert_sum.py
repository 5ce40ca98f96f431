"""The sum over a row's experts and the shared expert, rounded once (spec 4.9)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _sum_kernel(
    routed_ptr, place_ptr, shared_ptr, out_ptr,
    hidden: tl.constexpr, TOP: tl.constexpr, HAS_PLACE: tl.constexpr, HAS_SHARED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < hidden
    total = tl.zeros([BLOCK], tl.float32)
    if HAS_SHARED:
        total += tl.load(shared_ptr + row * hidden + column, inside, other=0.0).to(tl.float32)
    for index in tl.static_range(TOP):
        place = row * TOP + index
        is_there = True
        if HAS_PLACE:
            place = tl.load(place_ptr + place).to(tl.int64)
            is_there = place >= 0
        at = routed_ptr + tl.where(is_there, place, 0) * hidden + column
        total += tl.load(at, inside & is_there, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * hidden + column, total.to(tl.bfloat16), inside)


def sum_experts(
    routed: Tensor, num_selected: int, *, place: Tensor | None = None, shared: Tensor | None = None
) -> Tensor:
    """``shared[row] + sum over k of routed[row, k]`` in float32, rounded to bf16.

    Args:
        routed: bf16 ``[pairs, hidden]`` or ``[rows, k, hidden]``, contiguous.
        place: int32 ``[rows * k]``: the row of ``routed`` for each pair, -1 for none; default the pair's number.
        shared: bf16 ``[rows, hidden]``.
    Returns:
        bf16 ``[rows, hidden]``.
    """
    hidden = routed.shape[-1]
    num_pairs = routed.numel() // hidden if place is None else place.numel()
    rows = num_pairs // num_selected
    out = torch.empty(rows, hidden, dtype=torch.bfloat16, device=routed.device)
    block = 512 if rows <= 256 else 1024
    _sum_kernel[(rows, triton.cdiv(hidden, block))](
        routed, routed if place is None else place, routed if shared is None else shared, out,
        hidden=hidden, TOP=num_selected, HAS_PLACE=place is not None, HAS_SHARED=shared is not None, BLOCK=block,
        num_warps=2,
    )  # fmt: skip
    return out
