"""Exact selection by radix on 16-bit order keys: top entries and candidate blocks (spec 4.7).

A histogram of the high byte finds the byte of the last selected key, a second one its low byte; a third pass writes
what is selected in ascending order, ties to the lowest index. All counts are integers: any split gives the same result.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.indexer.keys import entry_of, num_scored, slot_of

SHORT_ENTRIES = 16384
"""Rows up to this length are selected by one program."""
_MAX_SPLITS = 64


@triton.jit
def _load_keys(keys_ptr, index, inside, num_keys, num_entries, GROUP: tl.constexpr):
    """Keys as int32 in [0, 65535]. ``GROUP`` > 1: of blocks of entries, the last one above all others."""
    if GROUP == 1:
        return tl.load(keys_ptr + index, inside, other=-32768).to(tl.int32) + 32768
    entry = index[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    keys = tl.load(keys_ptr + entry, inside[:, None] & (entry < num_entries), other=-32768).to(tl.int32) + 32768
    best = tl.minimum(tl.max(keys, axis=1), 0xFF7F)  # at most the largest finite bf16
    return tl.where(index == num_keys - 1, 0xFF80, best)


@triton.jit
def _threshold(histogram, count):
    """Bin that holds the ``count``-th largest element, and how many lie in bins above it. ``[256]`` int32."""
    from_here = tl.sum(histogram) - tl.cumsum(histogram, 0) + histogram
    bin_of = tl.sum((from_here >= count).to(tl.int32)) - 1
    above = tl.sum(tl.where(tl.arange(0, 256) > bin_of, histogram, 0))
    return bin_of, above


@triton.jit
def _high_bytes(keys_ptr, begin, end, num_keys, num_entries, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    histogram = tl.zeros([256], tl.int32)
    for start in range(begin, end, BLOCK):
        index = start + tl.arange(0, BLOCK)
        inside = index < end
        keys = _load_keys(keys_ptr, index, inside, num_keys, num_entries, GROUP)
        histogram += tl.histogram(keys >> 8, 256, mask=inside)
    return histogram


@triton.jit
def _low_bytes(keys_ptr, begin, end, num_keys, num_entries, high, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    histogram = tl.zeros([256], tl.int32)
    for start in range(begin, end, BLOCK):
        index = start + tl.arange(0, BLOCK)
        inside = index < end
        keys = _load_keys(keys_ptr, index, inside, num_keys, num_entries, GROUP)
        histogram += tl.histogram(keys & 255, 256, mask=inside & (keys >> 8 == high))
    return histogram


@triton.jit
def _write(
    index,
    place,
    is_taken,
    row,
    table_ptr,
    blocks_ptr,
    slots_ptr,
    entries_ptr,
    COUNT: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    HAS_ENTRIES: tl.constexpr,
):
    """Write selected indices to their places; where ``index`` is negative, -1."""
    is_real = is_taken & (index >= 0)
    entry = entry_of(index, is_real, blocks_ptr, BLOCK_SIZE, NUM_BLOCKS)
    if HAS_SLOTS:
        slots = slot_of(entry, is_real, table_ptr, PER_BLOCK).to(tl.int32)
        tl.store(slots_ptr + row * COUNT + place, tl.where(is_real, slots, -1), is_taken)
    if HAS_ENTRIES:
        tl.store(entries_ptr + row * COUNT + place, tl.where(is_real, entry, -1), is_taken)


@triton.jit
def _select_kernel(
    keys_ptr,
    keys_stride,
    visible_ptr,
    sequence_ptr,
    table_ptr,
    table_stride,
    blocks_ptr,
    slots_ptr,
    entries_ptr,
    high_ptr,
    low_ptr,
    COUNT: tl.constexpr,
    GROUP: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    HAS_ENTRIES: tl.constexpr,
    SHORT: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    FILL: tl.constexpr,
):
    """Select of one row; with ``SPLITS`` > 1 rows longer than ``SHORT`` are shared, after the two counting kernels."""
    split, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    num_entries = num_scored(tl.load(visible_ptr + row), BLOCK_SIZE, NUM_BLOCKS)
    num_keys = (num_entries + GROUP - 1) // GROUP
    is_shared = (SPLITS > 1) & (num_keys > SHORT)
    if (split > 0) & (not is_shared):
        return
    row_table_ptr = table_ptr
    if HAS_SLOTS:
        row_table_ptr += tl.load(sequence_ptr + row).to(tl.int64) * table_stride
    row_blocks_ptr = blocks_ptr + row * NUM_BLOCKS
    if num_keys <= COUNT:
        for start in range(0, COUNT, FILL):
            place = start + tl.arange(0, FILL)
            index = tl.where(place < num_keys, place, -1)
            _write(
                index, place, place < COUNT, row, row_table_ptr, row_blocks_ptr, slots_ptr, entries_ptr, COUNT,
                PER_BLOCK, BLOCK_SIZE, NUM_BLOCKS, HAS_SLOTS, HAS_ENTRIES,
            )  # fmt: skip
        return
    row_keys_ptr = keys_ptr + row * keys_stride
    begin, end = 0, num_keys
    larger, equal = 0, 0  # among the keys before ``begin``
    if is_shared:
        begin, end = _share(split, num_keys, SPLITS, BLOCK)
        split_index = tl.arange(0, SPLITS)[:, None]
        bins = tl.arange(0, 256)[None, :]
        cells = (row * SPLITS + split_index) * 256 + bins
        highs = tl.load(high_ptr + cells)  # [SPLITS, 256]
        lows = tl.load(low_ptr + cells)
        high, above = _threshold(tl.sum(highs, axis=0), COUNT)
        low, above_low = _threshold(tl.sum(lows, axis=0), COUNT - above)
        is_before = split_index < split
        larger += tl.sum(tl.where(is_before & (bins > high), highs, 0))
        larger += tl.sum(tl.where(is_before & (bins > low), lows, 0))
        equal += tl.sum(tl.where(is_before & (bins == low), lows, 0))
    else:
        high, above = _threshold(_high_bytes(row_keys_ptr, 0, num_keys, num_keys, num_entries, GROUP, BLOCK), COUNT)
        low, above_low = _threshold(
            _low_bytes(row_keys_ptr, 0, num_keys, num_keys, num_entries, high, GROUP, BLOCK), COUNT - above
        )
    last = high * 256 + low
    num_equal = COUNT - above - above_low  # how many of the keys equal to the last one are taken
    for start in range(begin, end, BLOCK):
        index = start + tl.arange(0, BLOCK)
        inside = index < end
        keys = _load_keys(row_keys_ptr, index, inside, num_keys, num_entries, GROUP)
        is_larger, is_equal = inside & (keys > last), inside & (keys == last)
        packed = is_larger.to(tl.int32) + (is_equal.to(tl.int32) << 16)
        before = tl.cumsum(packed, 0) - packed
        equal_before = equal + (before >> 16)
        place = larger + (before & 0xFFFF) + tl.minimum(equal_before, num_equal)
        is_taken = is_larger | (is_equal & (equal_before < num_equal))
        _write(
            index, place, is_taken, row, row_table_ptr, row_blocks_ptr, slots_ptr, entries_ptr, COUNT, PER_BLOCK,
            BLOCK_SIZE, NUM_BLOCKS, HAS_SLOTS, HAS_ENTRIES,
        )  # fmt: skip
        larger += tl.sum(is_larger.to(tl.int32))
        equal += tl.sum(is_equal.to(tl.int32))


@triton.jit
def _share(split, num_keys, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """Whole blocks of keys ``[begin, end)`` of one split."""
    share = tl.cdiv(tl.cdiv(num_keys, BLOCK), SPLITS) * BLOCK
    begin = tl.minimum(split * share, num_keys)
    return begin, tl.minimum(begin + share, num_keys)


@triton.jit
def _count_kernel(
    keys_ptr,
    keys_stride,
    visible_ptr,
    high_ptr,
    low_ptr,
    COUNT: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    SHORT: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_LOW: tl.constexpr,
):
    """Histograms ``[rows, SPLITS, 256]`` of the high bytes, then of the low bytes below the high byte that matters."""
    split, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    num_entries = num_scored(tl.load(visible_ptr + row), BLOCK_SIZE, NUM_BLOCKS)
    num_keys = (num_entries + GROUP - 1) // GROUP
    if num_keys <= tl.maximum(SHORT, COUNT):
        return
    begin, end = _share(split, num_keys, SPLITS, BLOCK)
    row_keys_ptr = keys_ptr + row * keys_stride
    bins = tl.arange(0, 256)
    own = (row * SPLITS + split) * 256 + bins
    if IS_LOW:
        cells = (row * SPLITS + tl.arange(0, SPLITS)[:, None]) * 256 + bins[None, :]
        high, _above = _threshold(tl.sum(tl.load(high_ptr + cells), axis=0), COUNT)
        histogram = _low_bytes(row_keys_ptr, begin, end, num_keys, num_entries, high, GROUP, BLOCK)
        tl.store(low_ptr + own, histogram)
    else:
        tl.store(high_ptr + own, _high_bytes(row_keys_ptr, begin, end, num_keys, num_entries, GROUP, BLOCK))


def _select(
    order_keys: Tensor,
    num_visible: Tensor,
    count: int,
    slots: Tensor | None,
    entries: Tensor | None,
    group: int,
    row_sequence: Tensor | None,
    block_table: Tensor | None,
    entries_per_block: int,
    candidate_blocks: Tensor | None,
    block_size: int,
    short: int,
    block: int,
    num_programs: int,
    num_warps: int,
) -> None:
    rows, capacity = order_keys.shape
    if rows == 0:
        return
    assert order_keys.stride(1) == 1
    assert candidate_blocks is None or candidate_blocks.is_contiguous()
    num_blocks = 0 if candidate_blocks is None else candidate_blocks.shape[1]
    max_keys = triton.cdiv(capacity, group)
    splits = 1
    if max_keys > short:
        splits = min(_MAX_SPLITS, triton.next_power_of_2(triton.cdiv(num_programs, rows)))
    histograms = num_visible if splits == 1 else num_visible.new_empty((2, rows, splits, 256))
    high, low = (histograms, histograms) if splits == 1 else (histograms[0], histograms[1])
    shared = {
        "COUNT": count,
        "GROUP": group,
        "BLOCK_SIZE": block_size,
        "NUM_BLOCKS": num_blocks,
        "SHORT": short,
        "SPLITS": splits,
        "BLOCK": block,
    }
    if splits > 1:
        for is_low in (False, True):
            _count_kernel[(splits, rows)](
                order_keys,
                order_keys.stride(0),
                num_visible,
                high,
                low,
                **shared,
                IS_LOW=is_low,
                num_warps=num_warps,
                num_stages=1,
            )
    unused = num_visible
    _select_kernel[(splits, rows)](
        order_keys,
        order_keys.stride(0),
        num_visible,
        unused if row_sequence is None else row_sequence,
        unused if block_table is None else block_table,
        0 if block_table is None else block_table.stride(0),
        unused if candidate_blocks is None else candidate_blocks,
        unused if slots is None else slots,
        unused if entries is None else entries,
        high,
        low,
        **shared,
        PER_BLOCK=entries_per_block,
        HAS_SLOTS=slots is not None,
        HAS_ENTRIES=entries is not None,
        FILL=min(1024, triton.next_power_of_2(count)),
        num_warps=num_warps,
        num_stages=1,
    )


def select_entries(
    order_keys: Tensor,
    num_visible: Tensor,
    row_sequence: Tensor,
    block_table: Tensor,
    entries_per_block: int,
    slots: Tensor,
    entries: Tensor | None = None,
    candidate_blocks: Tensor | None = None,
    block_size: int = 1,
    short: int = SHORT_ENTRIES,
    block: int = 2048,
    num_programs: int = 512,
    num_warps: int = 8,
) -> Tensor:
    """The entries with the largest keys of each row, as physical slots.

    Args:
        order_keys: ``[rows, capacity]`` int16 as scored. Rows with no more entries than ``slots`` is wide have none and
            select everything.
        num_visible, row_sequence: ``[rows]`` int32. block_table: ``[sequences, blocks]`` int32.
        slots: ``[rows, count]`` int32, written: physical slots in ascending order of the logical entry, then -1.
        entries: ``[rows, count]`` int32, written: the logical entries.
        candidate_blocks, block_size: as they were given to the scores.
        short: longer rows are shared by several programs (two launches more if the capacity allows such rows).
    Returns:
        ``slots``.
    """
    assert slots.is_contiguous()
    assert entries is None or (entries.is_contiguous() and entries.shape == slots.shape)
    _select(
        order_keys,
        num_visible,
        slots.shape[1],
        slots,
        entries,
        1,
        row_sequence,
        block_table,
        entries_per_block,
        candidate_blocks,
        block_size,
        short,
        block,
        num_programs,
        num_warps,
    )
    return slots


def select_blocks(
    order_keys: Tensor,
    num_visible: Tensor,
    block_size: int,
    blocks: Tensor,
    short: int = SHORT_ENTRIES,
    block: int = 1024,
    num_programs: int = 512,
    num_warps: int = 8,
) -> Tensor:
    """Candidate blocks of each row: the best by their largest visible key, the last visible one always kept.

    Where all visible blocks fit, all are kept, which restricts nothing.

    Args:
        order_keys: ``[rows, capacity]`` int16 of all visible entries. num_visible: ``[rows]`` int32.
        block_size: entries per block, a power of two.
        blocks: ``[rows, count]`` int32, written: ascending, padded with -1.
    Returns:
        ``blocks``.
    """
    assert blocks.is_contiguous()
    _select(
        order_keys,
        num_visible,
        blocks.shape[1],
        None,
        blocks,
        block_size,
        None,
        None,
        1,
        None,
        1,
        short,
        block,
        num_programs,
        num_warps,
    )
    return blocks
