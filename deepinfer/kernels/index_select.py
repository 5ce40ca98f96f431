"""The indexer's selection on the device: scores, top entries, candidate blocks (spec 4.7).

The references are ``index_full`` and ``index_candidates`` of :mod:`deepinfer.ops.index_select`. Scores exist only for a
slab of rows at a time: 2 bytes per row and entry of the capacity, within a budget.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from deepinfer.kernels.index_scores import score_chunks, score_rows
from deepinfer.kernels.topk import select_blocks, select_entries

SCRATCH_BYTES = 256 << 20
"""Order keys that exist at once. A million entries of one row take 2 MB."""
MAX_ROWS_ONE_BY_ONE = 4096


@dataclass(frozen=True, slots=True)
class IndexView:
    """One stream's entries as the rows of a step see them.

    Fields: ``block_table`` ``[sequences, blocks]``, ``row_sequence`` and ``num_visible`` ``[rows]``, all int32 on the
    device. Padding rows see nothing. Rows of a sequence are contiguous.
    """

    block_table: Tensor
    row_sequence: Tensor
    num_visible: Tensor
    entries_per_block: int
    max_visible: int | None = None
    """Largest ``num_visible`` where the host knows it (no graph); else the tables' capacity is assumed."""
    max_chunk_rows: int = 1
    """Most rows of one sequence in the step. 1: rows are scored one by one; more: they share their keys."""

    @property
    def capacity(self) -> int:
        """Entries a row may see."""
        capacity = self.block_table.shape[1] * self.entries_per_block
        return capacity if self.max_visible is None else min(capacity, self.max_visible)


@dataclass(frozen=True, slots=True)
class Selection:
    """What a selection source leaves for its segment."""

    slots: Tensor
    """``[rows, count]`` int32 physical entry slots, ascending by logical entry, padded with -1."""
    entries: Tensor | None
    """``[rows, count]`` int32 logical entries, where asked for."""
    blocks: Tensor | None
    """``[rows, num_blocks]`` int32 candidate blocks, where asked for."""


def index_full(
    query: Tensor,
    head_weights: Tensor,
    index_keys: Tensor,
    view: IndexView,
    count: int,
    candidates: tuple[int, int] | None = None,
    wants_entries: bool = False,
    scratch_bytes: int = SCRATCH_BYTES,
) -> Selection:
    """Select among all visible entries; optionally also choose candidate blocks from the same scores.

    Args:
        query: ``[rows, heads, Di]`` bf16, rotated and FP4-rounded. head_weights: ``[rows, heads]`` bf16.
        index_keys: ``[num_entries, Di / 2 + Di / 32]`` uint8.
        count: entries per row at most. candidates: (block size, number of blocks), or None.
        scratch_bytes: limit of the order keys that exist at once (a single row may exceed it).
    """
    rows, device = query.shape[0], query.device
    slots = torch.empty((rows, count), dtype=torch.int32, device=device)
    entries = torch.empty_like(slots) if wants_entries else None
    blocks = None
    if candidates is not None:
        assert candidates[0] * candidates[1] >= count, "rows that select everything must keep every block"
        blocks = torch.empty((rows, candidates[1]), dtype=torch.int32, device=device)
    capacity = view.capacity
    slab = _slab_rows(rows, capacity, scratch_bytes)
    if view.max_chunk_rows == 1:
        slab = min(slab, MAX_ROWS_ONE_BY_ONE)
    order_keys = _scratch(slab, capacity if capacity > count else 0, device)
    for begin in range(0, rows, slab):
        part = slice(begin, min(begin + slab, rows))
        keys = order_keys[: part.stop - begin]
        sequence, visible = view.row_sequence[part], view.num_visible[part]
        if capacity > count:
            operands = (query[part], head_weights[part], index_keys, view.block_table, sequence, visible, keys, count)
            if view.max_chunk_rows == 1:
                score_rows(*operands, view.entries_per_block)
            elif view.max_chunk_rows <= 8:
                score_chunks(
                    *operands,
                    view.entries_per_block,
                    tile_entries=64,
                    tile_rows=2,
                    group_rows=8,
                    num_programs=1056,
                    num_warps=4,
                )
            else:
                score_chunks(*operands, view.entries_per_block, view.max_visible)
        select_entries(
            keys,
            visible,
            sequence,
            view.block_table,
            view.entries_per_block,
            slots[part],
            None if entries is None else entries[part],
        )
        if blocks is not None and candidates is not None:
            select_blocks(keys, visible, candidates[0], blocks[part])
    return Selection(slots, entries, blocks)


def index_candidates(
    query: Tensor,
    head_weights: Tensor,
    index_keys: Tensor,
    view: IndexView,
    blocks: Tensor,
    block_size: int,
    count: int,
    wants_entries: bool = False,
    scratch_bytes: int = SCRATCH_BYTES,
) -> Selection:
    """Select among the visible entries of each row's candidate blocks.

    Args:
        blocks: ``[rows, num_blocks]`` int32 from :func:`index_full` of the same rows. Others as there.
    """
    if view.capacity <= blocks.shape[1] * block_size:  # every visible entry is in a kept block
        return index_full(query, head_weights, index_keys, view, count, None, wants_entries, scratch_bytes)
    rows, device = query.shape[0], query.device
    slots = torch.empty((rows, count), dtype=torch.int32, device=device)
    entries = torch.empty_like(slots) if wants_entries else None
    capacity = blocks.shape[1] * block_size
    slab = min(_slab_rows(rows, capacity, scratch_bytes), MAX_ROWS_ONE_BY_ONE)
    order_keys = _scratch(slab, capacity, device)
    for begin in range(0, rows, slab):
        part = slice(begin, min(begin + slab, rows))
        keys = order_keys[: part.stop - begin]
        sequence, visible = view.row_sequence[part], view.num_visible[part]
        score_rows(
            query[part],
            head_weights[part],
            index_keys,
            view.block_table,
            sequence,
            visible,
            keys,
            count,
            view.entries_per_block,
            blocks[part],
            block_size,
        )
        select_entries(
            keys,
            visible,
            sequence,
            view.block_table,
            view.entries_per_block,
            slots[part],
            None if entries is None else entries[part],
            blocks[part],
            block_size,
        )
    return Selection(slots, entries, None)


def _slab_rows(rows: int, capacity: int, scratch_bytes: int) -> int:
    fits = max(1, scratch_bytes // (2 * max(capacity, 1)))
    return max(1, min(rows, fits))


def _scratch(rows: int, capacity: int, device: torch.device) -> Tensor:
    return torch.empty((rows, triton.cdiv(max(capacity, 1), 8) * 8), dtype=torch.int16, device=device)
