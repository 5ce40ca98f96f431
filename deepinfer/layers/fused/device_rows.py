"""The rows of a step as the kernels see them: one entry per row, fixed shapes, int32, everything on the device.

Unlike :mod:`deepinfer.ops.step_views`, which lists what exists (so its shapes depend on the step), every tensor here
has one element per row and says -1 where there is nothing. The same launches then serve every step of a batch size,
which is what a CUDA graph needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

from deepinfer.layers.caches import BLOCK_TOKENS, CacheGeometry
from deepinfer.ops.rope import rope_angles
from deepinfer.ops.step_views import ChunkSpan

NONE = -1
Angles = tuple[Tensor, Tensor]


class Column(IntEnum):
    """Rows of the table ``[len(Column), rows]`` that the host fills for a step."""

    TOKEN = 0
    POSITION = 1
    """-1 for the padding of a graph: such a row reads no cache, writes none and reaches no expert."""
    SLOT = 2
    """State slot."""
    FLOOR = 3
    """No window key before this position is seen."""
    START = 4
    """First position of the chunk."""
    END = 5
    """Behind its last position."""
    ENTRY_FLOOR = 6
    """Rows before this position complete no entries."""
    SEQUENCE = 7
    """Row of the block tables."""


NUM_COLUMNS = len(Column)
"""An enumeration counts its members anew whenever it is asked."""


@dataclass(frozen=True, slots=True)
class DeviceStream:
    """One compress ratio."""

    ratio: int
    entries_per_block: int
    num_visible: Tensor
    """``[rows]`` entries that a row sees."""
    emit_slot: Tensor
    """``[rows]`` physical slot of the entry that a row completes, or -1."""
    entry_angles: Angles
    """``[rows, rope / 2]`` rotation of that entry: by the position of its first token."""
    partner: Tensor | None
    """Ratio 2, ``[rows]``: where the first token of the pair is: a row (>= 0), pair-ring slot ``-2 - v``, or -1."""
    pair_store_slot: Tensor | None
    """Ratio 2, ``[rows]``: pair-ring slot that this row's projections go to, or -1."""


@dataclass(frozen=True, slots=True)
class DeviceRows:
    """Everything that layers need to know of the rows of a step."""

    token_ids: Tensor
    """``[rows]``"""
    positions: Tensor
    """``[rows]``, -1 for padding."""
    sequence: Tensor
    """``[rows]`` row of ``block_tables``."""
    block_tables: Tensor
    """``[sequences, blocks]``"""
    ring_slot: Tensor
    """``[rows]`` window-ring slot of this row's key, or -1."""
    keys_first: bool
    """Keys go into the rings before attention and are read from there; else attention reads this step's keys from the
    step's own records, and the rings are written behind it (a chunk longer than the ring's spare room)."""
    window_index: Tensor
    """``[rows, window]``: row of this step (>= 0), ring slot ``-2 - v``, or -1."""
    plain_angles: Angles
    compressed_angles: Angles
    streams: dict[int, DeviceStream]
    spans: tuple[ChunkSpan, ...] | None
    """Chunks, known on the host; None in a graph."""

    @property
    def num_rows(self) -> int:
        return self.positions.shape[0]

    def angles(self, ratio: int) -> Angles:
        """Rotation of queries and window keys in layers of this compress ratio."""
        return self.compressed_angles if ratio else self.plain_angles


def fits_spare_room(num_rows: int, geometry: CacheGeometry) -> bool:
    """Whether a chunk may be written into its rings before its first row has read them."""
    return num_rows <= min(geometry.ring_length - geometry.window + 1, geometry.pair_ring_length - 1)


def row_table(columns: dict[Column, np.ndarray]) -> np.ndarray:
    """The host's part ``[len(Column), rows]`` int32 from one array for each column."""
    table = np.empty((NUM_COLUMNS, len(columns[Column.TOKEN])), np.int32)
    for column, values in columns.items():
        table[column] = values
    return table


@dataclass(frozen=True, slots=True)
class RowExpander:
    """Derives all per-row tensors from the host's table, on the device and without looking at a value.

    Args (fields): ratios: in use, without 0; frequencies of plain and compressing layers, float64 on the device.
    """

    geometry: CacheGeometry
    ratios: tuple[int, ...]
    plain_frequencies: Tensor
    compressed_frequencies: Tensor

    def expand(
        self, table: Tensor, block_tables: Tensor, keys_first: bool, spans: Sequence[ChunkSpan] | None = None
    ) -> DeviceRows:
        """``table`` ``[len(Column), rows]`` int32, ``block_tables`` ``[sequences, blocks]`` int32, contiguous."""
        if table.is_cuda:
            return self._in_one_launch(table, block_tables, keys_first, spans)
        return self.reference(table, block_tables, keys_first, spans)

    def _in_one_launch(
        self, table: Tensor, block_tables: Tensor, keys_first: bool, spans: Sequence[ChunkSpan] | None
    ) -> DeviceRows:
        from deepinfer.kernels.step_tables import step_tables  # Triton is there where CUDA is

        geometry = self.geometry
        tables = step_tables(
            table,
            block_tables,
            self.plain_frequencies,
            self.compressed_frequencies,
            keys_first=keys_first,
            ratios=self.ratios,
            window=geometry.window,
            ring_length=geometry.ring_length,
            pair_ring_length=geometry.pair_ring_length,
            block_tokens=BLOCK_TOKENS,
        )
        streams = {
            ratio: DeviceStream(
                ratio,
                BLOCK_TOKENS // ratio,
                found.num_visible,
                found.emit_slot,
                found.entry_angles,
                found.partner,
                found.pair_store_slot,
            )
            for ratio, found in tables.streams.items()
        }
        return DeviceRows(
            token_ids=table[Column.TOKEN],
            positions=table[Column.POSITION],
            sequence=table[Column.SEQUENCE],
            block_tables=block_tables,
            ring_slot=tables.ring_slot,
            keys_first=keys_first,
            window_index=tables.window_index,
            plain_angles=tables.plain_angles,
            compressed_angles=tables.compressed_angles,
            streams=streams,
            spans=None if spans is None else tuple(spans),
        )

    def reference(
        self, table: Tensor, block_tables: Tensor, keys_first: bool, spans: Sequence[ChunkSpan] | None = None
    ) -> DeviceRows:
        """:meth:`expand` in PyTorch: the meaning of the kernel."""
        geometry = self.geometry
        position, slot = table[Column.POSITION], table[Column.SLOT]
        is_live = position >= 0
        is_stored = is_live & (position >= table[Column.FLOOR])
        left = table[Column.END] - position  # rows of the chunk from this one on
        ring = geometry.ring_length
        ring_slot = torch.where(is_stored & (left <= ring), slot * ring + position % ring, NONE)
        safe = position.clamp_min(0)
        return DeviceRows(
            token_ids=table[Column.TOKEN],
            positions=position,
            sequence=table[Column.SEQUENCE],
            block_tables=block_tables,
            ring_slot=ring_slot,
            keys_first=keys_first,
            window_index=self._window(table, keys_first),
            plain_angles=rope_angles(safe, self.plain_frequencies),
            compressed_angles=rope_angles(safe, self.compressed_frequencies),
            streams={
                ratio: self._stream(ratio, table, block_tables, is_live, is_stored, left) for ratio in self.ratios
            },
            spans=None if spans is None else tuple(spans),
        )

    def _window(self, table: Tensor, keys_first: bool) -> Tensor:
        """``[rows, window]``, oldest first."""
        window, ring = self.geometry.window, self.geometry.ring_length
        position, slot = table[Column.POSITION, :, None], table[Column.SLOT, :, None]
        back = torch.arange(window - 1, -1, -1, device=table.device, dtype=torch.int32)
        seen = position - back  # [rows, window]
        is_visible = (seen >= table[Column.FLOOR, :, None].clamp_min(0)) & (position >= 0)
        index = -2 - (slot * ring + seen % ring)
        if not keys_first:
            row = torch.arange(table.shape[1], device=table.device, dtype=torch.int32)[:, None]
            index = torch.where(seen >= table[Column.START, :, None], row - back, index)
        return torch.where(is_visible, index, NONE).to(torch.int32)

    def _stream(
        self, ratio: int, table: Tensor, block_tables: Tensor, is_live: Tensor, is_stored: Tensor, left: Tensor
    ) -> DeviceStream:
        position, slot = table[Column.POSITION], table[Column.SLOT]
        per_block = BLOCK_TOKENS // ratio
        entry = position.clamp_min(0) // ratio
        completes = is_live & ((position + 1) % ratio == 0) & (position >= table[Column.ENTRY_FLOOR])
        block = (entry // per_block).clamp_max(block_tables.shape[1] - 1)
        physical = block_tables[table[Column.SEQUENCE].long(), block.long()] * per_block + entry % per_block
        partner = store = None
        if ratio == 2:
            ring = self.geometry.pair_ring_length
            row = torch.arange(table.shape[1], device=table.device, dtype=torch.int32)
            before = position - 1
            partner = torch.where(before >= table[Column.START], row - 1, -2 - (slot * ring + before % ring))
            partner = torch.where(completes, partner, NONE).to(torch.int32)
            store = torch.where(is_stored & (left <= ring), slot * ring + position % ring, NONE).to(torch.int32)
        return DeviceStream(
            ratio=ratio,
            entries_per_block=per_block,
            num_visible=torch.where(is_live, (position + 1) // ratio, 0).to(torch.int32),
            emit_slot=torch.where(completes, physical, NONE).to(torch.int32),
            entry_angles=rope_angles(entry * ratio, self.compressed_frequencies),
            partner=partner,
            pair_store_slot=store,
        )
