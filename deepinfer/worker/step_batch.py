"""From a :class:`StepPlan` (host data) to the tensors of one forward.

Everything is computed with NumPy on the host and moved once; the layers then only index.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from deepinfer.layers.caches import BLOCK_TOKENS, CacheGeometry
from deepinfer.messages import Chunk, StepPlan
from deepinfer.ops.step_views import ChunkSpan, PairView, RingView, StreamView
from deepinfer.worker.decoder_rows import kept_rows, narrows_decoder
from deepinfer.worker.device_step import ngram_ids, padded_block_tables, token_ids
from deepinfer.worker.ragged_rows import Ints, RaggedRows


@dataclass(frozen=True, slots=True)
class DecoderBatch:
    """The step as the decoder layers see it, where that differs (spec 6.1). Device tensors, int64."""

    rows: Tensor
    """``[kept]`` rows of the step, ascending."""
    num_rows: int
    window: RingView
    streams: dict[int, StreamView]


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
    """``[samples]`` rows whose distribution is wanted, in batch order; numbered among the decoder's rows."""
    window: RingView
    streams: dict[int, StreamView]
    decoder: DecoderBatch | None = None
    """None when the decoder layers see all rows and the same windows."""


class StepBatchBuilder:
    """Builds batches for one model: knows window, ring lengths, ratios in use and n-gram size.

    Args:
        is_compact: whether rows before a chunk's ``decoder_floor`` are left out of the decoder layers; otherwise they
            run with narrowed windows.
    """

    def __init__(
        self, geometry: CacheGeometry, ratios: set[int], max_ngram: int, device: torch.device, is_compact: bool = True
    ) -> None:
        self.geometry = geometry
        self.ratios = sorted(ratios - {0})
        self.max_ngram = max_ngram
        self.device = device
        self.is_compact = is_compact

    def build(self, plan: StepPlan) -> StepBatch:
        """Lay out the rows of ``plan``. Every token id must be known (no placeholders)."""
        chunks = plan.chunks
        rows = RaggedRows.of_chunks(chunks)
        ids = token_ids(chunks, rows.total)
        assert ids.min() >= 0, "placeholders are resolved before a batch is built"
        sample_rows = np.concatenate(
            [np.arange(end - chunk.num_sampled, end) for chunk, end in zip(chunks, rows.ends, strict=True)]
        )
        tables = padded_block_tables(chunks)
        decoder = None
        if narrows_decoder(chunks, self.geometry.window):
            decoder, sample_rows = self._decoder(chunks, tables)
        return StepBatch(
            ids=self._move(ids),
            positions=self._move(rows.positions),
            ngram_ids=self._move(ngram_ids(chunks, rows, ids, self.max_ngram)),
            sample_rows=self._move(sample_rows),
            window=self._window(rows),
            streams=self._streams(rows, tables),
            decoder=decoder,
        )

    def _move(self, array: Ints) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64)).to(self.device, non_blocking=True)

    def _decoder(self, chunks: Sequence[Chunk], tables: Ints) -> tuple[DecoderBatch, Ints]:
        """Views of the rows that the decoder layers run on, and the rows to sample from, numbered among them."""
        kept = kept_rows(chunks, self.is_compact)
        if kept.ragged is None:
            none = self._move(kept.rows)
            empty = RingView(index=none.view(0, 0), previous=none, store_rows=none, store_slots=none)
            return DecoderBatch(none, 0, empty, {}), kept.sample_rows
        batch = DecoderBatch(
            rows=self._move(kept.rows),
            num_rows=kept.ragged.total,
            window=self._window(kept.ragged),
            streams=self._streams(kept.ragged, tables[kept.chunks]),
        )
        return batch, kept.sample_rows

    def _window(self, rows: RaggedRows) -> RingView:
        geometry = self.geometry
        width = min(geometry.window, int(rows.positions.max()) + 1)
        num_previous = np.clip(rows.starts - rows.floors, 0, geometry.window - 1)
        previous, previous_begin = rows.earlier_slots(num_previous, geometry.ring_length)
        # index of position t of a sequence: its row if t is in this step, else its place among the earlier keys
        positions = rows.positions[:, None] + np.arange(1 - width, 1)
        start = rows.starts[rows.sequence][:, None]
        in_step = rows.begins[rows.sequence][:, None] + positions - start
        earlier = rows.total + (previous_begin + num_previous - rows.starts)[rows.sequence][:, None] + positions
        index = np.where(positions >= start, in_step, earlier)
        index[positions < np.maximum(rows.floors, 0)[rows.sequence][:, None]] = -1
        store_rows, store_slots = rows.ring_stores(geometry.ring_length)
        return RingView(
            index=self._move(index),
            previous=self._move(previous),
            store_rows=self._move(store_rows),
            store_slots=self._move(store_slots),
        )

    def _streams(self, rows: RaggedRows, tables: Ints) -> dict[int, StreamView]:
        sequence, block_tables = self._move(rows.sequence), self._move(tables)
        spans = tuple(
            ChunkSpan(int(begin), int(end), int(start + end - begin - 1))
            for begin, end, start in zip(rows.begins, rows.ends, rows.starts, strict=True)
        )
        may_emit = rows.positions >= rows.entry_floors[rows.sequence]
        views = {}
        for ratio in self.ratios:
            visible = (rows.positions + 1) // ratio
            emit_rows = np.flatnonzero(((rows.positions + 1) % ratio == 0) & may_emit)
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

    def _pairs(self, rows: RaggedRows, emit_rows: Ints) -> PairView:
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
