"""Activations on the way into the routed experts: rounded by Q8 as codes, as values, or coarser with a scale per row.

Rounding again what Q8 rounded changes nothing, so callers need not know whether an activation was rounded before.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.formats.e4m3 import e4m3_code, e4m3_round, q8_groups
from deepinfer.kernels.formats.float32 import power_of_two
from deepinfer.kernels.moe.expert_blocks import ExpertBlocks


@triton.jit
def _quantize_kernel(
    x_ptr, ordered_ptr, total_ptr, codes_ptr, scales_ptr, values_ptr,
    hidden: tl.constexpr, PAIRS_PER_ROW: tl.constexpr, HAS_ORDER: tl.constexpr, PER_ROW: tl.constexpr,
    AS_VALUES: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    source = row
    live = True
    if HAS_ORDER:
        live = row < tl.load(total_ptr)
        source = (tl.load(ordered_ptr + row, live, other=0) // PAIRS_PER_ROW).to(tl.int64)
    if live:
        groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
        columns = groups[:, None] * 32 + tl.arange(0, 32)[None, :]
        inside = columns < hidden
        x = tl.load(x_ptr + source * hidden + columns, inside, other=0.0).to(tl.float32)
        at = row * hidden + columns
        if PER_ROW:
            scale = tl.maximum(tl.max(tl.abs(x)), 1e-4) / 448.0
            scaled = tl.minimum(tl.maximum(x / scale, -448.0), 448.0)
            tl.store(codes_ptr + at, e4m3_code(e4m3_round(scaled), scaled), inside)
            tl.store(scales_ptr + row, scale)
        else:
            scaled, rounded, exponent = q8_groups(x)
            if AS_VALUES:
                tl.store(values_ptr + at, (rounded * power_of_two(exponent)[:, None]).to(tl.bfloat16), inside)
            else:
                tl.store(codes_ptr + at, e4m3_code(rounded, scaled), inside)
                tl.store(scales_ptr + row * (hidden // 32) + groups, power_of_two(exponent), groups * 32 < hidden)


@triton.jit
def _scales_kernel(bytes_ptr, scales_ptr, number, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exponent = tl.load(bytes_ptr + at, at < number, other=127).to(tl.int32)
    bits = tl.where(exponent == 0, 1 << 22, exponent << 23)  # byte 0 is the subnormal 2**-127
    tl.store(scales_ptr + at, bits.to(tl.float32, bitcast=True), at < number)


def scales_from_bytes(scale_bytes: Tensor) -> Tensor:
    """ue8m0 bytes (uint8, contiguous) as float32 powers of two, same shape."""
    scales = torch.empty_like(scale_bytes, dtype=torch.float32)
    number = scale_bytes.numel()
    _scales_kernel[(triton.cdiv(number, 1024),)](scale_bytes, scales, number, BLOCK=1024)
    return scales


def _quantize(
    x: Tensor,
    order: ExpertBlocks | None,
    pairs_per_row: int,
    codes: Tensor | None,
    scales: Tensor | None,
    values: Tensor | None,
) -> None:
    hidden = x.shape[1]
    assert hidden % 32 == 0, hidden
    per_row = scales is not None and scales.shape[1] == 1 and hidden > 32
    num_rows = x.shape[0] if order is None else order.num_pairs
    num_groups = hidden // 32
    groups = triton.next_power_of_2(num_groups if per_row else min(num_groups, 8 if num_rows <= 1024 else 32))
    none = x
    _quantize_kernel[(num_rows, triton.cdiv(num_groups, groups))](
        x, *((none, none) if order is None else (order.ordered, order.num_ordered)),
        none if codes is None else codes, none if scales is None else scales, none if values is None else values,
        hidden=hidden, PAIRS_PER_ROW=pairs_per_row, HAS_ORDER=order is not None, PER_ROW=per_row,
        AS_VALUES=values is not None, GROUPS=groups, num_warps=2 if groups <= 8 else 4 if groups <= 32 else 8,
    )  # fmt: skip


def quantize_activation(
    x: Tensor, *, per_row: bool = False, order: ExpertBlocks | None = None, pairs_per_row: int = 1
) -> tuple[Tensor, Tensor]:
    """e4m3 codes (uint8) and float32 scales of bf16 ``x`` ``[rows, hidden]``.

    Args:
        per_row: one scale per row (largest magnitude / 448) instead of a power of two per 32 columns.
        order: write one row per pair in this order (block 1): pair ``p`` takes row ``p // pairs_per_row``.
    Returns:
        ``[n, hidden]`` and ``[n, hidden / 32]`` or ``[n, 1]``, n being rows or pairs.
    """
    num_rows, hidden = (x.shape[0] if order is None else order.num_pairs), x.shape[1]
    codes = torch.empty(num_rows, hidden, dtype=torch.uint8, device=x.device)
    scales = torch.empty(num_rows, 1 if per_row else hidden // 32, dtype=torch.float32, device=x.device)
    _quantize(x, order, pairs_per_row, codes, scales, None)
    return codes, scales


def round_activation(x: Tensor) -> Tensor:
    """The values that Q8 makes of bf16 ``x`` ``[rows, hidden]``, in bf16."""
    values = torch.empty_like(x)
    _quantize(x, None, 1, None, None, values)
    return values
