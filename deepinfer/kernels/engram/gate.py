"""The n-gram memory's gate: how much of the gathered value enters each stream (spec 4.10).

Reference: :func:`deepinfer.ops.engram.engram_gate`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _gate_kernel(
    trunk_ptr,
    keys_value_ptr,
    weight_ptr,
    image_ptr,
    out_ptr,
    hidden,
    eps,
    inverse_root,
    HAS_IMAGES: tl.constexpr,
    STREAMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, stream = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < hidden
    at = (row * STREAMS + stream) * hidden + column
    trunk = tl.load(trunk_ptr + at, mask=inside, other=0.0).to(tl.float32)
    keys_value = keys_value_ptr + row * (STREAMS + 1) * hidden
    key = tl.load(keys_value + stream * hidden + column, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + stream * hidden + column, mask=inside, other=0.0)
    value = tl.load(keys_value + STREAMS * hidden + column, mask=inside, other=0.0).to(tl.float32)
    agreement = tl.sum(trunk * weight * key)
    agreement *= tl.rsqrt(tl.sum(trunk * trunk) / hidden + eps) * tl.rsqrt(tl.sum(key * key) / hidden + eps)
    agreement *= inverse_root
    root = tl.sqrt(tl.maximum(tl.abs(agreement), 1e-6))
    signed = tl.where(agreement > 0, root, tl.where(agreement < 0, -root, agreement))
    gate = 1.0 / (1.0 + tl.exp(-signed))
    updated = trunk + gate * value
    if HAS_IMAGES:
        updated = tl.where(tl.load(image_ptr + row) != 0, trunk, updated)
    tl.store(out_ptr + at, updated.to(out_ptr.dtype.element_ty), mask=inside)


def engram_gate(
    trunk: Tensor,
    keys_value: Tensor,
    gate_weight: Tensor,
    eps: float,
    is_image: Tensor | None = None,
    out: Tensor | None = None,
    *,
    num_warps: int = 8,
) -> Tensor:
    """Add the looked-up value to every stream, gated by how well its key agrees with that stream (spec 4.10 f).

    Sums are in float32, over one row and stream: a row does not depend on its neighbours.

    Args:
        trunk: bfloat16 ``[rows, M, hidden]``, contiguous.
        keys_value: bfloat16 ``[rows, (M + 1) * hidden]`` or ``[rows, M + 1, hidden]``: keys, then the value.
        gate_weight: float32 ``[M, hidden]``, the product of query and key weights.
        eps: ``rms_norm_eps``.
        is_image: bool ``[rows]``: rows that stay as they are; None for none.
        out: where the new trunk goes; may be ``trunk``.
    Returns:
        ``out``, or a new tensor like ``trunk``.
    """
    rows, streams, hidden = trunk.shape
    assert trunk.is_contiguous(), f"{trunk.stride()=}"
    assert keys_value.is_contiguous(), f"{keys_value.stride()=}"
    assert keys_value.numel() == rows * (streams + 1) * hidden, f"{keys_value.shape=} for {trunk.shape=}"
    assert gate_weight.dtype == torch.float32, f"{gate_weight.dtype=}"
    assert gate_weight.shape == (streams, hidden), f"{gate_weight.shape=} for {trunk.shape=}"
    if out is None:
        out = torch.empty_like(trunk)
    if rows:
        _gate_kernel[(rows, streams)](
            trunk,
            keys_value,
            gate_weight,
            trunk if is_image is None else is_image,
            out,
            hidden,
            eps,
            hidden**-0.5,
            HAS_IMAGES=is_image is not None,
            STREAMS=streams,
            BLOCK=triton.next_power_of_2(hidden),
            num_warps=num_warps,
        )
    return out
