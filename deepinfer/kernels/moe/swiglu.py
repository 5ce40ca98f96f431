"""SwiGLU of the experts with clamp and route weight, rounded for the down product (spec 4.9).

The product is rounded by Q8 straight from float32. Three forms of the result: e4m3 codes with one float32 scale (a
power of two) per 32 columns, the same with one scale per row (precision ``fast``), or the rounded values in bf16.
Routed pairs and the rows of the shared expert may share a launch. Apart from that, the shared expert's rounded values
may leave under one power of two per row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.dense.row_scaled import RowCodes
from deepinfer.kernels.formats.e4m3 import e4m3_code, e4m3_round, e4m3_row, q8_groups
from deepinfer.kernels.formats.float32 import power_of_two
from deepinfer.kernels.moe.expert_blocks import ExpertBlocks

GROUP = 32


@triton.jit
def _activation(gate, up, limit):
    """``silu(min(gate, limit)) * clamp(up, -limit, limit)``; the lower bound only keeps an infinite gate from NaN."""
    gate = tl.maximum(tl.minimum(gate, limit), -1e4)
    return gate / (1.0 + tl.exp(-gate)) * tl.maximum(tl.minimum(up, limit), -limit)


@triton.jit
def _activate(
    gate_up_ptr, weights_ptr, codes_ptr, scales_ptr, values_ptr, row, pair, part, limit, width: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr, PER_ROW: tl.constexpr, AS_VALUES: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Part ``part`` of row ``row``."""
    groups = part * GROUPS + tl.arange(0, GROUPS)
    columns = groups[:, None] * 32 + tl.arange(0, 32)[None, :]
    inside = columns < width
    at = gate_up_ptr + row * 2 * width + columns
    gate = tl.load(at, inside, other=0.0).to(tl.float32)
    up = tl.load(at + width, inside, other=0.0).to(tl.float32)
    product = _activation(gate, up, limit)
    if HAS_WEIGHTS:
        product *= tl.load(weights_ptr + pair)
    at = row * width + columns
    if PER_ROW:
        scale = tl.maximum(tl.max(tl.abs(product)), 1e-4) / 448.0
        scaled = tl.minimum(tl.maximum(product / scale, -448.0), 448.0)
        tl.store(codes_ptr + at, e4m3_code(e4m3_round(scaled), scaled), inside)
        tl.store(scales_ptr + row, scale)
    else:
        scaled, rounded, exponent = q8_groups(product)
        if AS_VALUES:
            tl.store(values_ptr + at, (rounded * power_of_two(exponent)[:, None]).to(tl.bfloat16), inside)
        else:
            tl.store(codes_ptr + at, e4m3_code(rounded, scaled), inside)
            tl.store(scales_ptr + row * (width // 32) + groups, power_of_two(exponent), groups * 32 < width)


@triton.jit(do_not_specialize=["num_rows"])
def _swiglu_kernel(
    gate_up_ptr, weights_ptr, experts_ptr, source_ptr, total_ptr, codes_ptr, scales_ptr, values_ptr, outputs_ptr,
    shared_ptr, shared_values_ptr, num_rows, limit, width: tl.constexpr, hidden: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr, HAS_EXPERTS: tl.constexpr, HAS_SOURCE: tl.constexpr, CLEAR: tl.constexpr,
    HAS_SHARED: tl.constexpr, PER_ROW: tl.constexpr, AS_VALUES: tl.constexpr, GROUPS: tl.constexpr,
    PARTS: tl.constexpr, CLEAR_BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    if row < num_rows:
        pair = row
        live = True
        if HAS_SOURCE:
            live = row < tl.load(total_ptr)
            pair = tl.load(source_ptr + row, live, other=0).to(tl.int64)
        if HAS_EXPERTS:
            live = tl.load(experts_ptr + pair) >= 0
        if live:
            _activate(
                gate_up_ptr, weights_ptr, codes_ptr, scales_ptr, values_ptr, row, pair, part, limit, width,
                HAS_WEIGHTS, PER_ROW, AS_VALUES, GROUPS,
            )  # fmt: skip
        elif CLEAR:
            # Nobody computes this pair: its output must still be finite where it is summed.
            for begin in range(0, hidden, PARTS * CLEAR_BLOCK):
                at = begin + part * CLEAR_BLOCK + tl.arange(0, CLEAR_BLOCK)
                tl.store(outputs_ptr + pair * hidden + at, tl.zeros([CLEAR_BLOCK], tl.bfloat16), at < hidden)
    elif HAS_SHARED:
        _activate(
            shared_ptr, weights_ptr, codes_ptr, scales_ptr, shared_values_ptr, row - num_rows, row, part, limit, width,
            False, False, True, GROUPS,
        )  # fmt: skip


def _launch(
    gate_up: Tensor,
    limit: float,
    weights: Tensor | None,
    experts: Tensor | None,
    order: ExpertBlocks | None,
    clear: Tensor | None,
    codes: Tensor | None,
    scales: Tensor | None,
    values: Tensor | None,
    shared: Tensor | None = None,
    shared_values: Tensor | None = None,
) -> None:
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    assert width % GROUP == 0, f"{width=} is no multiple of {GROUP}"
    assert clear is None or experts is not None
    assert shared is None or shared.shape[1] == 2 * width, (gate_up.shape, shared.shape)
    assert order is None or (experts is None and order.block == 1)
    per_row = scales is not None and scales.shape[1] == 1 and width > GROUP
    num_groups = width // GROUP
    # Few rows: many programs per row. Many rows: a row in few.
    groups = triton.next_power_of_2(num_groups) if per_row else min(8 if rows <= 1024 else 32, num_groups)
    groups = triton.next_power_of_2(groups)
    none = gate_up
    parts = triton.cdiv(num_groups, groups)
    num_shared = 0 if shared is None else shared.shape[0]
    _swiglu_kernel[(rows + num_shared, parts)](
        gate_up, none if weights is None else weights, none if experts is None else experts,
        *((none, none) if order is None else (order.ordered, order.num_ordered)),
        none if codes is None else codes, none if scales is None else scales,
        none if values is None else values, none if clear is None else clear,
        none if shared is None else shared, none if shared_values is None else shared_values,
        rows, limit, width, 0 if clear is None else clear.shape[-1],
        HAS_WEIGHTS=weights is not None, HAS_EXPERTS=experts is not None, HAS_SOURCE=order is not None,
        CLEAR=clear is not None, HAS_SHARED=num_shared > 0, PER_ROW=per_row, AS_VALUES=values is not None,
        GROUPS=groups, PARTS=parts, CLEAR_BLOCK=1024, num_warps=2 if groups <= 8 else 4 if groups <= 32 else 8,
    )  # fmt: skip


def swiglu_rounded(
    gate_up: Tensor,
    limit: float,
    weights: Tensor | None = None,
    *,
    experts: Tensor | None = None,
    order: ExpertBlocks | None = None,
    clear: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """SwiGLU, Q8 rounding, values in bf16 ``[rows, width]``.

    Args:
        gate_up: ``[rows, 2 * width]``, gate first; float32, float16 or bf16, contiguous.
        limit: clamp of the gate from above and of the up branch on both sides.
        weights: float32, route weight of each pair (any shape, contiguous); None for the shared expert.
        experts: int32 expert of each pair (contiguous): rows of pairs with -1 are left alone.
        order: the rows stand in this order of their pairs (block 1), default that of the pairs' numbers.
        clear: bf16 ``[pairs, hidden]``: rows of pairs with expert -1 are set to zero here.
    """
    if out is None:
        out = torch.empty(gate_up.shape[0], gate_up.shape[1] // 2, dtype=torch.bfloat16, device=gate_up.device)
    _launch(gate_up, limit, weights, experts, order, clear, None, None, out)
    return out


def swiglu_quantized(
    gate_up: Tensor,
    limit: float,
    weights: Tensor | None = None,
    *,
    per_row: bool = False,
    experts: Tensor | None = None,
    order: ExpertBlocks | None = None,
    clear: Tensor | None = None,
    shared: Tensor | None = None,
    shared_out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As :func:`swiglu_rounded`, but e4m3 codes (uint8 ``[rows, width]``) and float32 scales.

    Scales are ``[rows, width / 32]`` powers of two, or with ``per_row`` ``[rows, 1]``: largest magnitude / 448.

    Args:
        shared: ``[n, 2 * width]`` gate and up of the shared expert, any float dtype: in the same launch, to
            ``shared_out``, bf16 ``[n, width]``, as :func:`swiglu_rounded` without weights. Not with ``per_row``.
    """
    assert (shared is None) == (shared_out is None)
    assert shared is None or not per_row, "a row is one program there, of other width"
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    codes = torch.empty(rows, width, dtype=torch.uint8, device=gate_up.device)
    num_scales = 1 if per_row else width // GROUP
    scales = torch.empty(rows, num_scales, dtype=torch.float32, device=gate_up.device)
    _launch(gate_up, limit, weights, experts, order, clear, codes, scales, None, shared, shared_out)
    return codes, scales


@triton.jit
def _swiglu_row_codes_kernel(gate_up_ptr, codes_ptr, scales_ptr, limit, width: tl.constexpr, GROUPS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, GROUPS)[:, None] * 32 + tl.arange(0, 32)[None, :]
    inside = columns < width
    at = gate_up_ptr + row * 2 * width + columns
    gate = tl.load(at, inside, other=0.0).to(tl.float32)
    up = tl.load(at + width, inside, other=0.0).to(tl.float32)
    _, rounded, exponent = q8_groups(_activation(gate, up, limit))
    codes, exponent = e4m3_row(rounded * power_of_two(exponent)[:, None])
    tl.store(codes_ptr + row * width + columns, codes, inside)
    tl.store(scales_ptr + row, power_of_two(exponent))


def swiglu_row_codes(gate_up: Tensor, limit: float) -> RowCodes:
    """:func:`swiglu_rounded` of the shared expert, as codes with one scale per row."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    assert width % GROUP == 0, f"{width=} is no multiple of {GROUP}"
    assert gate_up.is_contiguous()
    made = RowCodes.empty(1, rows, width, gate_up.device)
    groups = triton.next_power_of_2(width // GROUP)
    _swiglu_row_codes_kernel[(rows,)](
        gate_up, made.codes, made.scales, limit, width, GROUPS=groups, num_warps=min(16, max(1, groups // 16))
    )
    return made
