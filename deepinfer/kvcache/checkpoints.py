"""Which states are kept in host memory, at the end of which cached block. Bookkeeping only: bytes are the worker's."""

from __future__ import annotations

from collections import OrderedDict

from deepinfer.kvcache.prefix_index import CachedBlock, PrefixIndex


class Checkpoints:
    """A bounded number of places for states (window rings, compressor state, draft rings).

    When they are full, states that a later one of the same text has made dispensable go first, then the least used.

    A checkpoint belongs to a cached block: the state of a sequence that was computed exactly up to the end of it. When
    the block goes, so does the checkpoint. Copies run in the order of the plans that name them, so a place can be
    handed on as soon as nobody will name it again.
    """

    def __init__(self, index: PrefixIndex, num_places: int) -> None:
        self.index = index
        self.num_places = num_places
        self._free = list(range(num_places - 1, -1, -1))
        self._kept: OrderedDict[CachedBlock, int] = OrderedDict()  # least recently used first
        self._reserved: set[int] = set()
        self._pinned: set[CachedBlock] = set()

    def __len__(self) -> int:
        """Checkpoints that can be resumed from."""
        self._collect()
        return len(self._kept)

    def reserve(self) -> int | None:
        """A place to write a state to; the least used checkpoint goes if all are taken. None if there is no place."""
        self._collect()
        victim = next((entry for entry in self._kept if entry not in self._pinned), None)
        if not self._free and victim is not None:
            self.drop(victim)
        if not self._free:
            return None
        place = self._free.pop()
        self._reserved.add(place)
        return place

    def cancel(self, place: int) -> None:
        """Give a reserved place back unused."""
        self._reserved.remove(place)
        self._free.append(place)

    def attach(self, entry: CachedBlock, place: int) -> bool:
        """The reserved ``place`` holds the state at the end of ``entry``. Returns False if there was a checkpoint."""
        if entry.checkpoint is not None:
            self.cancel(place)
            return False
        self._reserved.remove(place)
        entry.checkpoint = place
        self._kept[entry] = place
        self.index.version += 1
        return True

    def demote_above(self, entry: CachedBlock) -> None:
        """Make the checkpoints above ``entry`` the first to go, up to the nearest fork.

        Whoever comes back to this text resumes at ``entry``; only a text that leaves it earlier needs an older state.
        """
        above = entry.parent
        while above is not None and len(above.children) == 1:
            if above.checkpoint is not None:
                self._kept.move_to_end(above, last=False)
            above = above.parent

    def use(self, entry: CachedBlock) -> int:
        """Place of the checkpoint of ``entry``, which has one; it counts as used now."""
        self._kept.move_to_end(entry)
        return self._kept[entry]

    def drop(self, entry: CachedBlock) -> None:
        """Forget the checkpoint of ``entry``, if it has one."""
        if entry in self._pinned:
            return
        place = self._kept.pop(entry, None)
        if place is not None:
            entry.checkpoint = None
            self._free.append(place)
            self.index.version += 1

    def pin(self, entry: CachedBlock) -> None:
        """Keep the checkpoint of ``entry`` where it is while it is copied. Its block has to be held, too."""
        assert entry in self._kept, f"{entry} has no checkpoint"
        self._pinned.add(entry)

    def unpin(self, entry: CachedBlock) -> None:
        """The copy has ended."""
        self._pinned.discard(entry)

    def _collect(self) -> None:
        """Take back the places of blocks that were lost."""
        if not self.index.freed_checkpoints:
            return
        lost = set(self.index.freed_checkpoints)
        self.index.freed_checkpoints.clear()
        for entry in [entry for entry, place in self._kept.items() if place in lost]:
            self._free.append(self._kept.pop(entry))

    def check(self) -> None:
        """Raise AssertionError unless every place is free, reserved or kept, once."""
        self._collect()
        places = [*self._free, *self._reserved, *self._kept.values()]
        assert sorted(places) == list(range(self.num_places)), f"places are lost or doubled: {sorted(places)}"
        for entry, place in self._kept.items():
            assert entry.checkpoint == place, f"{entry} has checkpoint {entry.checkpoint}, not {place}"
