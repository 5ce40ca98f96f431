"""Sparse attention in Triton: any width, any head count; runs through the interpreter.

One program owns a block of heads of one row and a range of its keys. Keys are read record by record, expanded to bf16
(exactly) once and used as keys and as values. Keys of a row are cut into chunks of ``BLOCK_N``: first the window's,
then the entries'; a split is a range of chunks. With one split the program finishes its output itself; with more, the
splits leave unnormalised sums in float32 and a second kernel adds them in the order of the splits.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _e4m3(codes):
    """Values of e4m3 codes as float32."""
    return codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def _fp8_keys(record, valid, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Fp8Record at the pointers ``record`` ``[n]`` -> bf16 ``[n, BLOCK_D]``; zeros where ``valid`` is false."""
    cols = tl.arange(0, BLOCK_D)
    inside = valid[:, None] & (cols < D)[None, :]
    codes = tl.load(record[:, None] + cols[None, :], inside, other=0)
    groups = tl.arange(0, BLOCK_D // 32)
    inside_scales = valid[:, None] & (groups < D // 32)[None, :]
    exponents = tl.load(record[:, None] + D + groups[None, :], inside_scales, other=127).to(tl.int32)
    scales = tl.where(exponents == 0, 1 << 22, exponents << 23).to(tl.float32, bitcast=True)
    values = _e4m3(codes).reshape(codes.shape[0], BLOCK_D // 32, 32) * scales[:, :, None]
    return values.to(tl.bfloat16).reshape(codes.shape[0], BLOCK_D)


@triton.jit
def _fp4_keys(record, valid, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Fp4Record at the pointers ``record`` ``[n]`` -> bf16 ``[n, BLOCK_D]``; zeros where ``valid`` is false."""
    cols = tl.arange(0, BLOCK_D // 2)
    inside = valid[:, None] & (cols < D // 2)[None, :]
    codes = tl.load(record[:, None] + cols[None, :], inside, other=0).to(tl.int32)
    groups = tl.arange(0, BLOCK_D // 16)
    inside_scales = valid[:, None] & (groups < D // 16)[None, :]
    scales = _e4m3(tl.load(record[:, None] + D // 2 + groups[None, :], inside_scales, other=0))
    # e2m1 'seem' -> float32 with exponent field 'ee' and top mantissa bit 'm': the value times 2**-126
    even = (((codes & 8) << 28) | ((codes & 7) << 22)).to(tl.float32, bitcast=True)
    odd = (((codes & 128) << 24) | ((codes & 112) << 18)).to(tl.float32, bitcast=True)
    values = (tl.join(even, odd) * 2.0**126).reshape(codes.shape[0], BLOCK_D // 16, 16) * scales[:, :, None]
    return values.to(tl.bfloat16).reshape(codes.shape[0], BLOCK_D)


@triton.jit
def _attend_chunk(q, keys, valid, largest, total, acc, scale, SPLIT_P: tl.constexpr):
    """Online softmax over one chunk of keys. Logits in units of log 2; ``largest`` is finite from the start."""
    logits = tl.dot(q, tl.trans(keys)) * scale
    logits = tl.where(valid[None, :], logits, -float("inf"))
    larger = tl.maximum(largest, tl.max(logits, 1))
    shrink = tl.exp2(largest - larger)
    weights = tl.exp2(logits - larger[:, None])
    high = weights.to(tl.bfloat16)
    acc = acc * shrink[:, None]
    acc = tl.dot(high, keys, acc)
    if SPLIT_P:
        acc = tl.dot((weights - high.to(tl.float32)).to(tl.bfloat16), keys, acc)
        total = total * shrink + tl.sum(weights, 1)
    else:
        total = total * shrink + tl.sum(high.to(tl.float32), 1)
    return larger, total, acc


@triton.jit
def _turn(values, partners, cosines, sines, cols):
    """Rotated values; ``sines`` are 0 outside of the rotary channels. A partner is the other channel of the pair."""
    return values * cosines + partners * tl.where(cols % 2 == 0, -sines, sines)


@triton.jit
def _rotary(cos, sin, row, cols, D: tl.constexpr, ROPE: tl.constexpr):
    """Cosines and sines per channel: 1 and 0 where the channel does not turn."""
    pair = (cols - (D - ROPE)) // 2
    turning = (cols >= D - ROPE) & (cols < D)
    cosines = tl.load(cos + row * (ROPE // 2) + pair, turning, other=1.0)
    sines = tl.load(sin + row * (ROPE // 2) + pair, turning, other=0.0)
    return cosines, sines


@triton.jit
def _round_q8(x, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Values of ``x`` ``[ROWS, COLS]`` after Q8, in float32."""
    groups = x.reshape(ROWS, COLS // 32, 32)
    largest = tl.maximum(tl.max(tl.abs(groups), 2), 1e-4)
    bits = tl.div_rn(largest, 448.0).to(tl.int32, bitcast=True)
    exponent = ((bits + 0x7FFFFF) >> 23) - 127
    shrink = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
    grow = ((127 + exponent) << 23).to(tl.float32, bitcast=True)
    codes = (groups * shrink[:, :, None]).to(tl.float8e4nv)
    return (codes.to(tl.float32) * grow[:, :, None]).reshape(ROWS, COLS)


@triton.jit
def _finish_heads(
    out, row, heads, cos, sin, H: tl.constexpr, D: tl.constexpr, ROPE: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr, QUANTIZE: tl.constexpr,
):  # fmt: skip
    """Rotate back and round in place what the program has stored as bf16 in ``out``."""
    cols = tl.arange(0, BLOCK_D)
    inside = (heads < H)[:, None] & (cols < D)[None, :]
    place = out + heads[:, None] * D + cols[None, :]
    x = tl.load(place, inside, other=0.0).to(tl.float32)
    turning = inside & (cols >= D - ROPE)[None, :]
    partners = tl.load(out + heads[:, None] * D + (cols ^ 1)[None, :], turning, other=0.0).to(tl.float32)
    cosines, sines = _rotary(cos, sin, row, cols, D, ROPE)
    x = _turn(x, partners, cosines[None, :], -sines[None, :], cols[None, :]).to(tl.bfloat16).to(tl.float32)
    if QUANTIZE:
        x = _round_q8(x, BLOCK_H, BLOCK_D)
    tl.debug_barrier()  # partners are read before they are overwritten
    tl.store(place, x.to(tl.bfloat16), inside)


@triton.jit
def _attend_kernel(
    q, step_records, ring, window_index, entries, entry_slots, sink, cos, sin, out, partial_sums, partial_stats,
    q_stride, width, num_selected, scale,
    H: tl.constexpr, D: tl.constexpr, ROPE: tl.constexpr, FP4: tl.constexpr, QUANTIZE: tl.constexpr,
    SPLITS: tl.constexpr, SPLIT_P: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    heads = tl.program_id(2) * BLOCK_H + tl.arange(0, BLOCK_H)
    cols = tl.arange(0, BLOCK_D)

    # the query, rotated
    inside = (heads < H)[:, None] & (cols < D)[None, :]
    source = q + row * q_stride + heads[:, None] * D
    x = tl.load(source + cols[None, :], inside, other=0.0).to(tl.float32)
    turning = inside & (cols >= D - ROPE)[None, :]
    partners = tl.load(source + (cols ^ 1)[None, :], turning, other=0.0).to(tl.float32)
    cosines, sines = _rotary(cos, sin, row, cols, D, ROPE)
    query = _turn(x, partners, cosines[None, :], sines[None, :], cols[None, :]).to(tl.bfloat16)

    # the sink is the first logit seen, so that the largest is finite; it counts once, in split 0
    largest = tl.load(sink + heads, heads < H, other=0.0) * LOG2E
    total = tl.where(split == 0, 1.0, 0.0) + tl.zeros((BLOCK_H,), tl.float32)
    acc = tl.zeros((BLOCK_H, BLOCK_D), tl.float32)
    scale *= LOG2E

    window_chunks = tl.cdiv(width, BLOCK_N)
    chunks = window_chunks + tl.cdiv(num_selected, BLOCK_N)
    per_split = tl.cdiv(chunks, SPLITS)
    begin = split * per_split
    end = tl.minimum(begin + per_split, chunks)
    offsets = tl.arange(0, BLOCK_N)

    WINDOW_RECORD: tl.constexpr = D + D // 32
    for chunk in range(begin, tl.minimum(end, window_chunks)):
        number = chunk * BLOCK_N + offsets
        index = tl.load(window_index + row * width + number, number < width, other=-1).to(tl.int64)
        valid = index != -1
        record = tl.where(
            index >= 0, step_records + index * WINDOW_RECORD, ring + tl.maximum(-2 - index, 0) * WINDOW_RECORD
        )
        keys = _fp8_keys(record, valid, D, BLOCK_D)
        largest, total, acc = _attend_chunk(query, keys, valid, largest, total, acc, scale, SPLIT_P)
    for chunk in range(tl.maximum(begin, window_chunks), end):
        number = (chunk - window_chunks) * BLOCK_N + offsets
        index = tl.load(entry_slots + row * num_selected + number, number < num_selected, other=-1).to(tl.int64)
        valid = index >= 0
        if FP4:
            keys = _fp4_keys(entries + tl.maximum(index, 0) * (D // 2 + D // 16), valid, D, BLOCK_D)
        else:
            keys = _fp8_keys(entries + tl.maximum(index, 0) * WINDOW_RECORD, valid, D, BLOCK_D)
        largest, total, acc = _attend_chunk(query, keys, valid, largest, total, acc, scale, SPLIT_P)

    if SPLITS == 1:
        mine = out + row * H * D
        tl.store(mine + heads[:, None] * D + cols[None, :], (acc / total[:, None]).to(tl.bfloat16), inside)
        tl.debug_barrier()
        _finish_heads(mine, row, heads, cos, sin, H, D, ROPE, BLOCK_D, BLOCK_H, QUANTIZE)
    else:
        part = (row * SPLITS + split) * H
        tl.store(partial_sums + (part + heads[:, None]) * D + cols[None, :], acc, inside)
        tl.store(partial_stats + (part + heads) * 2, largest, heads < H)
        tl.store(partial_stats + (part + heads) * 2 + 1, total, heads < H)


@triton.jit
def _combine_kernel(
    partial_sums, partial_stats, cos, sin, out,
    H: tl.constexpr, D: tl.constexpr, ROPE: tl.constexpr, QUANTIZE: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    cols = tl.arange(0, BLOCK_D)
    known = heads < H
    inside = known[:, None] & (cols < D)[None, :]
    largest = tl.full((BLOCK_H,), -float("inf"), tl.float32)
    for split in tl.static_range(SPLITS):
        part = (row * SPLITS + split) * H
        largest = tl.maximum(largest, tl.load(partial_stats + (part + heads) * 2, known, other=0.0))
    total = tl.zeros((BLOCK_H,), tl.float32)
    acc = tl.zeros((BLOCK_H, BLOCK_D), tl.float32)
    for split in tl.static_range(SPLITS):
        part = (row * SPLITS + split) * H
        weight = tl.exp2(tl.load(partial_stats + (part + heads) * 2, known, other=0.0) - largest)
        total += weight * tl.load(partial_stats + (part + heads) * 2 + 1, known, other=1.0)
        acc += weight[:, None] * tl.load(partial_sums + (part + heads[:, None]) * D + cols[None, :], inside, other=0.0)
    mine = out + row * H * D
    tl.store(mine + heads[:, None] * D + cols[None, :], (acc / total[:, None]).to(tl.bfloat16), inside)
    tl.debug_barrier()
    _finish_heads(mine, row, heads, cos, sin, H, D, ROPE, BLOCK_D, BLOCK_H, QUANTIZE)


def launch(
    q: Tensor,
    step_records: Tensor,
    ring: Tensor,
    window_index: Tensor,
    entries: Tensor,
    entry_slots: Tensor,
    fp4: bool,
    sink: Tensor,
    cos: Tensor,
    sin: Tensor,
    quantize_output: bool,
    out: Tensor,
    splits: int,
    split_weights: bool,
    *,
    block_n: int = 64,
    num_warps: int = 8,
    num_stages: int = 2,
) -> None:
    """Arguments as :func:`.sparse_attention.sparse_attention`; ``entry_slots`` is ``[rows, 0]`` for none."""
    rows, heads, dim = q.shape
    block_d = triton.next_power_of_2(dim)
    block_h = min(64, max(16, triton.next_power_of_2(heads)))
    sums = stats = out
    if splits > 1:
        sums = torch.empty(rows * splits * heads * dim, dtype=torch.float32, device=q.device)
        stats = torch.empty(rows * splits * heads * 2, dtype=torch.float32, device=q.device)
    shape = {"H": heads, "D": dim, "ROPE": 2 * cos.shape[1], "QUANTIZE": quantize_output, "SPLITS": splits}
    _attend_kernel[(rows, splits, triton.cdiv(heads, block_h))](
        q, step_records, ring, window_index, entries, entry_slots, sink, cos, sin, out, sums, stats,
        q.stride(0), window_index.shape[1], entry_slots.shape[1], dim**-0.5,
        FP4=fp4, SPLIT_P=split_weights, BLOCK_H=block_h, BLOCK_N=block_n, BLOCK_D=block_d, **shape,
        num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    if splits > 1:
        _combine_kernel[(rows, triton.cdiv(heads, 4))](
            sums, stats, cos, sin, out, BLOCK_H=4, BLOCK_D=block_d, **shape, num_warps=4
        )
