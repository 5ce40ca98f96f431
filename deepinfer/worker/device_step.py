"""From a :class:`StepPlan` to the table that the device expands (:mod:`deepinfer.layers.fused.device_rows`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from deepinfer.layers.caches import BLOCK_TOKENS
from deepinfer.layers.fused.device_rows import Column, row_table
from deepinfer.messages import Chunk
from deepinfer.ops.step_views import ChunkSpan
from deepinfer.worker.ragged_rows import RaggedRows


@dataclass(frozen=True, slots=True)
class HostTable:
    """What the host knows of some rows. NumPy, int32."""

    table: np.ndarray
    """``[len(Column), rows]``"""
    block_tables: np.ndarray
    """``[sequences, blocks]``"""
    begins: np.ndarray
    """``[sequences]`` first row of each chunk, whose rows follow each other."""

    @property
    def num_rows(self) -> int:
        return self.table.shape[1]

    @property
    def spans(self) -> tuple[ChunkSpan, ...]:
        """Of the chunks. The last position of a chunk with open rows is an upper bound."""
        ends = np.append(self.begins[1:], self.num_rows)
        last = self.table[Column.END, self.begins] - 1
        # Where the host only guesses, it guesses too low: the blocks of the table are a bound.
        is_open = self.table[Column.TOKEN, self.begins] < 0
        last = np.where(is_open, self.block_tables.shape[1] * BLOCK_TOKENS - 1, last)
        return tuple(ChunkSpan(*map(int, span)) for span in zip(self.begins, ends, last, strict=True))


def host_table(rows: RaggedRows, ids: np.ndarray, block_tables: np.ndarray) -> HostTable:
    """The table of a ragged batch.

    Args:
        ids: ``[rows]`` token ids, -1 where only the device knows. block_tables: ``[sequences, blocks]``.
    """
    sequence = rows.sequence
    table = row_table(
        {
            Column.TOKEN: ids,
            Column.POSITION: rows.positions,
            Column.SLOT: rows.slots[sequence],
            Column.FLOOR: rows.floors[sequence],
            Column.START: rows.starts[sequence],
            Column.END: (rows.starts + rows.counts)[sequence],
            Column.ENTRY_FLOOR: rows.entry_floors[sequence],
            Column.SEQUENCE: sequence,
        }
    )
    return HostTable(table, block_tables.astype(np.int32, copy=False), rows.begins)


class SlotTables:
    """Block tables as the last steps had them, so that a step only writes those that grew.

    A sequence keeps its state slot, and its table stays the same tuple until it gets another block.

    Args:
        num_slots: state slots.
    """

    def __init__(self, num_slots: int) -> None:
        self._known: list[tuple[int, ...]] = [()] * num_slots
        self._rows = np.zeros((num_slots, 1), np.int32)

    def of(self, chunks: Sequence[Chunk]) -> np.ndarray:
        """What :func:`padded_block_tables` gives, of chunks with state slots of their own."""
        known, longest = self._known, 0
        for chunk in chunks:
            table = chunk.block_table
            longest = max(longest, len(table))
            if known[chunk.state_slot] is not table:
                self._write(chunk.state_slot, table)
        return self._rows[[chunk.state_slot for chunk in chunks], :longest]

    def _write(self, slot: int, table: tuple[int, ...]) -> None:
        width = self._rows.shape[1]
        if len(table) > width:
            self._rows = np.pad(self._rows, ((0, 0), (0, max(len(table), 2 * width) - width)))
        row = self._rows[slot]
        row[: len(table)] = table
        row[len(table) :] = 0
        self._known[slot] = table


def padded_block_tables(chunks: Sequence[Chunk], width: int | None = None) -> np.ndarray:
    """``[sequences, blocks]`` int32, padded with block 0.

    Args:
        width: blocks per row; default the longest table.
    """
    longest = max(len(chunk.block_table) for chunk in chunks)
    tables = np.zeros((len(chunks), width or longest), np.int32)
    for index, chunk in enumerate(chunks):
        tables[index, : len(chunk.block_table)] = chunk.block_table
    return tables


def token_ids(chunks: Sequence[Chunk], num_rows: int) -> np.ndarray:
    """``[rows]`` int64; -1 where only the device knows."""
    return np.fromiter(chain.from_iterable([chunk.token_ids for chunk in chunks]), np.int64, num_rows)


def ngram_ids(chunks: Sequence[Chunk], rows: RaggedRows, ids: np.ndarray, size: int) -> np.ndarray:
    """``[rows, size]`` each row's id and the ones before it, newest first; -1 before the start (spec 4.10 d).

    Of rows whose id only the device knows they mean nothing.
    """
    older = size - 1
    history = np.full((len(chunks), older), -1)
    for index, chunk in enumerate(chunks):
        known = chunk.history[len(chunk.history) - min(older, len(chunk.history)) :]
        history[index, older - len(known) :] = known
    columns = [ids]
    row = np.arange(rows.total)
    for back in range(1, size):
        inside = rows.offset >= back
        before = history[rows.sequence, np.where(inside, 0, older - back + rows.offset)]
        columns.append(np.where(inside, ids[np.maximum(row - back, 0)], before))
    return np.stack(columns, axis=1)
