"""What every layer needs to know of a step's rows, made on the device in one launch: windows, slots, angles.

Meaning: ``RowExpander`` of the fused layers, which does the same in many small torch operations.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

POSITION = tl.constexpr(1)
SLOT = tl.constexpr(2)
FLOOR = tl.constexpr(3)
START = tl.constexpr(4)
END = tl.constexpr(5)
ENTRY_FLOOR = tl.constexpr(6)
SEQUENCE = tl.constexpr(7)
"""Rows of the host's table ``[8, rows]`` int32; row 0 holds the token ids."""

Angles = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class StreamTables:
    """One compress ratio; all ``[rows]`` int32, -1 where there is nothing."""

    num_visible: Tensor
    """Entries that a row sees; 0 for padding."""
    emit_slot: Tensor
    """Physical slot of the entry that a row completes."""
    entry_angles: Angles
    """``[rows, rope / 2]`` float32 at the first token of the group that the row is in."""
    partner: Tensor | None
    """Ratio 2: the first token of the completed pair: a row, or pair-ring slot ``-2 - v``."""
    pair_store_slot: Tensor | None
    """Ratio 2: pair-ring slot of this row."""


@dataclass(frozen=True, slots=True)
class StepTables:
    """Tables of one step."""

    ring_slot: Tensor
    """``[rows]`` int32 window-ring slot of the row's key, -1 if it goes nowhere."""
    window_index: Tensor
    """``[rows, window]`` int32, oldest first: row (>= 0), ring slot ``-2 - v``, or -1."""
    plain_angles: Angles
    """``[rows, rope / 2]`` float32 at the row's position, frequencies of ratio-0 layers."""
    compressed_angles: Angles
    streams: dict[int, StreamTables]


@triton.jit
def _sine_cosine(angle):
    """Sine and cosine of float64 ``angle`` in [0, 2**20], as float32: correct but for about one case in 2**27.

    pi / 2 in two parts of 33 and 53 bits, so that a small rest keeps its precision; then Taylor polynomials.
    """
    turns = tl.floor(angle * 0.6366197723675814 + 0.5)
    rest = (angle - turns * 1.57079632673412561417) - turns * 6.07710050650619224932e-11
    z = rest * rest
    sine = 1.0 / 355687428096000.0
    sine = sine * -z + 1.0 / 1307674368000.0
    sine = sine * -z + 1.0 / 6227020800.0
    sine = sine * -z + 1.0 / 39916800.0
    sine = sine * -z + 1.0 / 362880.0
    sine = sine * -z + 1.0 / 5040.0
    sine = sine * -z + 1.0 / 120.0
    sine = sine * -z + 1.0 / 6.0
    sine = rest - rest * z * sine
    cosine = 1.0 / 20922789888000.0
    cosine = cosine * -z + 1.0 / 87178291200.0
    cosine = cosine * -z + 1.0 / 479001600.0
    cosine = cosine * -z + 1.0 / 3628800.0
    cosine = cosine * -z + 1.0 / 40320.0
    cosine = cosine * -z + 1.0 / 720.0
    cosine = cosine * -z + 1.0 / 24.0
    cosine = cosine * -z + 0.5
    cosine = 1.0 - z * cosine
    quarter = turns.to(tl.int32) & 3
    swaps = (quarter & 1) == 1
    by_sine, by_cosine = tl.where(swaps, cosine, sine), tl.where(swaps, sine, cosine)
    by_sine = tl.where(quarter >= 2, -by_sine, by_sine)
    by_cosine = tl.where((quarter == 1) | (quarter == 2), -by_cosine, by_cosine)
    return by_sine.to(tl.float32), by_cosine.to(tl.float32)


@triton.jit(do_not_specialize=["num_rows", "table_stride", "num_blocks"])
def _step_tables_kernel(
    table, block_tables, plain, compressed, numbers, window_index, angles, num_rows, table_stride, num_blocks,
    KEYS_FIRST: tl.constexpr, FIRST_RATIO: tl.constexpr, SECOND_RATIO: tl.constexpr,
    WINDOW: tl.constexpr, WINDOW_P2: tl.constexpr, RING: tl.constexpr, PAIR_RING: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, HALF: tl.constexpr, HALF_P2: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    position = tl.load(table + POSITION * table_stride + row)
    slot = tl.load(table + SLOT * table_stride + row)
    floor = tl.load(table + FLOOR * table_stride + row)
    start = tl.load(table + START * table_stride + row)
    left = tl.load(table + END * table_stride + row) - position  # rows of the chunk from this one on
    is_stored = (position >= 0) & (position >= floor) & (left <= RING)
    tl.store(numbers + row, tl.where(is_stored, slot * RING + position % RING, -1))

    column = tl.arange(0, WINDOW_P2)
    back = WINDOW - 1 - column
    seen = position - back
    index = -2 - (slot * RING + seen % RING)
    if not KEYS_FIRST:
        index = tl.where(seen >= start, row - back, index)
    index = tl.where((position >= 0) & (seen >= tl.maximum(floor, 0)), index, -1)
    tl.store(window_index + row.to(tl.int64) * WINDOW + column, index, column < WINDOW)

    safe = tl.maximum(position, 0)
    _store_angles(angles, plain, safe, row, num_rows, HALF, HALF_P2)
    _store_angles(angles + 2 * num_rows * HALF, compressed, safe, row, num_rows, HALF, HALF_P2)
    if FIRST_RATIO:
        _stream(
            table, block_tables, numbers + num_rows, position, slot, floor, start, left, row, num_rows, table_stride,
            num_blocks, FIRST_RATIO, PAIR_RING, BLOCK_TOKENS // FIRST_RATIO,
        )  # fmt: skip
        if FIRST_RATIO > 1:
            first = safe // FIRST_RATIO * FIRST_RATIO
            _store_angles(angles + 4 * num_rows * HALF, compressed, first, row, num_rows, HALF, HALF_P2)
    if SECOND_RATIO:
        _stream(
            table, block_tables, numbers + 5 * num_rows, position, slot, floor, start, left, row, num_rows,
            table_stride, num_blocks, SECOND_RATIO, PAIR_RING, BLOCK_TOKENS // SECOND_RATIO,
        )  # fmt: skip
        if SECOND_RATIO > 1:
            first = safe // SECOND_RATIO * SECOND_RATIO
            _store_angles(angles + 6 * num_rows * HALF, compressed, first, row, num_rows, HALF, HALF_P2)


@triton.jit
def _stream(
    table, block_tables, numbers, position, slot, floor, start, left, row, num_rows, table_stride, num_blocks,
    RATIO: tl.constexpr, PAIR_RING: tl.constexpr, PER_BLOCK: tl.constexpr,
):  # fmt: skip
    """The four numbers of one row in the stream of one ratio."""
    entry = tl.maximum(position, 0) // RATIO
    is_late = position >= tl.load(table + ENTRY_FLOOR * table_stride + row)
    completes = (position >= 0) & ((position + 1) % RATIO == 0) & is_late
    sequence = tl.load(table + SEQUENCE * table_stride + row)
    block = tl.minimum(entry // PER_BLOCK, num_blocks - 1)
    physical = tl.load(block_tables + sequence * num_blocks + block, completes, other=0)
    tl.store(numbers + row, tl.where(position >= 0, (position + 1) // RATIO, 0))
    tl.store(numbers + num_rows + row, tl.where(completes, physical * PER_BLOCK + entry % PER_BLOCK, -1))
    if RATIO == 2:
        before = position - 1
        partner = tl.where(before >= start, row - 1, -2 - (slot * PAIR_RING + before % PAIR_RING))
        is_kept = (position >= 0) & (position >= floor) & (left <= PAIR_RING)
        tl.store(numbers + 2 * num_rows + row, tl.where(completes, partner, -1))
        tl.store(numbers + 3 * num_rows + row, tl.where(is_kept, slot * PAIR_RING + position % PAIR_RING, -1))


@triton.jit
def _store_angles(angles, frequencies, position, row, num_rows, HALF: tl.constexpr, HALF_P2: tl.constexpr):
    pair = tl.arange(0, HALF_P2)
    mask = pair < HALF
    sine, cosine = _sine_cosine(position.to(tl.float64) * tl.load(frequencies + pair, mask, other=0.0))
    tl.store(angles + row * HALF + pair, cosine, mask)
    tl.store(angles + (num_rows + row) * HALF + pair, sine, mask)


def step_tables(
    table: Tensor,
    block_tables: Tensor,
    plain_frequencies: Tensor,
    compressed_frequencies: Tensor,
    *,
    keys_first: bool,
    ratios: tuple[int, ...],
    window: int,
    ring_length: int,
    pair_ring_length: int,
    block_tokens: int,
) -> StepTables:
    """Expand the host's table of a step.

    Args:
        table: ``[8, rows]`` int32, see :data:`POSITION`; position -1 marks padding.
        block_tables: ``[sequences, blocks]`` int32, contiguous.
        plain_frequencies, compressed_frequencies: ``[rope / 2]`` float64 of ratio-0 and of other layers.
        keys_first: the rings are written before attention, so that windows are read from there alone.
        ratios: compress ratios in use, without 0; at most two.
        window, ring_length, pair_ring_length, block_tokens: of the caches' geometry.
    """
    rows, half = table.shape[1], plain_frequencies.shape[0]
    assert rows == 1 or table.stride(1) == 1
    assert len(ratios) <= 2
    first, second = (*ratios, 0, 0)[:2]
    assert block_tables.is_contiguous()
    assert plain_frequencies.dtype == compressed_frequencies.dtype == torch.float64
    numbers = table.new_empty(1 + 4 * len(ratios), rows)
    window_index = table.new_empty(rows, window)
    angles = plain_frequencies.new_empty(2 + len(ratios), 2, rows, half, dtype=torch.float32)
    _step_tables_kernel[(rows,)](
        table, block_tables, plain_frequencies, compressed_frequencies, numbers, window_index, angles,
        rows, table.stride(0), block_tables.shape[1],
        KEYS_FIRST=keys_first, FIRST_RATIO=first, SECOND_RATIO=second,
        WINDOW=window, WINDOW_P2=triton.next_power_of_2(window),
        RING=ring_length, PAIR_RING=pair_ring_length, BLOCK_TOKENS=block_tokens,
        HALF=half, HALF_P2=triton.next_power_of_2(half), num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    streams = {}
    for index, ratio in enumerate(ratios):
        own = numbers[1 + 4 * index : 5 + 4 * index]
        turned = angles[2 + index] if ratio > 1 else angles[1]
        has_pairs = ratio == 2
        streams[ratio] = StreamTables(
            own[0], own[1], (turned[0], turned[1]), own[2] if has_pairs else None, own[3] if has_pairs else None
        )
    return StepTables(numbers[0], window_index, (angles[0, 0], angles[0, 1]), (angles[1, 0], angles[1, 1]), streams)
