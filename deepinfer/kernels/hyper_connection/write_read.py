"""Hyper-connection kernels: the trunk between two sublayers (spec 4.2; meaning: ``ops.hyper_connection``).

Between sublayers two launches run: :func:`hc_write_read` writes the last sublayer's output into the streams, reads the
next input and takes partial sums; :func:`hc_finish` makes the normed input and the next mixes of them.

On Hopper both are CUDA C++ (:mod:`.launches_cuda`), else Triton. One launch was measured twice on an H200: programs
that met through global memory took 1 us longer than two launches; clusters of 16 CTAs, whose columns met through
distributed shared memory, took as long for 1 row (5.1 to 6.7 against 5.4 us) and longer for more (10.3 against 8.0 for
64, 27 against 18 for 256).

Batch invariance: a row's bits never depend on other rows or their number.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.hyper_connection import launches_cuda as cuda
from deepinfer.kernels.hyper_connection import stages
from deepinfer.kernels.hyper_connection.launches_cuda import Shape
from deepinfer.kernels.hyper_connection.parts import (
    DEFAULT_TILE,
    TILE_ROWS,
    Mixes,
    PartialSums,
    Tile,
    Update,
    mix_pointers,
    mix_width,
    new_partial_sums,
    update_arguments,
)


class WriteRead(NamedTuple):
    """Results of :func:`hc_write_read`; None where not asked for."""

    trunk: Tensor
    """``[rows, M, hidden]`` bf16"""
    h: Tensor | None
    """``[rows, hidden]`` bf16, the collapsed streams, not normed."""
    partial: PartialSums | None
    feature: Tensor | None
    """``[rows, hidden]`` bf16, mean of the streams."""


@triton.jit(do_not_specialize=["num_rows"])
def _write_read_kernel(
    trunk, update, shared, experts, write_mix, stream_mix, read_mix, fn, new_trunk, h, partial, feature,
    num_rows, hidden, mix_stride, read_stride, record_stride,
    M: tl.constexpr, KIND: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr, SLICES: tl.constexpr,
    S: tl.constexpr, ROW_TILES: tl.constexpr, LOADS_FIRST: tl.constexpr,
):  # fmt: skip
    slice_id = tl.program_id(0)
    columns = slice_id * S + tl.arange(0, S)
    if h is not None:
        fn_tiles = stages.load_fn(fn, columns, hidden, M, WIDTH)
        if ROW_TILES > 1:
            fn_parts = stages.split_fn(fn_tiles, M)
    for tile in tl.range(ROW_TILES):
        row = (tl.program_id(1) * ROW_TILES + tile) * 16 + tl.arange(0, 16)
        mask = (row < num_rows)[:, None] & (columns < hidden)[None, :]
        if h is not None:
            reads = stages.load_mix(read_mix, row, num_rows, read_stride, M)
        streams = stages.load_streams(trunk, row, columns, mask, hidden, M)
        if KIND != 0:
            writes = stages.load_mix(write_mix, row, num_rows, mix_stride, M)
            mixes = stages.load_mix(stream_mix, row, num_rows, mix_stride, M * M)
            parts, chosen = stages.load_update(
                update, shared, experts, row, columns, mask, num_rows, hidden, KIND, K
            )  # fmt: skip
        if LOADS_FIRST:
            tl.debug_barrier()  # a fence for the compiler: every load is on its way before any is waited for
        if h is not None and ROW_TILES == 1:
            fn_parts = stages.split_fn(fn_tiles, M)
        if KIND == 0:
            streams = stages.all_in_place(streams, M)
        else:
            output = stages.sum_update(parts, chosen, KIND)
            streams = stages.write_streams(streams, output, writes, mixes, M)
            stages.store_streams(new_trunk, streams, row, columns, mask, hidden, M)
        offsets = row.to(tl.int64)[:, None] * hidden + columns[None, :]
        if feature is not None:
            tl.store(feature + offsets, stages.mean_of_streams(streams, M), mask)
        if h is not None:
            read = stages.read_streams(streams, reads, M)
            tl.store(h + offsets, read, mask)
            of_trunk = stages.squares(streams[0])
            for stream in tl.static_range(1, M):
                of_trunk += stages.squares(streams[stream])
            products = stages.mix_products(streams, fn_parts, M, WIDTH)
            stages.store_partial(
                partial, row, num_rows, products, stages.squares(read), of_trunk, slice_id, record_stride,
                SLICES, M, WIDTH,
            )  # fmt: skip


def hc_write_read(
    trunk: Tensor,
    read_mix: Tensor | None,
    fn: Tensor | None,
    update: Update | None = None,
    mixes: Mixes | None = None,
    *,
    wants_feature: bool = False,
    out: Tensor | None = None,
    tile: Tile | None = None,
    shape: Shape | None = None,
    overlap: bool = True,
) -> WriteRead:
    """Write a sublayer's output into the streams, then read the next sublayer's input from them.

    Args:
        trunk: ``[rows, M, hidden]`` bf16, contiguous.
        read_mix: ``[rows, M]`` float32 (rows may be strided), for the read; None: write only.
        fn: ``[(2 + M) * M, M * hidden]`` float32 of the sublayer that reads; None with ``read_mix``.
        update: output of the sublayer that writes; None: the trunk is read as it is and returned.
        mixes: of the sublayer that writes (its ``write`` and ``stream`` are used); None with ``update``.
        wants_feature: also return the mean of the new streams.
        out: for the new trunk; may be ``trunk`` itself.
        tile: for the Triton kernel, which it chooses; part of the numerical meaning.
        shape: for the CUDA kernel; no influence on the result.
        overlap: the CUDA kernel may load ``fn`` before the preceding kernel has ended.
    Returns:
        the new trunk and what was asked for. Products and sums are taken from the new trunk's rounded values in
        float32.
    """
    rows, streams, hidden = trunk.shape
    assert trunk.is_contiguous()
    assert (update is None) == (mixes is None)
    assert (read_mix is None) == (fn is None)
    of_update = update_arguments(update)
    kind, parts, *pointers = of_update
    new_trunk = trunk if update is None else (torch.empty_like(trunk) if out is None else out)
    feature = trunk.new_empty(rows, hidden) if wants_feature else None
    if read_mix is None or fn is None:
        h, partial = None, None
    else:
        assert read_mix.stride(1) == 1
        h = trunk.new_empty(rows, hidden)
        all_mixes = (read_mix, mixes.write, mixes.stream) if mixes else (read_mix,)
        if tile is None and cuda.accepts(streams, hidden, trunk.device) and all(map(cuda.accepts_mix, all_mixes)):
            shape = shape or cuda.choose_shape(rows, hidden, kind, parts)
            partial = new_partial_sums(trunk, shape.grid(rows, hidden)[0])
            cuda.write_read(
                trunk, read_mix, fn, of_update, mixes, new_trunk, h, partial.records, feature, shape,
                overlap,
            )  # fmt: skip
            return WriteRead(new_trunk, h, partial, feature)
    tile = tile or DEFAULT_TILE
    num_slices = tile.num_slices(hidden)
    if h is not None:
        partial = new_partial_sums(trunk, num_slices)
    row_tiles = tile.row_tiles_for(rows, hidden)
    _write_read_kernel[(num_slices, triton.cdiv(rows, TILE_ROWS * row_tiles))](
        trunk, *pointers, *mix_pointers(mixes), read_mix, fn, new_trunk, h,
        None if partial is None else partial.records, feature,
        rows, hidden, mixes.write.stride(0) if mixes else 0, 0 if read_mix is None else read_mix.stride(0),
        0 if partial is None else partial.records.stride(0),
        M=streams, KIND=kind, K=parts, WIDTH=mix_width(streams), SLICES=num_slices,
        S=tile.columns, ROW_TILES=row_tiles, LOADS_FIRST=tile.num_stages == 1, num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )  # fmt: skip
    return WriteRead(new_trunk, h, partial, feature)
