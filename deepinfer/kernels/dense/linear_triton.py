"""Dense products in Triton: FP8 weights as stored times bf16 activations, for devices without the CUDA kernels."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.formats.e4m3 import q8_groups
from deepinfer.kernels.formats.float32 import power_of_two


@triton.jit
def _decode_e4m3(codes):
    """Float32 values of e4m3 codes (int32) times 2**-60: the exponent field moves unchanged, its bias needs 2**120."""
    bits = ((codes & 0x7F) << 20) | ((codes & 0x80) << 24)
    return bits.to(tl.float32, bitcast=True) * 1152921504606846976.0


@triton.jit
def _q8_round(tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Round to bf16, then to FP8 in groups of 32 columns; float32 in and out."""
    groups = tl.reshape(tile.to(tl.bfloat16).to(tl.float32), (ROWS, COLUMNS // 32, 32))
    _, rounded, exponent = q8_groups(groups)
    return tl.reshape(rounded * tl.expand_dims(power_of_two(exponent), 2), (ROWS, COLUMNS))


@triton.jit
def _product_kernel(
    x_ptr, w_ptr, scale_ptr, y_ptr, rows, n, k, scale_columns, group_n, x_stride,
    FP8: tl.constexpr, QUANTIZE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One [BM rows, BN weight rows] tile; K in steps of BK, always in the same order."""
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    group = tl.program_id(1) * BN // group_n
    x_rows = x_ptr + row[:, None].to(tl.int64) * x_stride + group * k
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, k, BK):
        inner = start + tl.arange(0, BK)
        x = tl.load(x_rows + inner[None, :], (row < rows)[:, None] & (inner < k)[None, :], other=0.0)
        inside = (column < n)[:, None] & (inner < k)[None, :]
        w = tl.load(w_ptr + column[:, None].to(tl.int64) * k + inner[None, :], inside, other=0)
        if FP8:
            places = (column // 32)[:, None] * scale_columns + (inner // 32)[None, :]
            scale = tl.load(scale_ptr + places, inside, other=127).to(tl.int32)
            w = (_decode_e4m3(w.to(tl.int32)) * power_of_two(tl.minimum(scale - 67, 127))).to(tl.bfloat16)
        total = tl.dot(x, tl.trans(w), total)
    if QUANTIZE:
        total = _q8_round(total, BM, BN)
    places = row[:, None].to(tl.int64) * n + column[None, :]
    tl.store(y_ptr + places, total.to(y_ptr.dtype.element_ty), (row < rows)[:, None] & (column < n)[None, :])


@triton.jit
def _q8_round_kernel(x_ptr, num_groups, BLOCK: tl.constexpr):
    group = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    places = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    x = tl.load(x_ptr + places, (group < num_groups)[:, None], other=0.0).to(tl.float32)
    _, rounded, exponent = q8_groups(x)
    y = rounded * tl.expand_dims(power_of_two(exponent), 1)
    tl.store(x_ptr + places, y.to(x_ptr.dtype.element_ty), (group < num_groups)[:, None])


def product(
    x: Tensor, weight: Tensor, scales: Tensor | None, out: Tensor, groups: int = 1, quantize_output: bool = False
) -> None:
    """``out = x @ weight.T``, per group of weight rows.

    Args:
        x: bf16 ``[rows, groups * k]``, rows may be strided.
        weight: ``[n, k]`` contiguous: uint8 e4m3 codes with ``scales``, or bf16 without.
        scales: uint8 ``[ceil(n / 32), ceil(k / 32)]``.
        out: ``[rows, n]`` contiguous, bf16 or float32.
        quantize_output: round the result by Q8 (``n`` and ``n / groups`` are multiples of 32).
    """
    rows, (n, k) = x.shape[0], weight.shape
    group_n = n // groups
    block_n = 64 if groups == 1 or group_n % 64 == 0 else 32
    block_m = 16 if rows <= 16 else 64
    grid = (triton.cdiv(rows, block_m), triton.cdiv(n, block_n))
    _product_kernel[grid](
        x, weight, weight if scales is None else scales, out, rows, n, k, 0 if scales is None else scales.shape[1],
        group_n, x.stride(0), FP8=scales is not None, QUANTIZE=quantize_output, BM=block_m, BN=block_n, BK=64,
    )  # fmt: skip


def q8_round_(x: Tensor) -> Tensor:
    """Round ``x`` (bf16, contiguous, last axis a multiple of 32) by Q8 in place."""
    num_groups = x.numel() // 32
    block = 64
    _q8_round_kernel[(triton.cdiv(num_groups, block),)](x, num_groups, BLOCK=block)
    return x
