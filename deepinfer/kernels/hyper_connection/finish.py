"""Second half of the hyper-connection kernels: the normed input of a sublayer and its mixes; the head's input."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.dense.row_scaled import RowCodes
from deepinfer.kernels.hyper_connection import launches_cuda as cuda
from deepinfer.kernels.hyper_connection import stages
from deepinfer.kernels.hyper_connection.launches_cuda import FinishShape
from deepinfer.kernels.hyper_connection.parts import Mixes, PartialSums, mix_width, new_mixes


class Finished(NamedTuple):
    """Results of :func:`hc_finish`."""

    x: Tensor
    """``[rows, hidden]`` bf16, the sublayer's input."""
    xq: Tensor | None
    """``[rows, hidden]`` bf16: x rounded by Q8."""
    codes: Tensor | None
    """``[rows, hidden]`` uint8, e4m3 codes of x."""
    scales: Tensor | None
    """``[rows, hidden / 32]``: ue8m0 bytes (uint8), or the powers of two in float32."""
    mixes: Mixes | None
    row_codes: RowCodes | None = None
    """Codes of xq with one scale for each row."""


@triton.jit
def _finish_kernel(
    partial, h, norm_weight, scale, base, x, xq, codes, scales, mixes,
    hidden, record_stride, norm_eps, hc_eps,
    ITERATIONS: tl.constexpr, M: tl.constexpr, WIDTH: tl.constexpr, SLICES: tl.constexpr, SLICES_P2: tl.constexpr,
    GROUPS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    record = partial + row * record_stride
    if part == PARTS:
        factor, offset = stages.load_parameters(scale, base, M, WIDTH)
        stages.finish_mixes(
            record, factor, offset, mixes + row * (2 + M) * M, hidden, norm_eps, hc_eps,
            ITERATIONS, M, WIDTH, SLICES, SLICES_P2,
        )  # fmt: skip
    else:
        group = part * GROUPS + tl.arange(0, GROUPS)
        columns = group[:, None] * 32 + tl.arange(0, 32)[None, :]
        mask = columns < hidden
        offsets = row * hidden + columns
        wide = tl.load(h + offsets, mask, other=0.0).to(tl.float32)
        weight = tl.load(norm_weight + columns, mask, other=0.0).to(tl.float32)
        index = tl.arange(0, SLICES_P2)
        squares = tl.load(record + SLICES * WIDTH + index, index < SLICES, other=0.0)
        tl.debug_barrier()  # a fence for the compiler: every load is on its way before any is waited for
        square = stages.sum_exactly(squares, 0)
        normed = (wide * tl.rsqrt(square / hidden + norm_eps) * weight).to(tl.bfloat16)
        tl.store(x + offsets, normed, mask)
        if xq is not None or codes is not None:
            scale_offsets = row * (hidden // 32) + group
            stages.store_rounded(normed, offsets, scale_offsets, mask, group * 32 < hidden, xq, codes, scales)


def hc_finish(
    partial: PartialSums,
    h: Tensor,
    norm_weight: Tensor,
    scale: Tensor,
    base: Tensor,
    norm_eps: float,
    hc_eps: float,
    iterations: int,
    *,
    wants_xq: bool = True,
    wants_codes: bool = False,
    wants_row_codes: bool = False,
    wants_mixes: bool = True,
    scale_dtype: torch.dtype = torch.uint8,
    columns: int | None = None,
    num_warps: int | None = None,
    shape: FinishShape | None = None,
    overlap: bool = True,
) -> Finished:
    """The normed input of a sublayer, rounded as its products want it, and the sublayer's mixes.

    Args:
        partial, h: from :func:`hc_write_read`.
        norm_weight: ``[hidden]`` bf16 or float32; scale: ``[3]``, base: ``[(2 + M) * M]`` float32.
        wants_row_codes: not together with ``wants_codes``.
        scale_dtype: of the codes' scales, uint8 or float32.
        columns, num_warps: of one program of the Triton kernel, which they choose; ``columns`` a power of two of at
            least 32. No influence on the result.
        shape: for the CUDA kernel; no influence on the result.
        overlap: the CUDA kernel may load its weights before the preceding kernel has ended.
    """
    rows, hidden = h.shape
    assert h.is_contiguous()
    assert hidden % 32 == 0
    assert not (wants_codes and wants_row_codes)
    streams = int(base.shape[0] ** 0.5)  # (2 + M) * M lies between M**2 and (M + 1)**2
    num_slices = partial.num_slices
    is_cuda = columns is None and num_warps is None
    is_cuda = is_cuda and cuda.accepts(streams, hidden, h.device) and cuda.accepts_slices(num_slices, hidden)
    row_codes = None
    if wants_row_codes and is_cuda and cuda.accepts_row_codes(hidden):
        row_codes = RowCodes.empty(1, rows, hidden, h.device)
    x = torch.empty_like(h)
    xq = torch.empty_like(h) if wants_xq or (wants_row_codes and row_codes is None) else None
    codes = torch.empty_like(h, dtype=torch.uint8) if wants_codes else None
    scales = h.new_empty(rows, hidden // 32, dtype=scale_dtype) if wants_codes else None
    packed, mixes = new_mixes(h, rows, streams)
    if is_cuda:
        cuda.finish(
            partial.records, num_slices, h, norm_weight, scale, base, norm_eps, hc_eps, iterations,
            x, xq, *((codes, scales) if row_codes is None else (row_codes.codes[0], row_codes.scales[0])),
            packed if wants_mixes else None, shape or cuda.choose_finish_shape(rows, row_codes is not None), overlap,
        )  # fmt: skip
    else:
        columns = columns or 512
        parts = triton.cdiv(hidden, columns)
        _finish_kernel[(rows, parts + wants_mixes)](
            partial.records, h, norm_weight, scale, base, x, xq, codes, scales, packed,
            hidden, partial.records.stride(0), norm_eps, hc_eps,
            ITERATIONS=iterations, M=streams, WIDTH=mix_width(streams), SLICES=num_slices,
            SLICES_P2=triton.next_power_of_2(num_slices), GROUPS=columns // 32, PARTS=parts,
            num_warps=num_warps or (2 if rows >= 128 else 4),
        )  # fmt: skip
    if wants_row_codes and row_codes is None:
        assert xq is not None
        row_codes = RowCodes.of(xq)
    return Finished(x, xq, codes, scales, mixes if wants_mixes else None, row_codes)


@triton.jit
def _collapse_kernel(
    trunk, read_mix, rows, norm_weight, x, h, hidden, read_stride, norm_eps, M: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    sample = tl.program_id(0).to(tl.int64)
    row = sample
    if rows is not None:
        row = tl.load(rows + sample).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < hidden
    total = tl.zeros([BLOCK], tl.float32)
    for stream in tl.static_range(M):
        value = tl.load(trunk + (row * M + stream) * hidden + columns, mask, other=0.0).to(tl.float32)
        total += tl.load(read_mix + row * read_stride + stream) * value
    read = total.to(tl.bfloat16)
    if h is not None:
        tl.store(h + sample * hidden + columns, read, mask)
    wide = read.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, axis=0) / hidden + norm_eps)
    weight = tl.load(norm_weight + columns, mask, other=0.0).to(tl.float32)
    tl.store(x + sample * hidden + columns, (wide * inverse * weight).to(tl.bfloat16), mask)


def collapse_head(
    trunk: Tensor,
    read_mix: Tensor,
    norm_weight: Tensor,
    norm_eps: float,
    rows: Tensor | None = None,
    *,
    h: Tensor | None = None,
) -> Tensor:
    """What the head multiplies: the collapsed trunk of some rows, normed.

    Args:
        trunk: ``[rows, M, hidden]`` bf16; read_mix: ``[rows, M]`` float32, rows may be strided.
        norm_weight: ``[hidden]`` bf16 or float32.
        rows: ``[samples]`` int32, which rows; None: all.
        h: ``[samples, hidden]`` bf16, gets the result before the norm.
    Returns:
        ``[samples, hidden]`` bf16.
    """
    assert trunk.is_contiguous()
    assert read_mix.stride(1) == 1
    _, streams, hidden = trunk.shape
    samples = trunk.shape[0] if rows is None else rows.shape[0]
    x = trunk.new_empty(samples, hidden)
    _collapse_kernel[(samples,)](
        trunk, read_mix, rows, norm_weight, x, h, hidden, read_mix.stride(0), norm_eps,
        M=streams, BLOCK=triton.next_power_of_2(hidden), num_warps=8,
    )  # fmt: skip
    return x
