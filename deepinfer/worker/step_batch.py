"""From a :class:`StepPlan` (host data) to the tensors of one forward.

Everything is computed with NumPy on the host and moved once; the layers then only index.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from deepinfer.layers.caches import BLOCK_TOKENS, CacheGeometry
from deepinfer.messages import StepPlan
from deepinfer.ops.step_views import ChunkSpan, PairView, RingView, StreamView

Ints = np.ndarray


@dataclass(frozen=True, slots=True)
class StepBatch:
    """Device tensors of one step, int64."""

    ids: Tensor
    """``[rows]``"""
    positions: Tensor
    """``[rows]``"""
    ngram_ids: Tensor
    """``[rows, n]`` newest first, -1 before the start of a sequence."""
    sample_rows: Tensor
    """``[samples]`` rows whose distribution is wanted, in batch order."""
    window: RingView
    streams: dict[int, StreamView]


class StepBatchBuilder:
    """Builds batches for one model: knows window, ring lengths, ratios in use and n-gram size."""

    def __init__(self, geometry: CacheGeometry, ratios: set[int], max_ngram: int, device: torch.device) -> None:
        self.geometry = geometry
        self.ratios = sorted(ratios - {0})
        self.max_ngram = max_ngram
        self.device = device

    def build(self, plan: StepPlan) -> StepBatch:
        """Lay out the rows of ``plan``. Every token id must be known (no placeholders)."""
        chunks = plan.chunks
        rows = _Rows(
            starts=np.array([chunk.start for chunk in chunks]),
            counts=np.array([chunk.num_rows for chunk in chunks]),
            slots=np.array([chunk.state_slot for chunk in chunks]),
        )
        ids = np.fromiter((token for chunk in chunks for token in chunk.token_ids), np.int64, rows.total)
        assert ids.min() >= 0, "placeholders are resolved before a batch is built"
        sampled = [np.arange(end - chunk.num_sampled, end) for chunk, end in zip(chunks, rows.ends, strict=True)]
        tables = np.zeros((len(chunks), max(len(chunk.block_table) for chunk in chunks)), np.int64)
        for index, chunk in enumerate(chunks):
            tables[index, : len(chunk.block_table)] = chunk.block_table
        return StepBatch(
            ids=self._move(ids),
            positions=self._move(rows.positions),
            ngram_ids=self._move(self._ngram_ids(plan, rows, ids)),
            sample_rows=self._move(np.concatenate(sampled)),
            window=self._window(rows),
            streams=self._streams(rows, tables),
        )

    def _move(self, array: Ints) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64)).to(self.device, non_blocking=True)

    def _ngram_ids(self, plan: StepPlan, rows: _Rows, ids: Ints) -> Ints:
        """Each row's id and the ``n - 1`` true ids before it, whatever the chunking (spec 4.10 d)."""
        older = self.max_ngram - 1
        history = np.full((len(plan.chunks), older), -1)
        for index, chunk in enumerate(plan.chunks):
            known = chunk.history[len(chunk.history) - min(older, len(chunk.history)) :]
            history[index, older - len(known) :] = known
        columns = [ids]
        row = np.arange(rows.total)
        for back in range(1, self.max_ngram):
            inside = rows.offset >= back
            before = history[rows.sequence, np.where(inside, 0, older - back + rows.offset)]
            columns.append(np.where(inside, ids[np.maximum(row - back, 0)], before))
        return np.stack(columns, axis=1)

    def _window(self, rows: _Rows) -> RingView:
        geometry = self.geometry
        width = min(geometry.window, int(rows.positions.max()) + 1)
        num_previous = np.minimum(rows.starts, geometry.window - 1)
        previous, previous_begin = rows.earlier_slots(num_previous, geometry.ring_length)
        # index of position t of a sequence: its row if t is in this step, else its place among the earlier keys
        positions = rows.positions[:, None] + np.arange(1 - width, 1)
        start = rows.starts[rows.sequence][:, None]
        in_step = rows.begins[rows.sequence][:, None] + positions - start
        earlier = rows.total + (previous_begin + num_previous - rows.starts)[rows.sequence][:, None] + positions
        index = np.where(positions >= start, in_step, earlier)
        index[positions < 0] = -1
        store_rows, store_slots = rows.ring_stores(geometry.ring_length)
        return RingView(
            index=self._move(index),
            previous=self._move(previous),
            store_rows=self._move(store_rows),
            store_slots=self._move(store_slots),
        )

    def _streams(self, rows: _Rows, tables: Ints) -> dict[int, StreamView]:
        sequence, block_tables = self._move(rows.sequence), self._move(tables)
        spans = tuple(
            ChunkSpan(int(begin), int(end), int(start + end - begin - 1))
            for begin, end, start in zip(rows.begins, rows.ends, rows.starts, strict=True)
        )
        views = {}
        for ratio in self.ratios:
            visible = (rows.positions + 1) // ratio
            emit_rows = np.flatnonzero((rows.positions + 1) % ratio == 0)
            entries = rows.positions[emit_rows] // ratio
            per_block = BLOCK_TOKENS // ratio
            slots = tables[rows.sequence[emit_rows], entries // per_block] * per_block + entries % per_block
            views[ratio] = StreamView(
                ratio=ratio,
                entries_per_block=per_block,
                num_visible=self._move(visible),
                max_visible=int(visible.max()),
                sequence=sequence,
                block_tables=block_tables,
                spans=spans,
                emit_rows=self._move(emit_rows),
                emit_slots=self._move(slots),
                emit_positions=self._move(entries * ratio),
                pairs=self._pairs(rows, emit_rows) if ratio == 2 else None,
            )
        return views

    def _pairs(self, rows: _Rows, emit_rows: Ints) -> PairView:
        ring = self.geometry.pair_ring_length
        needs_previous = (rows.starts % 2).astype(np.int64)  # a chunk that starts odd finishes an earlier pair
        previous, previous_begin = rows.earlier_slots(needs_previous, ring)
        first_of_chunk = rows.offset[emit_rows] == 0
        partner = np.where(first_of_chunk, rows.total + previous_begin[rows.sequence[emit_rows]], emit_rows - 1)
        store_rows, store_slots = rows.ring_stores(ring)
        return PairView(
            partner_index=self._move(partner),
            previous=self._move(previous),
            store_rows=self._move(store_rows),
            store_slots=self._move(store_slots),
        )


class _Rows:
    """Row arithmetic of a ragged batch: ``[sequences]`` arrays in, ``[rows]`` arrays out."""

    def __init__(self, starts: Ints, counts: Ints, slots: Ints) -> None:
        self.starts, self.counts, self.slots = starts, counts, slots
        self.ends = np.cumsum(counts)
        self.begins = self.ends - counts
        self.total = int(self.ends[-1])
        self.sequence = np.repeat(np.arange(len(starts)), counts)
        self.offset = np.arange(self.total) - self.begins[self.sequence]
        self.positions = starts[self.sequence] + self.offset

    def earlier_slots(self, num_previous: Ints, ring: int) -> tuple[Ints, Ints]:
        """Flat ring slots of the ``num_previous`` positions before each chunk, and where each sequence's run begins."""
        ends = np.cumsum(num_previous)
        begins = ends - num_previous
        sequence = np.repeat(np.arange(len(num_previous)), num_previous)
        before = np.arange(int(ends[-1])) - begins[sequence]
        positions = (self.starts - num_previous)[sequence] + before
        return self.slots[sequence] * ring + positions % ring, begins

    def ring_stores(self, ring: int) -> tuple[Ints, Ints]:
        """The last ``ring`` rows of each chunk and the flat ring slots they go to: every slot at most once."""
        rows = np.flatnonzero(self.offset >= self.counts[self.sequence] - ring)
        return rows, self.slots[self.sequence[rows]] * ring + self.positions[rows] % ring
