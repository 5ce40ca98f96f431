"""What an operator needs to know of the step: which keys each row may see and where new records go.

Built once per step by the worker and shared by all layers. All tensors are int64 on the device; numbers are known on
the host, so that no operator has to ask the device for a size.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class ChunkSpan:
    """Rows of one sequence in the batch."""

    row_begin: int
    row_end: int
    last_position: int
    """Absolute position of the last row."""


@dataclass(frozen=True, slots=True)
class RingView:
    """The sliding windows of a step.

    Keys of this step come first, then the earlier keys that some row still sees; ``index`` addresses that sequence.
    """

    index: Tensor
    """``[rows, window]`` into (this step's keys, ``previous``), oldest first; -1 where there is no key."""
    previous: Tensor
    """``[n]`` flat ring slots of the earlier keys."""
    store_rows: Tensor
    """``[m]`` rows whose key goes into a ring: the last ``ring length`` rows of each chunk."""
    store_slots: Tensor
    """``[m]`` flat ring slots they go to."""


@dataclass(frozen=True, slots=True)
class PairView:
    """Where a ratio-2 compressor finds the first token of each pair and where it keeps what it may need later."""

    partner_index: Tensor
    """``[entries]`` into (this step's rows, ``previous``)."""
    previous: Tensor
    """``[n]`` flat state slots."""
    store_rows: Tensor
    store_slots: Tensor


@dataclass(frozen=True, slots=True)
class StreamView:
    """One compress ratio: visibility and placement of compressed entries."""

    ratio: int
    entries_per_block: int
    num_visible: Tensor
    """``[rows]`` entries that each row sees: ``(position + 1) // ratio``."""
    max_visible: int
    sequence: Tensor
    """``[rows]`` which row of ``block_tables`` belongs to the row."""
    block_tables: Tensor
    """``[sequences, blocks]`` physical blocks in token order, padded with 0."""
    spans: tuple[ChunkSpan, ...]
    emit_rows: Tensor
    """``[entries]`` rows that complete an entry in this step."""
    emit_slots: Tensor
    """``[entries]`` flat entry slots they are written to."""
    emit_positions: Tensor
    """``[entries]`` position by which the entry is rotated: that of its first token."""
    pairs: PairView | None
    """Set for ratio 2."""

    def entry_slots(self, entries: Tensor, rows: slice) -> Tensor:
        """Flat slots of logical entries ``[n, k]`` of the given rows; negative entries give a slot to be masked."""
        tables = self.block_tables[self.sequence[rows]]
        safe = entries.clamp_min(0)
        blocks = tables.gather(1, safe // self.entries_per_block)
        return blocks * self.entries_per_block + safe % self.entries_per_block
