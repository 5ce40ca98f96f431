"""Layout in which the few-row kernels read weights: blocks of 32 rows and 2048 bytes, ordered by tensor-core lane.

A block holds 32 rows and 64 columns of e4m3 codes, or 32 columns of bf16. It consists of four pieces of 512 bytes,
16 bytes per lane, so that a warp reads it with four coalesced loads and every lane finds exactly the operand of
``mma.m16n8k16`` that it has to supply: lane ``4 g + t`` holds rows ``g`` and ``g + 8`` of a 16-row tile, and columns
``2t, 2t + 1, 2t + 8, 2t + 9`` of every 16. Blocks follow each other along the columns.

- e4m3: piece ``2 m + half`` has row ``16 m + 8 half + g``. Byte ``4 q + b`` of a lane is in columns ``16 q ..``:
  ``b = 1, 3, 0, 2`` are its four columns in order, so that masking gives two pairs of codes in high bytes.
- bf16: piece ``2 m + q`` has columns ``16 q ..`` of rows ``16 m ..``: the lane's four operand registers.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

BLOCK_BYTES = 2048
FP8_COLUMNS = 64
BF16_COLUMNS = 32
MAX_SCALE_BYTE = 134
"""Largest ue8m0 byte whose scale times 2**120 is a finite bf16."""


def _padded(weight: Tensor, columns: int) -> Tensor:
    rows, width = weight.shape
    if rows % 32 == 0 and width % columns == 0:
        return weight
    return functional.pad(weight, (0, -width % columns, 0, -rows % 32))


def pack_fp8(codes: Tensor) -> Tensor:
    """Codes uint8 ``[N, K]`` to ``[ceil(N / 32), ceil(K / 64), 2048]``; padding is code 0."""
    codes = _padded(codes, FP8_COLUMNS)
    blocks = codes.view(codes.shape[0] // 32, 2, 2, 8, codes.shape[1] // 64, 4, 2, 4, 2)
    # [block, m, half, g, chunk, q, high columns, t, odd column] -> the byte of (high, odd) is 2 odd + 1 - high
    packed = blocks.permute(0, 4, 1, 2, 3, 7, 5, 8, 6).flip(-1)
    return packed.reshape(blocks.shape[0], blocks.shape[4], BLOCK_BYTES)


def unpack_fp8(packed: Tensor, rows: int, columns: int) -> Tensor:
    """Inverse of :func:`pack_fp8`."""
    num_blocks, num_chunks, _ = packed.shape
    blocks = packed.view(num_blocks, num_chunks, 2, 2, 8, 4, 4, 2, 2).flip(-1)
    codes = blocks.permute(0, 2, 3, 4, 1, 6, 8, 5, 7).reshape(num_blocks * 32, num_chunks * 64)
    return codes[:rows, :columns].contiguous()


def pack_scales(scales: Tensor) -> Tensor:
    """Scale bytes uint8 ``[ceil(N / 32), ceil(K / 32)]`` to int32 ``[ceil(N / 32), ceil(K / 64)]``.

    Each word has the factors of a block's two column halves, first in the low half, as bf16 ``2**(120 + byte - 127)``.

    Raises:
        ValueError: a byte is above ``MAX_SCALE_BYTE``, so that its factor is infinite.
    """
    largest = int(scales.max())
    if largest > MAX_SCALE_BYTE:
        raise ValueError(f"a weight scale is 2**{largest - 127}: the packed format ends at 2**{MAX_SCALE_BYTE - 127}")
    fields = functional.pad(scales.to(torch.int32) + 120, (0, scales.shape[1] % 2)) << 7
    return fields[:, 0::2] | (fields[:, 1::2] << 16)


def pack_bf16(weight: Tensor) -> Tensor:
    """bf16 ``[N, K]`` to ``[ceil(N / 32), ceil(K / 32), 1024]``; padding is 0."""
    weight = _padded(weight, BF16_COLUMNS)
    blocks = weight.view(weight.shape[0] // 32, 2, 2, 8, weight.shape[1] // 32, 2, 2, 4, 2)
    # [block, m, half, g, chunk, q, high columns, t, odd column]; register 2 high + half
    packed = blocks.permute(0, 4, 1, 5, 3, 7, 6, 2, 8)
    return packed.reshape(blocks.shape[0], blocks.shape[4], BLOCK_BYTES // 2)
