"""Row arithmetic of a ragged batch: which position, ring slot and chunk each row belongs to. NumPy, on the host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from deepinfer.messages import Chunk

Ints = np.ndarray


class RaggedRows:
    """Rows of a few sequences in one batch: ``[sequences]`` arrays in, ``[rows]`` arrays out.

    Args:
        starts: position of each sequence's first row. counts: rows of each sequence, at least one.
        slots: state slots.
        floors: no row sees a window key before this position; later than ``starts`` is allowed.
        entry_floors: rows before this position complete no entries.
    """

    def __init__(self, starts: Ints, counts: Ints, slots: Ints, floors: Ints, entry_floors: Ints) -> None:
        self.starts, self.counts, self.slots = starts, counts, slots
        self.floors, self.entry_floors = floors, entry_floors
        self.ends = np.cumsum(counts)
        self.begins = self.ends - counts
        self.total = int(self.ends[-1])
        self.sequence = np.repeat(np.arange(len(starts)), counts)
        self.offset = np.arange(self.total) - self.begins[self.sequence]
        self.positions = starts[self.sequence] + self.offset

    @classmethod
    def of_chunks(cls, chunks: Sequence[Chunk]) -> RaggedRows:
        """All rows of a step."""
        return cls(
            *np.array(
                [
                    (chunk.start, len(chunk.token_ids), chunk.state_slot, chunk.window_floor, chunk.entry_floor)
                    for chunk in chunks
                ],
                dtype=np.int64,
            ).T
        )

    def last_rows(self, numbers: Sequence[int]) -> Ints:
        """The last so many rows of each sequence, in order."""
        first = self.counts - np.asarray(numbers, dtype=np.int64)
        return np.flatnonzero(self.offset >= first[self.sequence])

    def earlier_slots(self, num_previous: Ints, ring: int) -> tuple[Ints, Ints]:
        """Flat ring slots of the ``num_previous`` positions before each chunk, and where each sequence's run begins."""
        ends = np.cumsum(num_previous)
        begins = ends - num_previous
        sequence = np.repeat(np.arange(len(num_previous)), num_previous)
        before = np.arange(int(ends[-1])) - begins[sequence]
        positions = (self.starts - num_previous)[sequence] + before
        return self.slots[sequence] * ring + positions % ring, begins

    def ring_stores(self, ring: int) -> tuple[Ints, Ints]:
        """The last ``ring`` rows of each chunk and the flat ring slots they go to: every slot at most once.

        Rows below the window floor are left out: no later row may see them.
        """
        is_late = self.offset >= self.counts[self.sequence] - ring
        rows = np.flatnonzero(is_late & (self.positions >= self.floors[self.sequence]))
        return rows, self.slots[self.sequence[rows]] * ring + self.positions[rows] % ring
