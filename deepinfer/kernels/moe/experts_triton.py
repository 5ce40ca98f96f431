"""Grouped products of the experts in Triton, on the weights as the checkpoint packs them.

Activations are bf16 (values that Q8 rounded), weights are turned into bf16, sums are float32: every product is exact.
For any width that is a multiple of 32, so for small models, and wherever the library of :mod:`.experts_humming` is
missing. Each row's sum runs over K in the same order in every batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.formats.e2m1 import e2m1_value
from deepinfer.kernels.formats.float32 import power_of_two
from deepinfer.kernels.moe.expert_blocks import ExpertBlocks


@triton.jit
def _grouped_kernel(
    x_ptr, codes_ptr, scales_ptr, out_ptr, ordered_ptr, block_expert_ptr, total_ptr, num_pairs,
    N: tl.constexpr, K: tl.constexpr, PAIRS_PER_ROW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(1)
    if block * BLOCK_M < tl.load(total_ptr):
        expert = tl.load(block_expert_ptr + block).to(tl.int64)
        pair = tl.load(ordered_ptr + block * BLOCK_M + tl.arange(0, BLOCK_M))
        valid = pair < num_pairs
        column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = column < N
        x_at = x_ptr + (pair // PAIRS_PER_ROW)[:, None].to(tl.int64) * K
        codes_at = codes_ptr + (expert * N + column)[:, None] * (K // 2)
        scales_at = scales_ptr + (expert * N + column)[:, None] * (K // 32)
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for begin in range(0, K, BLOCK_K):
            k = begin + tl.arange(0, BLOCK_K)
            x = tl.load(x_at + k[None, :], valid[:, None] & (k < K)[None, :], other=0.0)
            half = begin // 2 + tl.arange(0, BLOCK_K // 2)
            codes = tl.load(codes_at + half[None, :], inside[:, None] & (half < K // 2)[None, :], other=0)
            group = begin // 32 + tl.arange(0, BLOCK_K // 32)
            scales = tl.load(scales_at + group[None, :], inside[:, None] & (group < K // 32)[None, :], other=127)
            nibbles = tl.join(codes & 15, codes >> 4).reshape(BLOCK_N, BLOCK_K // 32, 32).to(tl.int32)
            factors = power_of_two(scales.to(tl.int32) - 127)
            weights = (e2m1_value(nibbles) * factors[:, :, None]).to(tl.bfloat16).reshape(BLOCK_N, BLOCK_K)
            total = tl.dot(x, tl.trans(weights), total)
        at = out_ptr + pair[:, None].to(tl.int64) * N + column[None, :]
        tl.store(at, total.to(out_ptr.dtype.element_ty), valid[:, None] & inside[None, :])


def grouped_product(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    blocks: ExpertBlocks,
    pairs_per_row: int,
    out_dtype: torch.dtype,
    *,
    out: Tensor | None = None,
    block_n: int = 64,
    block_k: int = 128,
) -> Tensor:
    """``out[pair] = weight[expert of pair] @ x[pair // pairs_per_row]``; pairs of no expert are left alone.

    Args:
        x: bf16 ``[rows, K]``, contiguous; what Q8 rounded.
        codes: uint8 ``[experts, N, K / 2]``, even column in the low nibble.
        scales: uint8 ``[experts, N, K / 32]``, ue8m0.
        blocks: from ``order_pairs`` with a block of at least 16.
        pairs_per_row: the number of experts per row where the pairs share their row's input, else 1.
    Returns:
        ``[pairs, N]`` of ``out_dtype``.
    """
    num_experts, n, _ = codes.shape
    k = x.shape[1]
    assert (codes.shape[2] * 2, scales.shape) == (k, (num_experts, n, k // 32)), (x.shape, codes.shape, scales.shape)
    if out is None:
        out = torch.empty(blocks.num_pairs, n, dtype=out_dtype, device=x.device)
    block_k = min(block_k, triton.next_power_of_2(k))
    _grouped_kernel[(triton.cdiv(n, block_n), blocks.block_expert.shape[0])](
        x, codes, scales, out, blocks.ordered, blocks.block_expert, blocks.num_ordered, blocks.num_pairs,
        N=n, K=k, PAIRS_PER_ROW=pairs_per_row, BLOCK_M=blocks.block, BLOCK_N=block_n, BLOCK_K=block_k,
        num_warps=4, num_stages=3,
    )  # fmt: skip
    return out
