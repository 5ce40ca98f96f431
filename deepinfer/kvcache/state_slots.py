"""Slots for the fixed-size state of running sequences: window rings and compressor state."""

from __future__ import annotations

from collections import deque

NULL_SLOT = 0
"""Padding rows use it; it is never handed out."""


class StateSlots:
    """Hands out slot ids, each to one sequence at a time.

    Every slot has a generation that goes up whenever the slot gets a new owner. A reader that acts later than its owner
    lives (a copy on another stream, an export) notes the pair ``(slot, generation)`` and asks :meth:`is_current` before
    it trusts what it reads.
    """

    def __init__(self, num_slots: int) -> None:
        """Make ``num_slots`` slots, the null slot included, so at least 2."""
        assert num_slots >= 2, f"{num_slots=}: one null slot and one usable slot at least"
        self.num_slots = num_slots
        self._generation = [0] * num_slots
        self._is_used = [False] * num_slots
        self._free: deque[int] = deque(range(1, num_slots))

    @property
    def num_usable(self) -> int:
        """Slots that can be handed out at all."""
        return self.num_slots - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_usable - len(self._free)

    def allocate(self) -> int:
        """Hand out the slot that has been free for longest and begin its next generation."""
        assert self._free, f"no free state slot of {self.num_usable}"
        slot = self._free.popleft()
        self._generation[slot] += 1
        self._is_used[slot] = True
        return slot

    def free(self, slot: int) -> None:
        assert 1 <= slot < self.num_slots, f"{slot=} is not in [1, {self.num_slots})"
        assert self._is_used[slot], f"{slot=} freed twice (generation {self._generation[slot]})"
        self._is_used[slot] = False
        self._free.append(slot)

    def generation(self, slot: int) -> int:
        """How many owners the slot has had, the present one included."""
        return self._generation[slot]

    def is_used(self, slot: int) -> bool:
        return self._is_used[slot]

    def is_current(self, slot: int, generation: int) -> bool:
        """Whether the slot still belongs to the owner that it had in ``generation``."""
        return self._is_used[slot] and self._generation[slot] == generation

    def check(self) -> None:
        """Raise AssertionError unless the free list holds exactly the unused slots, once each."""
        assert not self._is_used[NULL_SLOT], "the null slot has an owner"
        unused = [slot for slot in range(1, self.num_slots) if not self._is_used[slot]]
        assert sorted(self._free) == unused, f"free list {sorted(self._free)} is not the list of unused slots {unused}"
