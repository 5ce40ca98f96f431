"""Both halves of the hyper-connection in one launch, for few rows: programs wait for one another in the middle.

Every program makes its slice of hidden, waits until all slices of its 16 rows are there, and norms what it still holds
in registers. All programs of a launch must be resident at once; the launcher asks the driver for that, and larger
batches take the two launches of :mod:`deepinfer.kernels.hyper_connection`. The results have the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels import hyper_connection_stages as stages
from deepinfer.kernels.hyper_connection import WriteRead, hc_write_read
from deepinfer.kernels.hyper_connection_finish import Finished, hc_finish
from deepinfer.kernels.hyper_connection_parts import (
    DEFAULT_TILE,
    TILE_ROWS,
    Mixes,
    Tile,
    Update,
    mix_pointers,
    mix_width,
    new_mixes,
    record_stride,
    update_arguments,
)

RESIDENT_PER_MULTIPROCESSOR = 2
"""Programs of 4 warps that fit at any number of registers."""


@triton.jit
def wait_for_all(counters, COUNT: tl.constexpr):
    """Return when COUNT programs have called this with the same ``counters``: two int32 zeros, left as zeros.

    The last program to leave resets both: then none is still waiting, and the next launch comes behind this one.
    """
    tl.debug_barrier()  # the stores of all threads come before the arrival
    arrived = tl.atomic_add(counters, 1, sem="acq_rel") + 1
    while arrived < COUNT:
        arrived = tl.atomic_add(counters, 0, sem="acquire")
    if tl.atomic_add(counters + 1, 1, sem="acq_rel") == COUNT - 1:
        tl.atomic_xchg(counters + 1, 0)
        tl.atomic_xchg(counters, 0)
    tl.debug_barrier()


@triton.jit(do_not_specialize=["num_rows"])
def _enter_kernel(
    trunk, update, shared, experts, write_mix, stream_mix, read_mix, fn, new_trunk, partial, feature,
    norm_weight, scale, base, x, xq, codes, scales, mixes, counters,
    num_rows, hidden, mix_stride, read_stride, record_stride, norm_eps, hc_eps,
    ITERATIONS: tl.constexpr, M: tl.constexpr, KIND: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr,
    SLICES: tl.constexpr, SLICES_P2: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    slice_id = tl.program_id(0)
    columns = slice_id * S + tl.arange(0, S)
    row = tl.program_id(1) * 16 + tl.arange(0, 16)
    live = row < num_rows
    mask = live[:, None] & (columns < hidden)[None, :]
    fn_tiles = stages.load_fn(fn, columns, hidden, M, WIDTH)
    reads = stages.load_mix(read_mix, row, num_rows, read_stride, M)
    weight = tl.load(norm_weight + columns, columns < hidden, other=0.0).to(tl.float32)
    factor, offset = stages.load_parameters(scale, base, M, WIDTH)
    streams = stages.load_streams(trunk, row, columns, mask, hidden, M)
    if KIND != 0:
        writes = stages.load_mix(write_mix, row, num_rows, mix_stride, M)
        weights = stages.load_mix(stream_mix, row, num_rows, mix_stride, M * M)
        parts, chosen = stages.load_update(update, shared, experts, row, columns, mask, num_rows, hidden, KIND, K)
    tl.debug_barrier()  # a fence for the compiler: every load is on its way before any is waited for
    fn_parts = stages.split_fn(fn_tiles, M)
    if KIND == 0:
        streams = stages.all_in_place(streams, M)
    else:
        output = stages.sum_update(parts, chosen, KIND)
        streams = stages.write_streams(streams, output, writes, weights, M)
        stages.store_streams(new_trunk, streams, row, columns, mask, hidden, M)
    offsets = row.to(tl.int64)[:, None] * hidden + columns[None, :]
    if feature is not None:
        tl.store(feature + offsets, stages.mean_of_streams(streams, M), mask)
    read = stages.read_streams(streams, reads, M)
    of_trunk = stages.squares(streams[0])
    for stream in tl.static_range(1, M):
        of_trunk += stages.squares(streams[stream])
    products = stages.mix_products(streams, fn_parts, M, WIDTH)
    stages.store_partial(
        partial, row, num_rows, products, stages.squares(read), of_trunk, slice_id, record_stride, SLICES, M, WIDTH
    )

    wait_for_all(counters + 2 * tl.program_id(1), SLICES)

    index = tl.arange(0, SLICES_P2)
    pointer = partial + row.to(tl.int64)[:, None] * record_stride + SLICES * WIDTH + index[None, :]
    squares = tl.load(pointer, live[:, None] & (index < SLICES)[None, :], other=0.0)
    inverse = tl.rsqrt(stages.sum_exactly(squares, 1) / hidden + norm_eps)
    normed = (read.to(tl.float32) * inverse[:, None] * weight[None, :]).to(tl.bfloat16)
    tl.store(x + offsets, normed, mask)
    if xq is not None or codes is not None:
        group = slice_id * (S // 32) + tl.arange(0, S // 32)
        group_mask = live[:, None] & (group * 32 < hidden)[None, :]
        scale_offsets = row.to(tl.int64)[:, None] * (hidden // 32) + group[None, :]
        offsets = scale_offsets[:, :, None] * 32 + tl.arange(0, 32)[None, None, :]
        grouped = tl.reshape(normed, [16, S // 32, 32])
        whole = tl.broadcast_to(group_mask[:, :, None], [16, S // 32, 32])
        stages.store_rounded(grouped, offsets, scale_offsets, whole, group_mask, xq, codes, scales)
    # One row's mixes per program, on the first of them.
    for own in tl.range(slice_id, 16, SLICES):
        its_row = tl.program_id(1) * 16 + own
        if its_row < num_rows:
            stages.finish_mixes(
                partial + its_row.to(tl.int64) * record_stride, factor, offset, mixes + its_row * (2 + M) * M,
                hidden, norm_eps, hc_eps, ITERATIONS, M, WIDTH, SLICES, SLICES_P2,
            )  # fmt: skip


def new_counters(device: torch.device) -> Tensor:
    """The zeros that :func:`hc_enter` needs, for one stream of launches."""
    return torch.zeros(2 * 64, dtype=torch.int32, device=device)


def fits_one_launch(rows: int, hidden: int, tile: Tile, device: torch.device) -> bool:
    """Whether all programs are resident at once on ``device``."""
    if device.type != "cuda":
        return tile.num_slices(hidden) == 1  # the interpreter runs one program after the other
    resident = RESIDENT_PER_MULTIPROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count
    return triton.cdiv(rows, TILE_ROWS) * tile.num_slices(hidden) <= resident and tile.num_warps == 4


def hc_enter(
    trunk: Tensor,
    read_mix: Tensor,
    fn: Tensor,
    norm_weight: Tensor,
    scale: Tensor,
    base: Tensor,
    norm_eps: float,
    hc_eps: float,
    iterations: int,
    update: Update | None = None,
    mixes: Mixes | None = None,
    *,
    counters: Tensor | None = None,
    wants_feature: bool = False,
    wants_xq: bool = True,
    wants_codes: bool = False,
    scale_dtype: torch.dtype = torch.uint8,
    out: Tensor | None = None,
    tile: Tile = DEFAULT_TILE,
) -> tuple[WriteRead, Finished]:
    """``hc_write_read`` and ``hc_finish``, in one launch where there are few rows; arguments as there.

    Args:
        counters: from :func:`new_counters`; launches that share them must follow one another. None: two launches.
    Returns:
        as the two functions; ``h`` and ``partial`` of the first are None where one launch made both.
    """
    rows, streams, hidden = trunk.shape
    if counters is None or not fits_one_launch(rows, hidden, tile, trunk.device):
        read = hc_write_read(trunk, read_mix, fn, update, mixes, wants_feature=wants_feature, out=out, tile=tile)
        assert read.partial is not None
        assert read.h is not None
        finished = hc_finish(
            read.partial, read.h, norm_weight, scale, base, norm_eps, hc_eps, iterations,
            wants_xq=wants_xq, wants_codes=wants_codes, scale_dtype=scale_dtype,
        )  # fmt: skip
        return read, finished
    assert trunk.is_contiguous()
    assert (update is None) == (mixes is None)
    assert read_mix.stride(1) == 1
    assert 2 * triton.cdiv(rows, TILE_ROWS) <= counters.shape[0]
    kind, parts, *pointers = update_arguments(update)
    new_trunk = trunk if update is None else (torch.empty_like(trunk) if out is None else out)
    num_slices = tile.num_slices(hidden)
    stride = record_stride(num_slices, streams)
    partial = trunk.new_empty(rows, stride, dtype=torch.float32)
    feature = trunk.new_empty(rows, hidden) if wants_feature else None
    x = trunk.new_empty(rows, hidden)
    xq = torch.empty_like(x) if wants_xq else None
    codes = torch.empty_like(x, dtype=torch.uint8) if wants_codes else None
    scales = x.new_empty(rows, hidden // 32, dtype=scale_dtype) if wants_codes else None
    packed, new = new_mixes(trunk, rows, streams)
    together = {"launch_cooperative_grid": True} if trunk.is_cuda else {}
    _enter_kernel[(num_slices, triton.cdiv(rows, TILE_ROWS))](
        trunk, *pointers, *mix_pointers(mixes), read_mix, fn, new_trunk, partial, feature,
        norm_weight, scale, base, x, xq, codes, scales, packed, counters,
        rows, hidden, mixes.write.stride(0) if mixes else 0, read_mix.stride(0), stride, norm_eps, hc_eps,
        ITERATIONS=iterations, M=streams, KIND=kind, K=parts, WIDTH=mix_width(streams), SLICES=num_slices,
        SLICES_P2=triton.next_power_of_2(num_slices), S=tile.columns, num_warps=tile.num_warps, **together,
    )  # fmt: skip
    return WriteRead(new_trunk, None, None, feature), Finished(x, xq, codes, scales, new)
