"""The index query: rotation and FP4 rounding of every head (spec 4.7)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels import overlap
from deepinfer.kernels.formats.e2m1 import e2m1_code, e2m1_exponent, e2m1_value
from deepinfer.kernels.formats.float32 import power_of_two, round_bf16


@triton.jit
def _index_query_kernel(
    query_ptr,
    query_stride,
    cos_ptr,
    sin_ptr,
    out_ptr,
    heads,
    width,
    half_rope,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    overlap.wait_for_earlier_kernels(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    pair = tl.arange(0, PAIRS)[None, :]
    inside = (head < heads) & (2 * pair < width)
    column = head * width + 2 * pair  # [HEADS, PAIRS]
    first = tl.load(query_ptr + row * query_stride + column, inside, other=0.0).to(tl.float32)
    second = tl.load(query_ptr + row * query_stride + column + 1, inside, other=0.0).to(tl.float32)
    turn = pair - (width // 2 - half_rope)
    is_turned = (turn >= 0) & (turn < half_rope)
    cos = tl.load(cos_ptr + row * half_rope + turn, is_turned, other=1.0)
    sin = tl.load(sin_ptr + row * half_rope + turn, is_turned, other=0.0)
    turned = tl.reshape(round_bf16(first * cos - second * sin), [HEADS, PAIRS // 16, 16])
    other = tl.reshape(round_bf16(first * sin + second * cos), [HEADS, PAIRS // 16, 16])
    exponent = e2m1_exponent(tl.max(tl.maximum(tl.abs(turned), tl.abs(other)), axis=2, keep_dims=True))
    inverse, scale = power_of_two(-exponent), power_of_two(exponent)
    first = tl.reshape(e2m1_value(e2m1_code(turned * inverse)) * scale, [HEADS, PAIRS])
    second = tl.reshape(e2m1_value(e2m1_code(other * inverse)) * scale, [HEADS, PAIRS])
    out = out_ptr + row * heads * width + column
    tl.store(out, first.to(out_ptr.dtype.element_ty), inside)
    tl.store(out + 1, second.to(out_ptr.dtype.element_ty), inside)


def index_query(query: Tensor, cosines: Tensor, sines: Tensor, out: Tensor | None = None) -> Tensor:
    """Rotate the last channels of every head, round to bf16, then to the values of ``Q4u``.

    Args:
        query: ``[rows, heads, Di]`` bf16; the row stride is free (a slice of a wider product).
        cosines, sines: ``[rows, rope / 2]`` float32.
        out: ``[rows, heads, Di]`` bf16.
    Returns:
        ``out``: FP4 values, exact in bf16.
    """
    rows, heads, width = query.shape
    assert width % 32 == 0
    assert query.stride(1) == width
    assert query.stride(2) == 1
    assert cosines.is_contiguous() and sines.is_contiguous()  # noqa: PT018
    out = query.new_empty((rows, heads, width), dtype=torch.bfloat16) if out is None else out
    if rows == 0:
        return out
    block = min(8, triton.next_power_of_2(heads))
    _index_query_kernel[(rows, triton.cdiv(heads, block))](
        query,
        query.stride(0),
        cosines,
        sines,
        out,
        heads,
        width,
        cosines.shape[1],
        HEADS=block,
        PAIRS=triton.next_power_of_2(width) // 2,
        num_warps=4,
        **overlap.launch_options(query.device),
    )
    return out
