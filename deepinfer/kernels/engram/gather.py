"""The n-gram memory's lookup: hash, gather and dequantisation in one launch (spec 4.10).

The table may lie in device memory or in pinned host memory: the gather reads either through its pointer.
References: :func:`deepinfer.ops.engram.ngram_context` and ``engram_rows``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_GROUP = tl.constexpr(32)  # columns per scale


@dataclass(frozen=True, slots=True)
class NgramHash:
    """The constants of one layer's hash, on the device."""

    token_map: Tensor
    """int32 ``[vocab]``: compressed id of each token id."""
    pad: int
    """Compressed id of the padding token."""
    multipliers: Tensor
    """int64 ``[n]``."""
    primes: Tensor
    """int64 ``[n - 1, heads]``."""
    offsets: Tensor
    """int64 ``[n - 1, heads]``."""

    @property
    def num_columns(self) -> int:
        """Table rows per token."""
        return self.primes.numel()


@triton.jit
def _hash_rows(
    ids_ptr,
    map_ptr,
    multiplier_ptr,
    prime_ptr,
    offset_ptr,
    vocab,
    pad,
    row,
    size,
    heads,
    N: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Table rows of the n-gram of ``size + 2`` tokens that ends at ``row``: int64 ``[HEADS]``."""
    hashed = tl.zeros((), tl.int64)
    is_reachable = row >= 0
    for distance in tl.static_range(N):
        token = tl.load(ids_ptr + row * N + distance).to(tl.int64)
        is_reachable = is_reachable & (token >= 0) & (token < vocab)
        known = tl.load(map_ptr + token, mask=is_reachable, other=0).to(tl.int64)
        product = tl.where(is_reachable, known, pad) * tl.load(multiplier_ptr + distance)
        hashed = hashed ^ tl.where(distance <= size + 1, product, 0)
    head = tl.arange(0, HEADS)
    at = size * heads + head
    prime = tl.load(prime_ptr + at, mask=head < heads, other=1)
    return hashed % prime + tl.load(offset_ptr + at, mask=head < heads, other=0)


@triton.jit
def _row_number_kernel(
    ids_ptr,
    map_ptr,
    multiplier_ptr,
    prime_ptr,
    offset_ptr,
    numbers_ptr,
    vocab,
    pad,
    heads,
    N: tl.constexpr,
    HEADS: tl.constexpr,
):
    row, size = tl.program_id(0).to(tl.int64), tl.program_id(1)
    numbers = _hash_rows(
        ids_ptr, map_ptr, multiplier_ptr, prime_ptr, offset_ptr, vocab, pad, row, size, heads, N, HEADS
    )
    head = tl.arange(0, HEADS)
    tl.store(numbers_ptr + (row * (N - 1) + size) * heads + head, numbers, mask=head < heads)


@triton.jit
def _store_values(code_ptr, scale_ptr, out_ptr, numbers, inside, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Dequantise table rows ``numbers`` ``[HEADS]`` to ``out_ptr`` (rows of WIDTH, one behind the other)."""
    head = tl.arange(0, numbers.shape[0])
    column = tl.arange(0, BLOCK)
    mask = inside[:, None] & (column < WIDTH)[None, :]
    codes = tl.load(code_ptr + numbers[:, None] * WIDTH + column[None, :], mask=mask, other=0)
    bytes_ = tl.load(scale_ptr + numbers[:, None] * (WIDTH // _GROUP) + column[None, :] // _GROUP, mask=mask, other=127)
    bits = bytes_.to(tl.int32) << 23
    scale = tl.where(bits == 0, 1 << 22, bits).to(tl.float32, bitcast=True)
    values = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32) * scale
    tl.store(out_ptr + head[:, None] * WIDTH + column[None, :], values.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _gather_kernel(
    ids_ptr,
    map_ptr,
    multiplier_ptr,
    prime_ptr,
    offset_ptr,
    code_ptr,
    scale_ptr,
    out_ptr,
    vocab,
    pad,
    heads,
    N: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, size = tl.program_id(0).to(tl.int64), tl.program_id(1)
    numbers = _hash_rows(
        ids_ptr, map_ptr, multiplier_ptr, prime_ptr, offset_ptr, vocab, pad, row, size, heads, N, HEADS
    )
    out = out_ptr + (row * (N - 1) + size) * heads * WIDTH
    _store_values(code_ptr, scale_ptr, out, numbers, tl.arange(0, HEADS) < heads, WIDTH, BLOCK)


@triton.jit
def _dequantize_kernel(
    code_ptr, scale_ptr, out_ptr, count, ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    first = tl.program_id(0).to(tl.int64) * ROWS
    numbers = first + tl.arange(0, ROWS)
    _store_values(code_ptr, scale_ptr, out_ptr + first * WIDTH, numbers, numbers < count, WIDTH, BLOCK)


def _check_hash(ngram_ids: Tensor, constants: NgramHash) -> tuple[int, int, int]:
    rows, length = ngram_ids.shape
    sizes, heads = constants.primes.shape
    assert length == sizes + 1 == constants.multipliers.numel(), f"{ngram_ids.shape=} {constants.primes.shape=}"
    assert ngram_ids.is_contiguous(), f"{ngram_ids.stride()=}"
    assert ngram_ids.dtype in (torch.int32, torch.int64), f"{ngram_ids.dtype=}"
    return rows, length, heads


def engram_row_numbers(ngram_ids: Tensor, constants: NgramHash, out: Tensor | None = None) -> Tensor:
    """Table rows of every n-gram that ends at each row, exactly (spec 4.10 d, e).

    Args:
        ngram_ids: int32 or int64 ``[rows, n]``: each row's token and the ``n - 1`` before it; a negative or unknown id
            and everything older read as padding.
        constants: of the layer.
        out: int64 ``[rows, (n - 1) * heads]``.
    Returns:
        ``out``, or a new tensor of that shape.
    """
    rows, length, heads = _check_hash(ngram_ids, constants)
    if out is None:
        out = torch.empty((rows, constants.num_columns), dtype=torch.int64, device=ngram_ids.device)
    if rows:
        _row_number_kernel[(rows, length - 1)](
            ngram_ids,
            constants.token_map,
            constants.multipliers,
            constants.primes,
            constants.offsets,
            out,
            constants.token_map.numel(),
            constants.pad,
            heads,
            N=length,
            HEADS=triton.next_power_of_2(heads),
            num_warps=1,
        )
    return out


def engram_gather(
    ngram_ids: Tensor,
    constants: NgramHash,
    codes: Tensor,
    scales: Tensor,
    out: Tensor | None = None,
    *,
    num_warps: int = 4,
) -> Tensor:
    """Hash, gather and dequantise: the input of the Engram projection, exactly (table rows have 4 significant bits).

    Args:
        ngram_ids: as for :func:`engram_row_numbers`.
        constants: of the layer.
        codes: uint8 ``[table rows, width]`` (e4m3); scales: uint8 ``[table rows, width / 32]`` (ue8m0, none of them
            255). In device memory or in pinned host memory.
        out: bfloat16 ``[rows, (n - 1) * heads * width]``.
    Returns:
        ``out``, or a new tensor of that shape on the device of ``ngram_ids``.
    """
    rows, length, heads = _check_hash(ngram_ids, constants)
    width = codes.shape[1]
    assert scales.shape == (codes.shape[0], width // 32), f"{codes.shape=} {scales.shape=}"
    if out is None:
        out = torch.empty((rows, constants.num_columns * width), dtype=torch.bfloat16, device=ngram_ids.device)
    if rows:
        _gather_kernel[(rows, length - 1)](
            ngram_ids,
            constants.token_map,
            constants.multipliers,
            constants.primes,
            constants.offsets,
            codes,
            scales,
            out,
            constants.token_map.numel(),
            constants.pad,
            heads,
            N=length,
            HEADS=triton.next_power_of_2(heads),
            WIDTH=width,
            BLOCK=triton.next_power_of_2(width),
            num_warps=num_warps,
        )
    return out


def dequantize_table_rows(codes: Tensor, scales: Tensor, out: Tensor | None = None) -> Tensor:
    """Exact values of table rows that were gathered elsewhere.

    Args:
        codes: uint8 ``[count, width]``; scales: uint8 ``[count, width / 32]``.
        out: bfloat16 ``[count, width]``, contiguous, or any contiguous tensor with as many elements.
    """
    count, width = codes.shape
    if out is None:
        out = torch.empty((count, width), dtype=torch.bfloat16, device=codes.device)
    assert out.numel() == count * width, f"{out.shape=} for {codes.shape=}"
    assert out.is_contiguous(), f"{out.stride()=}"
    rows_per_program = 8
    if count:
        _dequantize_kernel[(triton.cdiv(count, rows_per_program),)](
            codes, scales, out, count, ROWS=rows_per_program, WIDTH=width, BLOCK=triton.next_power_of_2(width)
        )
    return out
