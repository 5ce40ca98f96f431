"""The indexer's selection on the device: scores, top entries, candidate blocks (spec 4.7).

The references are ``index_full`` and ``index_candidates`` of :mod:`deepinfer.ops.index_select`. Scores exist only for a
slab of rows at a time: 2 bytes per row and entry of the capacity, within a budget.

On Hopper and the released widths, scores and selections run in CUDA C++; else everything runs in Triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from deepinfer.kernels.indexer import chunks_cuda, scores_cuda, topk_cuda
from deepinfer.kernels.indexer.scores import score_chunks, score_rows
from deepinfer.kernels.indexer.topk import select_blocks, select_entries
from deepinfer.ops.step_views import ChunkSpan

SCRATCH_BYTES = 256 << 20
"""Order keys that exist at once. A million entries of one row take 2 MB."""
MAX_SLAB_ROWS = 4096
MAX_CHUNK_ONE_BY_ONE = 8
"""Chunks up to this length (decoding, verification) are scored row by row."""


@dataclass(frozen=True, slots=True)
class IndexView:
    """One stream's entries as the rows of a step see them.

    Fields: ``block_table`` ``[sequences, blocks]``, ``row_sequence`` and ``num_visible`` ``[rows]``, all int32 on the
    device. Padding rows see nothing. Rows of a sequence are contiguous, in the order of their positions.
    """

    block_table: Tensor
    row_sequence: Tensor
    num_visible: Tensor
    entries_per_block: int
    max_visible: int | None = None
    """Largest ``num_visible`` where the host knows it (no graph); else the tables' capacity is assumed."""
    long_rows: tuple[int, int] = (0, 0)
    """Rows from the first to behind the last one of chunks longer than :data:`MAX_CHUNK_ONE_BY_ONE`, where the host
    knows the chunks: they share their sequence's keys. The others are scored row by row. (Decoding with 8 drafts and
    more makes long chunks, too, where it is not a graph.)"""

    @property
    def capacity(self) -> int:
        """Entries a row may see."""
        capacity = self.block_table.shape[1] * self.entries_per_block
        return capacity if self.max_visible is None else min(capacity, self.max_visible)


def long_rows(spans: Sequence[ChunkSpan]) -> tuple[int, int]:
    """``IndexView.long_rows`` of a step's chunks."""
    long = [span for span in spans if span.row_end - span.row_begin > MAX_CHUNK_ONE_BY_ONE]
    return (long[0].row_begin, long[-1].row_end) if long else (0, 0)


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
    invariant: bool = False,
) -> Selection:
    """Select among all visible entries; optionally also choose candidate blocks from the same scores.

    Args:
        query: ``[rows, heads, Di]`` bf16, rotated and FP4-rounded. head_weights: ``[rows, heads]`` bf16.
        index_keys: ``[num_entries, Di / 2 + Di / 32]`` uint8.
        count: entries per row at most. candidates: (block size, number of blocks), or None.
        scratch_bytes: limit of the order keys that exist at once (a single row may exceed it).
        invariant: score long chunks row by row as well, in the order in which decoding sums: slower, and the same bits
            for a row whatever chunk it came in. Among rows of equal kind nothing depends on the batch anyway.
    """
    rows, device = query.shape[0], query.device
    slots = torch.empty((rows, count), dtype=torch.int32, device=device)
    entries = torch.empty_like(slots) if wants_entries else None
    blocks = None
    if candidates is not None:
        assert candidates[0] * candidates[1] >= count, "rows that select everything must keep every block"
        blocks = torch.empty((rows, candidates[1]), dtype=torch.int32, device=device)
    capacity = view.capacity
    long_begin, long_end = (0, 0) if invariant else view.long_rows
    slab = _slab_rows(rows, capacity, scratch_bytes)
    order_keys = _scratch(slab, capacity if capacity > count else 0, device)
    for begin in range(0, rows, slab):
        part = slice(begin, min(begin + slab, rows))
        keys, shown = order_keys[: part.stop - begin], _rows_of(view, part)
        if capacity > count:
            edges = [min(max(edge, begin), part.stop) for edge in (begin, long_begin, long_end, part.stop)]
            for first, last, score in zip(edges, edges[1:], (_score_rows, _score_chunks, _score_rows), strict=False):
                own, here = slice(first, last), slice(first - begin, last - begin)
                if first < last:
                    score(query[own], head_weights[own], index_keys, _rows_of(view, own), keys[here], count)
        _select_entries(keys, shown, slots[part], None if entries is None else entries[part])
        if blocks is not None and candidates is not None:
            _select_blocks(keys, shown.num_visible, candidates[0], blocks[part])
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
    invariant: bool = False,
) -> Selection:
    """Select among the visible entries of each row's candidate blocks.

    Args:
        blocks: ``[rows, num_blocks]`` int32 from :func:`index_full` of the same rows. Others as there.
    """
    if view.capacity <= blocks.shape[1] * block_size:  # every visible entry is in a kept block
        return index_full(query, head_weights, index_keys, view, count, None, wants_entries, scratch_bytes, invariant)
    rows, device = query.shape[0], query.device
    slots = torch.empty((rows, count), dtype=torch.int32, device=device)
    entries = torch.empty_like(slots) if wants_entries else None
    capacity = blocks.shape[1] * block_size
    slab = _slab_rows(rows, capacity, scratch_bytes)
    order_keys = _scratch(slab, capacity, device)
    for begin in range(0, rows, slab):
        part = slice(begin, min(begin + slab, rows))
        keys, shown = order_keys[: part.stop - begin], _rows_of(view, part)
        _score_rows(query[part], head_weights[part], index_keys, shown, keys, count, blocks[part], block_size)
        _select_entries(keys, shown, slots[part], None if entries is None else entries[part], blocks[part], block_size)
    return Selection(slots, entries, None)


def _rows_of(view: IndexView, part: slice) -> IndexView:
    return replace(view, row_sequence=view.row_sequence[part], num_visible=view.num_visible[part])


def _score_rows(
    query: Tensor,
    head_weights: Tensor,
    index_keys: Tensor,
    view: IndexView,
    order_keys: Tensor,
    min_scored: int,
    blocks: Tensor | None = None,
    block_size: int = 8,
) -> None:
    _, heads, width = query.shape
    is_covered = scores_cuda.accepts(heads, width, view.entries_per_block, block_size, query.device)
    score = scores_cuda.score_rows if is_covered else score_rows
    rows = view.block_table, view.row_sequence, view.num_visible
    score(query, head_weights, index_keys, *rows, order_keys, min_scored, view.entries_per_block, blocks, block_size)


def _score_chunks(
    query: Tensor, head_weights: Tensor, index_keys: Tensor, view: IndexView, order_keys: Tensor, min_scored: int
) -> None:
    _, heads, width = query.shape
    # By the model and the machine alone, so that the rows of all long chunks are summed in one order.
    is_covered = chunks_cuda.accepts(heads, width, view.entries_per_block, query.device)
    score = chunks_cuda.score_chunks if is_covered else score_chunks
    rows = view.block_table, view.row_sequence, view.num_visible
    score(query, head_weights, index_keys, *rows, order_keys, min_scored, view.entries_per_block, view.max_visible)


def _select_entries(
    order_keys: Tensor,
    view: IndexView,
    slots: Tensor,
    entries: Tensor | None,
    blocks: Tensor | None = None,
    block_size: int = 8,
) -> None:
    if topk_cuda.accepts(order_keys, 1):
        topk_cuda.select(
            order_keys,
            view.num_visible,
            slots.shape[1],
            slots,
            entries,
            1,
            view.row_sequence,
            view.block_table,
            view.entries_per_block,
            blocks,
            block_size,
        )
    else:
        select_entries(
            order_keys,
            view.num_visible,
            view.row_sequence,
            view.block_table,
            view.entries_per_block,
            slots,
            entries,
            blocks,
            block_size,
        )


def _select_blocks(order_keys: Tensor, num_visible: Tensor, block_size: int, blocks: Tensor) -> None:
    if topk_cuda.accepts(order_keys, block_size):
        topk_cuda.select(order_keys, num_visible, blocks.shape[1], None, blocks, block_size)
    else:
        select_blocks(order_keys, num_visible, block_size, blocks)


def _slab_rows(rows: int, capacity: int, scratch_bytes: int) -> int:
    fits = max(1, scratch_bytes // (2 * max(capacity, 1)))
    return max(1, min(rows, fits, MAX_SLAB_ROWS))


def _scratch(rows: int, capacity: int, device: torch.device) -> Tensor:
    return torch.empty((rows, triton.cdiv(max(capacity, 1), 8) * 8), dtype=torch.int16, device=device)
