"""Copies between the device's prefix cache and a tier below it: what is pinned, on its way, and has arrived."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from deepinfer.kvcache.block_keys import BlockKey, TokenChain
from deepinfer.kvcache.checkpoints import Checkpoints
from deepinfer.kvcache.prefix_index import CachedBlock, PrefixIndex
from deepinfer.kvcache.tier import CacheTier, RecordKind, TierRecord

MAX_COPIES_OUT = 256
"""Records on their way out at a time; what becomes full meanwhile is not offered. Dropping is better than stalling."""


def prefix_of(entry: CachedBlock) -> list[CachedBlock]:
    """All blocks up to and with ``entry``, first one first."""
    found = []
    each: CachedBlock | None = entry
    while each is not None:
        found.append(each)
        each = each.parent
    return found[::-1]


@dataclass(slots=True)
class _Fetch:
    """A run of blocks, and perhaps the state at its end, on the way in."""

    parent: CachedBlock | None
    """The block before the first one."""
    blocks: list[TierRecord]
    state: TierRecord | None
    missing: set[TierRecord]
    has_failed: bool = False


class TierTraffic:
    """Writes new blocks and states through to a tier, and brings back what a waiting sequence could use.

    A block or state on its way out is pinned, so that nobody overwrites it under the copy; places on their way in
    belong to the fetch until all of it has arrived, and only then can be found.
    """

    def __init__(self, tier: CacheTier, index: PrefixIndex, checkpoints: Checkpoints) -> None:
        self.tier = tier
        self.index = index
        self.checkpoints = checkpoints
        self.num_dropped = 0
        """Records that were not offered because too many were on their way."""
        self._out: dict[TierRecord, CachedBlock] = {}
        self._fetches: dict[bytes, _Fetch] = {}
        """By the key of the last block."""

    def offer_block(self, entry: CachedBlock) -> None:
        """A block became full."""
        self._put(TierRecord(RecordKind.BLOCK, entry.key, entry.content, entry.block), entry)

    def offer_state(self, entry: CachedBlock) -> None:
        """A checkpoint was attached to ``entry``."""
        if entry.checkpoint is not None:
            self._put(TierRecord(RecordKind.STATE, entry.key, entry.content, entry.checkpoint), entry)

    def _put(self, record: TierRecord, entry: CachedBlock) -> None:
        if record in self._out or self.tier.holds(record.kind, record.key, record.content):
            return
        if len(self._out) >= MAX_COPIES_OUT:
            self.num_dropped += 1
            return
        # With all blocks before it: whoever holds a block holds its prefix, or what is free could not be given up.
        self.index.take(prefix_of(entry))
        if record.kind is RecordKind.STATE:
            self.checkpoints.pin(entry)
        self._out[record] = entry
        self.tier.put(record)

    def fetch(self, chain: TokenChain, found: list[CachedBlock], max_blocks: int, num_spare: int) -> bool:
        """Bring in what the tier holds of ``chain`` behind ``found``. Returns whether something is on its way.

        Args:
            num_spare: blocks that may be used for it.
        """
        first, end = len(found), len(found)
        limit = min(max_blocks, len(chain), first + num_spare)
        while end < limit and self.tier.holds(RecordKind.BLOCK, chain.key(end), chain.content(end)):
            end += 1
        if end == first:
            return False
        key = chain.key(end - 1)
        if key in self._fetches:
            return True
        blocks = self.index.pool.allocate(end - first)
        records = [
            TierRecord(RecordKind.BLOCK, chain.key(at), chain.content(at), block)
            for at, block in enumerate(blocks, start=first)
        ]
        state = self._place_for_state(key, chain.content(end - 1))
        wanted = [*records, *([] if state is None else [state])]
        self._fetches[key] = _Fetch(found[-1] if found else None, records, state, set(wanted))
        for record in wanted:
            self.tier.get(record)
        return True

    def _place_for_state(self, key: BlockKey, content: bytes) -> TierRecord | None:
        if not self.tier.holds(RecordKind.STATE, key, content):
            return None
        place = self.checkpoints.reserve()
        return None if place is None else TierRecord(RecordKind.STATE, key, content, place)

    def collect(self) -> None:
        """Take in the copies that have ended: unpin what left, make findable what arrived."""
        for record, is_good in self.tier.take_done():
            entry = self._out.pop(record, None)
            if entry is not None:
                if record.kind is RecordKind.STATE:
                    self.checkpoints.unpin(entry)
                self.index.pool.free([each.block for each in prefix_of(entry)])
                continue
            for key, fetch in list(self._fetches.items()):
                if record in fetch.missing:
                    fetch.missing.remove(record)
                    fetch.has_failed |= not is_good
                    if not fetch.missing:
                        del self._fetches[key]
                        self._arrive(fetch)

    def _arrive(self, fetch: _Fetch) -> None:
        """All of a fetch is there. Whatever was lost or computed meanwhile makes it useless rather than wrong."""
        parent = fetch.parent
        is_linked = not fetch.has_failed and (parent is None or self.index.is_current(parent))
        for record in fetch.blocks:
            if is_linked:
                parent = self.index.insert(record.key, record.content, parent, record.place)
                is_linked = parent is not None
        if fetch.state is not None:
            if is_linked and parent is not None:
                self.checkpoints.attach(parent, fetch.state.place)
            else:
                self.checkpoints.cancel(fetch.state.place)
        self.index.pool.free([record.place for record in fetch.blocks])

    def pinned(self) -> Counter[int]:
        """References that copies hold, by block."""
        held = Counter(each.block for entry in self._out.values() for each in prefix_of(entry))
        for fetch in self._fetches.values():
            held.update(record.place for record in fetch.blocks)
        return held
