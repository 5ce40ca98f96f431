"""Index scores of compressed entries, as 16-bit order keys (spec 4.7).

``score = sum_h g_h * relu(q_h . k)`` on the tensor cores: queries and keys are FP4 values, exact in bf16, summed in
float32, and the score is rounded to bf16. What is stored is the int16 that orders like that bf16 number (-0 as +0).

A score is computed by one tile from its own query, weights and key alone: it doesn't depend on the rest of the batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.formats.float32 import round_bf16
from deepinfer.kernels.indexer.keys import entry_of, key_values, load_key_words, num_scored, slot_of

HIDDEN = -32768
"""Below the order key of every number."""


@triton.jit
def _order_keys(scores):
    """int16 that orders like the bf16 rounding of ``scores`` (float32, no NaN)."""
    bits = (round_bf16(scores) + 0.0).to(tl.int32, bitcast=True) >> 16  # adding zero turns -0 into +0
    return (bits ^ ((bits >> 31) & 0x7FFF)).to(tl.int16)


@triton.jit
def _load_queries(query_ptr, row, num_rows, heads, HEADS: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr):
    """``[channels, TILE * HEADS]`` of rows ``row`` to ``row + TILE``; zero outside."""
    column = tl.arange(0, TILE * HEADS)[None, :]
    head, member = column % HEADS, row + column // HEADS
    channel = tl.arange(0, triton.next_power_of_2(WIDTH))[:, None]
    inside = (head < heads) & (member < num_rows) & (channel < WIDTH)
    return tl.load(query_ptr + (member.to(tl.int64) * heads + head) * WIDTH + channel, inside, other=0.0)


@triton.jit
def _load_weights(weights_ptr, weights_stride, row, num_rows, heads, HEADS: tl.constexpr, TILE: tl.constexpr):
    """``[TILE * HEADS]`` float32, zero outside."""
    column = tl.arange(0, TILE * HEADS)
    head, member = column % HEADS, row + column // HEADS
    inside = (head < heads) & (member < num_rows)
    return tl.load(weights_ptr + member.to(tl.int64) * weights_stride + head, inside, other=0.0).to(tl.float32)


@triton.jit
def _score_rows_kernel(
    query_ptr,
    weights_ptr,
    weights_stride,
    keys_ptr,
    table_ptr,
    table_stride,
    sequence_ptr,
    visible_ptr,
    blocks_ptr,
    out_ptr,
    out_stride,
    num_rows,
    heads,
    min_scored,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    WORDS: tl.constexpr,
    NIBBLES: tl.constexpr,
    ENTRIES: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
):
    """Row by row: each program takes an equal, contiguous share of the tiles of all rows."""
    rows = tl.arange(0, ROWS)
    visible = tl.load(visible_ptr + rows, rows < num_rows, other=0)
    scored = num_scored(visible, BLOCK_SIZE, NUM_BLOCKS)
    tiles = tl.where(scored > min_scored, (scored + ENTRIES - 1) // ENTRIES, 0)
    ends = tl.cumsum(tiles, 0)
    total = tl.sum(tiles)
    share = tl.cdiv(total, tl.num_programs(0))
    position = tl.program_id(0) * share
    stop = tl.minimum(position + share, total)
    while position < stop:
        row = tl.sum((ends <= position).to(tl.int32))
        row_end = tl.sum(tl.where(rows == row, ends, 0))
        row_tiles = tl.sum(tl.where(rows == row, tiles, 0))
        row_scored = tl.sum(tl.where(rows == row, scored, 0))
        begin = position - (row_end - row_tiles)
        end = tl.minimum(stop, row_end) - (row_end - row_tiles)
        row_table_ptr = table_ptr + tl.load(sequence_ptr + row).to(tl.int64) * table_stride
        row_blocks_ptr = blocks_ptr + row.to(tl.int64) * NUM_BLOCKS
        queries = _load_queries(query_ptr, row, num_rows, heads, HEADS, 1, WIDTH)
        weights = _load_weights(weights_ptr, weights_stride, row, num_rows, heads, HEADS, 1)
        codes, scales = _load_tile(
            keys_ptr, row_table_ptr, row_blocks_ptr, begin, end, row_scored, WIDTH, WORDS, NIBBLES, ENTRIES, PER_BLOCK,
            BLOCK_SIZE, NUM_BLOCKS,
        )  # fmt: skip
        for tile in range(begin, end):
            next_codes, next_scales = _load_tile(
                keys_ptr, row_table_ptr, row_blocks_ptr, tile + 1, end, row_scored, WIDTH, WORDS, NIBBLES, ENTRIES,
                PER_BLOCK, BLOCK_SIZE, NUM_BLOCKS,
            )  # fmt: skip
            values = key_values(codes, scales, ENTRIES, WORDS, NIBBLES)
            products = tl.dot(values, queries)  # [ENTRIES, HEADS]
            scores = tl.sum(tl.maximum(products, 0.0) * weights[None, :], axis=1)
            index = tile * ENTRIES + tl.arange(0, ENTRIES)
            tl.store(out_ptr + row.to(tl.int64) * out_stride + index, _order_keys(scores), index < row_scored)
            codes, scales = next_codes, next_scales
        position += end - begin


@triton.jit
def _load_tile(
    keys_ptr,
    table_ptr,
    blocks_ptr,
    tile,
    end_tile,
    num_entries,
    WIDTH: tl.constexpr,
    WORDS: tl.constexpr,
    NIBBLES: tl.constexpr,
    ENTRIES: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
):
    """Codes and scales of the keys of one tile of one row; nothing is read from ``end_tile`` on."""
    index = tile * ENTRIES + tl.arange(0, ENTRIES)
    inside = (index < num_entries) & (tile < end_tile)
    entry = entry_of(index, inside, blocks_ptr, BLOCK_SIZE, NUM_BLOCKS)
    slots = slot_of(entry, inside, table_ptr, PER_BLOCK)
    return load_key_words(keys_ptr, slots, inside, WIDTH, WORDS, NIBBLES)


@triton.jit
def _score_chunks_kernel(
    query_ptr,
    weights_ptr,
    weights_stride,
    keys_ptr,
    table_ptr,
    table_stride,
    sequence_ptr,
    visible_ptr,
    out_ptr,
    out_stride,
    num_rows,
    heads,
    min_scored,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    WORDS: tl.constexpr,
    NIBBLES: tl.constexpr,
    ENTRIES: tl.constexpr,
    PER_BLOCK: tl.constexpr,
):
    """Rows of a sequence share its keys: a program expands a tile of keys once for a group of rows.

    A group of ``GROUP`` rows may hold several sequences, each in contiguous rows: they are taken one after the other,
    in tiles of ``TILE`` rows.
    """
    first_row = tl.program_id(1) * GROUP
    rows = first_row + tl.arange(0, GROUP)
    visible = tl.load(visible_ptr + rows, rows < num_rows, other=0)
    is_scored = visible > min_scored
    sequence = tl.load(sequence_ptr + rows, rows < num_rows, other=0)
    first_sequence = tl.min(tl.where(is_scored, sequence, 2147483647))
    last_sequence = tl.max(tl.where(is_scored, sequence, -1))
    num_tiles = (tl.max(tl.where(is_scored, visible, 0)) + ENTRIES - 1) // ENTRIES
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        index = tile * ENTRIES + tl.arange(0, ENTRIES)
        for current in range(first_sequence, last_sequence + 1):
            # Rows of this sequence that see any entry of this tile.
            is_member = is_scored & (sequence == current) & (visible > tile * ENTRIES)
            begin = tl.min(tl.where(is_member, rows, 2147483647))
            end = tl.max(tl.where(is_member, rows, -1)) + 1
            inside = index < tl.max(tl.where(is_member, visible, 0))
            slots = slot_of(index, inside, table_ptr + current * table_stride, PER_BLOCK)
            codes, scales = load_key_words(keys_ptr, slots, inside, WIDTH, WORDS, NIBBLES)
            values = key_values(codes, scales, ENTRIES, WORDS, NIBBLES)
            for row in range(begin, end, TILE):
                queries = _load_queries(query_ptr, row, num_rows, heads, HEADS, TILE, WIDTH)
                weights = _load_weights(weights_ptr, weights_stride, row, num_rows, heads, HEADS, TILE)
                products = tl.maximum(tl.dot(values, queries), 0.0) * weights[None, :]
                scores = tl.sum(tl.reshape(products, [ENTRIES, TILE, HEADS]), axis=2)  # [ENTRIES, TILE]
                member = row + tl.arange(0, TILE)
                limit = tl.load(visible_ptr + member, member < end, other=0)
                limit = tl.where(limit > min_scored, limit, 0)
                target = out_ptr + member.to(tl.int64)[None, :] * out_stride + index[:, None]
                tl.store(target, _order_keys(scores), index[:, None] < limit[None, :])


def _key_words(index_keys: Tensor, width: int) -> tuple[Tensor, int, int]:
    """The store in the widest words that its records allow; codes per word; code words per key, a power of two."""
    if index_keys.shape[1] % 4 == 0:
        return index_keys.view(torch.int32), 8, triton.next_power_of_2(width // 8)
    return index_keys, 2, triton.next_power_of_2(width // 2)


def _check(query: Tensor, head_weights: Tensor, index_keys: Tensor, order_keys: Tensor, block_table: Tensor) -> None:
    rows, heads, width = query.shape
    assert query.is_contiguous()
    assert query.dtype == torch.bfloat16
    assert width % 32 == 0
    assert head_weights.shape == (rows, heads)
    assert head_weights.stride(1) == 1
    assert index_keys.is_contiguous()
    assert index_keys.shape[1] == width // 2 + width // 32
    assert order_keys.dtype == torch.int16
    assert order_keys.shape[0] == rows
    assert order_keys.stride(1) == 1
    assert block_table.stride(1) == 1


def score_rows(
    query: Tensor,
    head_weights: Tensor,
    index_keys: Tensor,
    block_table: Tensor,
    row_sequence: Tensor,
    num_visible: Tensor,
    order_keys: Tensor,
    min_scored: int,
    entries_per_block: int,
    candidate_blocks: Tensor | None = None,
    block_size: int = 1,
    tile_entries: int = 64,
    num_programs: int = 528,
    num_warps: int = 4,
) -> None:
    """Score rows one by one (decoding): all visible entries, or those of each row's candidate blocks.

    Args:
        query: ``[rows, heads, Di]`` bf16 from :func:`~deepinfer.kernels.indexer.query.index_query`, at most 4,096 rows.
        head_weights: ``[rows, heads]`` bf16, row stride free. index_keys: ``[num_entries, Di / 2 + Di / 32]`` uint8.
        block_table: ``[sequences, blocks]`` int32. row_sequence, num_visible: ``[rows]`` int32.
        order_keys: ``[rows, capacity]`` int16, written up to each row's number of scored entries. The j-th element
            belongs to entry j, or to the j-th entry of the row's candidate blocks.
        min_scored: rows that score no more entries than this are left out: they select everything.
        candidate_blocks: ``[rows, num_blocks]`` int32 as chosen for the same ``num_visible``; block_size: a power of 2.
        num_programs: programs that share the work; any number gives the same result.
    """
    _check(query, head_weights, index_keys, order_keys, block_table)
    rows, heads, width = query.shape
    assert rows <= 4096
    if rows == 0:
        return
    words, nibbles, num_words = _key_words(index_keys, width)
    num_blocks = 0 if candidate_blocks is None else candidate_blocks.shape[1]
    assert candidate_blocks is None or candidate_blocks.is_contiguous()
    grid = min(num_programs, rows * triton.cdiv(order_keys.shape[1], tile_entries))
    _score_rows_kernel[(grid,)](
        query,
        head_weights,
        head_weights.stride(0),
        words,
        block_table,
        block_table.stride(0),
        row_sequence,
        num_visible,
        num_visible if candidate_blocks is None else candidate_blocks,
        order_keys,
        order_keys.stride(0),
        rows,
        heads,
        min_scored,
        ROWS=triton.next_power_of_2(rows),
        HEADS=max(16, triton.next_power_of_2(heads)),
        WIDTH=width,
        WORDS=num_words,
        NIBBLES=nibbles,
        ENTRIES=tile_entries,
        PER_BLOCK=entries_per_block,
        BLOCK_SIZE=block_size,
        NUM_BLOCKS=num_blocks,
        num_warps=num_warps,
        num_stages=1,
    )


def score_chunks(
    query: Tensor,
    head_weights: Tensor,
    index_keys: Tensor,
    block_table: Tensor,
    row_sequence: Tensor,
    num_visible: Tensor,
    order_keys: Tensor,
    min_scored: int,
    entries_per_block: int,
    max_visible: int | None = None,
    tile_entries: int = 128,
    tile_rows: int = 4,
    group_rows: int = 64,
    num_programs: int = 4224,
    num_warps: int = 8,
    num_stages: int = 2,
) -> None:
    """Score chunks of rows (prefill, verification): all visible entries, keys expanded once for many rows.

    Args: as in :func:`score_rows`, any number of rows; those of a sequence are contiguous, sequences ascend.
        max_visible: largest ``num_visible`` where the host knows it: bounds the grid. Default: the capacity.
        tile_rows: rows per product; group_rows: rows that share an expanded tile of keys.
    """
    _check(query, head_weights, index_keys, order_keys, block_table)
    rows, heads, width = query.shape
    if rows == 0:
        return
    words, nibbles, num_words = _key_words(index_keys, width)
    groups = triton.cdiv(rows, group_rows)
    tiles = triton.cdiv(order_keys.shape[1] if max_visible is None else max_visible, tile_entries)
    splits = min(max(tiles, 1), max(triton.cdiv(num_programs, groups), 1))
    _score_chunks_kernel[(splits, groups)](
        query,
        head_weights,
        head_weights.stride(0),
        words,
        block_table,
        block_table.stride(0),
        row_sequence,
        num_visible,
        order_keys,
        order_keys.stride(0),
        rows,
        heads,
        min_scored,
        GROUP=group_rows,
        TILE=tile_rows,
        HEADS=max(16 // tile_rows, triton.next_power_of_2(heads)),
        WIDTH=width,
        WORDS=num_words,
        NIBBLES=nibbles,
        ENTRIES=tile_entries,
        PER_BLOCK=entries_per_block,
        num_warps=num_warps,
        num_stages=num_stages,
    )
