"""Stages of the hyper-connection kernels: write and read a tile of the trunk, products with ``fn``, mixes, norm."""

# Triton has no starred tuples, and mypy takes its growing tuples for one of fixed length.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment"

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer.kernels.formats.e4m3 import e4m3_code, q8_groups
from deepinfer.kernels.formats.float32 import power_of_two

IS_COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)
NO_UPDATE, PLAIN_UPDATE, EXPERT_UPDATE, SPLIT_UPDATE = 0, 1, 2, 3


@triton.jit
def load_update(
    update, shared, experts, row, columns, mask, num_rows, hidden, KIND: tl.constexpr, K: tl.constexpr
):  # fmt: skip
    """The parts of a sublayer's output, tiles ``[R, S]`` in a tuple, and the ``[R]`` expert numbers of KIND 2.

    KIND 1: bf16 ``[rows, hidden]``. KIND 2: ``shared`` bf16 ``[rows, hidden]``, then K of ``[rows, K, hidden]``.
    KIND 3: K partial sums float32 of ``[K, rows, hidden]``.
    """
    row = row.to(tl.int64)
    parts = ()
    chosen = ()
    if KIND == 2:
        parts = parts + (tl.load(shared + row[:, None] * hidden + columns[None, :], mask, other=0.0),)
    for part in tl.static_range(K):
        if KIND == 2:
            pointer = update + (row[:, None] * K + part) * hidden + columns[None, :]
            if experts is not None:
                chosen = chosen + (tl.load(experts + row * K + part, row < num_rows, other=-1),)
        else:
            pointer = update + (row[:, None] + part * num_rows) * hidden + columns[None, :]
        parts = parts + (tl.load(pointer, mask, other=0.0),)
    return parts, chosen


@triton.jit
def sum_update(parts, chosen, KIND: tl.constexpr):
    """The output ``[R, S]``, float32 values of bf16; a sum is rounded once. Parts of expert -1 do not count."""
    total = parts[0].to(tl.float32)
    for part in tl.static_range(1, len(parts)):
        value = parts[part].to(tl.float32)
        if len(chosen) > 0:  # a select, not a factor: what nobody wrote may hold NaN
            value = tl.where((chosen[part - 1] >= 0)[:, None], value, 0.0)
        total += value
    if KIND != 1:
        total = total.to(tl.bfloat16).to(tl.float32)
    return total


@triton.jit
def load_streams(trunk, row, columns, mask, hidden, M: tl.constexpr):
    """The M streams of a tile: a tuple of bf16 ``[R, S]``."""
    streams = ()
    for stream in tl.static_range(M):
        pointer = trunk + (row.to(tl.int64)[:, None] * M + stream) * hidden + columns[None, :]
        streams = streams + (tl.load(pointer, mask, other=0.0),)
    return streams


@triton.jit
def in_place(x):
    """Bf16 ``x``, pinned: otherwise the compiler makes it four times over in the layout of a product's operand."""
    if IS_COMPILED:
        x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=tl.bfloat16, is_pure=False, pack=2)
    return x


@triton.jit
def all_in_place(streams, M: tl.constexpr):
    """Each of the tuple :func:`in_place`."""
    pinned = ()
    for stream in tl.static_range(M):
        pinned = pinned + (in_place(streams[stream]),)
    return pinned


@triton.jit
def write_streams(streams, update, write_mix, stream_mix, M: tl.constexpr):
    """New streams: target ``j`` sums over the first index of the stream mix, plus its share of the update; bf16."""
    written = ()
    for target in tl.static_range(M):
        total = write_mix[target][:, None] * update
        for source in tl.static_range(M):
            total += stream_mix[source * M + target][:, None] * streams[source].to(tl.float32)
        written = written + (in_place(total.to(tl.bfloat16)),)
    return written


@triton.jit
def store_streams(trunk, streams, row, columns, mask, hidden, M: tl.constexpr):
    """The reverse of :func:`load_streams`."""
    for stream in tl.static_range(M):
        pointer = trunk + (row.to(tl.int64)[:, None] * M + stream) * hidden + columns[None, :]
        tl.store(pointer, streams[stream], mask)


@triton.jit
def mean_of_streams(streams, M: tl.constexpr):
    """bf16 ``[R, S]``."""
    total = streams[0].to(tl.float32)
    for stream in tl.static_range(1, M):
        total += streams[stream].to(tl.float32)
    return (total / M).to(tl.bfloat16)


@triton.jit
def load_mix(mix, row, num_rows, mix_stride, COUNT: tl.constexpr):
    """COUNT neighbouring floats of each row: a tuple of ``[R]``."""
    values = ()
    for index in tl.static_range(COUNT):
        values = values + (tl.load(mix + row * mix_stride + index, row < num_rows, other=0.0),)
    return values


@triton.jit
def read_streams(streams, read_mix, M: tl.constexpr):
    """The collapsed stream ``[R, S]``, bf16; ``read_mix`` a tuple of ``[R]``."""
    total = read_mix[0][:, None] * streams[0].to(tl.float32)
    for stream in tl.static_range(1, M):
        total += read_mix[stream][:, None] * streams[stream].to(tl.float32)
    return total.to(tl.bfloat16)


@triton.jit
def load_fn(fn, columns, hidden, M: tl.constexpr, WIDTH: tl.constexpr):
    """Per stream, the tile of ``fn`` ``[(2 + M) * M, M * hidden]`` at ``columns``: float32 ``[WIDTH, S]``."""
    mix = tl.arange(0, WIDTH)
    mask = (mix < (2 + M) * M)[:, None] & (columns < hidden)[None, :]
    tiles = ()
    for stream in tl.static_range(M):
        pointer = fn + mix[:, None] * (M * hidden) + stream * hidden + columns[None, :]
        tiles = tiles + (tl.load(pointer, mask, other=0.0),)
    return tiles


@triton.jit
def upper_half(x):
    """The bf16 that is float32 ``x`` cut off behind its first 8 bits, as float32."""
    return (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def split_fn(tiles, M: tl.constexpr):
    """The float32 tiles as sums of three bf16 each: a tuple of 3 * M bf16 ``[WIDTH, S]``.

    A float32 has 24 bits, so this is exact, and so are the tensor cores' products with it. Pinned like
    :func:`in_place`, so that the parts are made once, not once per warp.
    """
    parts = ()
    for stream in tl.static_range(M):
        first = upper_half(tiles[stream])
        rest = tiles[stream] - first
        second = upper_half(rest)
        parts = parts + (
            in_place(first.to(tl.bfloat16)),
            in_place(second.to(tl.bfloat16)),
            in_place((rest - second).to(tl.bfloat16)),
        )
    return parts


@triton.jit
def mix_products(streams, parts, M: tl.constexpr, WIDTH: tl.constexpr):
    """Products of the streams (bf16 ``[R, S]`` each) with the parts of ``fn``: float32 ``[R, WIDTH]``.

    Three sums side by side, because a tensor-core product waits for the one before it in the same sum.
    """
    high = tl.zeros([streams[0].shape[0], WIDTH], tl.float32)
    middle = tl.zeros([streams[0].shape[0], WIDTH], tl.float32)
    low = tl.zeros([streams[0].shape[0], WIDTH], tl.float32)
    for stream in tl.static_range(M):
        high = tl.dot(streams[stream], tl.trans(parts[3 * stream]), high)
        middle = tl.dot(streams[stream], tl.trans(parts[3 * stream + 1]), middle)
        low = tl.dot(streams[stream], tl.trans(parts[3 * stream + 2]), low)
    return (low + middle) + high


@triton.jit
def squares(tile):
    """Sum of squares of a bf16 tile ``[R, S]`` per row, float32."""
    wide = tile.to(tl.float32)
    return tl.sum(wide * wide, axis=1)


@triton.jit
def store_partial(
    partial, row, num_rows, products, of_read, of_trunk, slice_id, stride, SLICES: tl.constexpr, M: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """One slice of a record: ``[SLICES, WIDTH]`` products, ``[SLICES]`` squares of h, ``[SLICES]`` of the trunk."""
    live = row < num_rows
    mix = tl.arange(0, WIDTH)
    record = partial + row.to(tl.int64) * stride
    mask = live[:, None] & (mix < (2 + M) * M)[None, :]
    tl.store(record[:, None] + slice_id * WIDTH + mix[None, :], products, mask)
    tl.store(record + SLICES * WIDTH + slice_id, of_read, live)
    tl.store(record + SLICES * (WIDTH + 1) + slice_id, of_trunk, live)


@triton.jit
def sum_exactly(x, axis: tl.constexpr):
    """Sum of float32 in float64: as good as exact, so of the same bits in every order."""
    return tl.sum(x.to(tl.float64), axis=axis).to(tl.float32)


@triton.jit
def sinkhorn(c, eps, ITERATIONS: tl.constexpr, M: tl.constexpr):
    """A tuple of M * M logits to the near doubly-stochastic matrix: softmax of the rows, then columns and rows in turn.

    Scalars instead of a tensor: a pass is a few additions in registers, where a reduction would cross lanes.
    """
    soft = ()
    for i in tl.static_range(M):
        largest = c[i * M]
        for j in tl.static_range(1, M):
            largest = tl.maximum(largest, c[i * M + j])
        row = ()
        total = 0.0
        for j in tl.static_range(M):
            row = row + (tl.exp(c[i * M + j] - largest),)
            total += row[j]
        for j in tl.static_range(M):
            soft = soft + (row[j] / total + eps,)
    soft = divide_columns(soft, eps, M)
    for _ in tl.range(ITERATIONS - 1):
        soft = divide_columns(divide_rows(soft, eps, M), eps, M)
    return soft


@triton.jit
def divide_rows(c, eps, M: tl.constexpr):
    """Each element over its row's sum plus eps."""
    out = ()
    for i in tl.static_range(M):
        total = c[i * M]
        for j in tl.static_range(1, M):
            total += c[i * M + j]
        inverse = 1.0 / (total + eps)
        for j in tl.static_range(M):
            out = out + (c[i * M + j] * inverse,)
    return out


@triton.jit
def divide_columns(c, eps, M: tl.constexpr):
    """Each element over its column's sum plus eps."""
    inverses = ()
    for j in tl.static_range(M):
        total = c[j]
        for i in tl.static_range(1, M):
            total += c[i * M + j]
        inverses = inverses + (1.0 / (total + eps),)
    out = ()
    for element in tl.static_range(M * M):
        out = out + (c[element] * inverses[element % M],)
    return out


@triton.jit
def load_parameters(scale, base, M: tl.constexpr, WIDTH: tl.constexpr):
    """``scale`` and ``base`` of each mix, ``[WIDTH]``."""
    mix = tl.arange(0, WIDTH)
    which = tl.where(mix < M, 0, tl.where(mix < 2 * M, 1, 2))
    return tl.load(scale + which), tl.load(base + mix, mix < (2 + M) * M, other=0.0)


@triton.jit
def finish_mixes(
    record, factor, offset, mixes, hidden, norm_eps, hc_eps, ITERATIONS: tl.constexpr, M: tl.constexpr,
    WIDTH: tl.constexpr, SLICES: tl.constexpr, SLICES_P2: tl.constexpr,
):  # fmt: skip
    """The mixes of one row, float32 ``[(2 + M) * M]`` at ``mixes``, from its record of partial sums.

    ``factor``, ``offset``: from :func:`load_parameters`.
    """
    mix = tl.arange(0, WIDTH)
    index = tl.arange(0, SLICES_P2)
    is_mix = mix < (2 + M) * M  # the padding behind is never written
    mask = (index < SLICES)[:, None] & is_mix[None, :]
    products = tl.load(record + index[:, None] * WIDTH + mix[None, :], mask, other=0.0)
    squares = tl.load(record + SLICES * (WIDTH + 1) + index, index < SLICES, other=0.0)
    tl.debug_barrier()  # a fence for the compiler: every load is on its way before any is waited for
    products = sum_exactly(products, 0)
    of_trunk = sum_exactly(squares, 0)
    inverse = tl.rsqrt(of_trunk / (M * hidden) + norm_eps)
    logits = factor * (inverse * products) + offset
    gate = tl.sigmoid(logits)
    result = tl.where(mix < M, gate + hc_eps, 2.0 * gate)
    c = ()
    for element in tl.static_range(M * M):
        c = c + (tl.sum(tl.where(mix == 2 * M + element, logits, 0.0), axis=0),)
    c = sinkhorn(c, hc_eps, ITERATIONS, M)
    for element in tl.static_range(M * M):
        result = tl.where(mix == 2 * M + element, c[element], result)
    tl.store(mixes + mix, result, is_mix)


@triton.jit
def store_rounded(x, offsets, scale_offsets, mask, group_mask, xq, codes, scales):
    """Q8 of bf16 ``x`` (last axis: 32 of a group): the rounded values, and/or codes and scales (bytes or float32)."""
    scaled, rounded, exponent = q8_groups(x.to(tl.float32))
    if xq is not None:
        values = rounded * tl.expand_dims(power_of_two(exponent), len(x.shape) - 1)
        tl.store(xq + offsets, values.to(tl.bfloat16), mask)
    if codes is not None:
        tl.store(codes + offsets, e4m3_code(rounded, scaled), mask)
        scale = power_of_two(exponent) if scales.dtype.element_ty == tl.float32 else exponent + 127
        tl.store(scales + scale_offsets, scale.to(scales.dtype.element_ty), group_mask)
