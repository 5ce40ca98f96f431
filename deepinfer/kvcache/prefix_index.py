"""The index of cached blocks: from the tokens of a prefix to the blocks that hold its entries."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from deepinfer.kvcache.block_keys import BlockKey, TokenChain
from deepinfer.kvcache.block_pool import BlockPool

DEPTH_OF_DOUBLE_COST = 1024
"""A block so many blocks deep costs twice as much to compute as a first one: the index scan grows with the depth."""


@dataclass(eq=False, slots=True)
class CachedBlock:
    """One full block that can be found by its tokens. A tree: the parent is the block before it."""

    key: BlockKey
    content: bytes
    """Ids and image hashes of its tokens; compared on every hit."""
    block: int
    """Physical block."""
    parent: CachedBlock | None
    depth: int
    """Blocks before it."""
    children: set[CachedBlock] = field(default_factory=set)
    worth: float = 0.0
    """Rank for eviction: the clock at the last use plus the cost of computing it again."""
    offer: int = -1
    """Number of its newest place in the queue of victims; older places mean nothing."""
    checkpoint: int | None = None
    """Where the state at the end of this block is kept in host memory, if it is."""

    def __repr__(self) -> str:
        return f"<CachedBlock {self.key.hex()[:8]} depth {self.depth} in block {self.block}>"


class PrefixIndex:
    """Owns which block holds which prefix, and gives blocks up when the pool needs them.

    Eviction weighs recency against the cost of computing a block again (the "greedy dual" rule: a block is worth the
    clock at its last use plus its cost, and the clock is the worth of the last victim). Only leaves can be victims, so
    a parent never goes before its child. Whoever holds a block holds all blocks before it, so what is unreferenced can
    always be given up from its leaves.
    """

    def __init__(self, pool: BlockPool) -> None:
        assert pool.owner is None, "the pool has an owner already"
        pool.owner = self
        self.pool = pool
        self.version = 0
        """Goes up with every change, so that look-ups can be remembered."""
        self.num_evictions = 0
        self._by_key: dict[BlockKey, CachedBlock] = {}
        self._by_block: dict[int, CachedBlock] = {}
        self._clock = 0.0
        self._victims: list[tuple[float, int, CachedBlock]] = []  # heap of (worth, offer, block)
        self._tick = itertools.count()
        self.freed_checkpoints: list[int] = []
        """Places of checkpoints whose block was lost, for their owner to collect."""

    def __len__(self) -> int:
        return len(self._by_key)

    # ---- finding and adding --------------------------------------------------------------------------------------

    def find(self, chain: TokenChain, index: int, parent: CachedBlock | None) -> CachedBlock | None:
        """Block ``index`` of ``chain`` behind ``parent``, or None. A key that collides is a miss."""
        return self._verified(chain.key(index), chain.content(index), parent)

    def walk(self, chain: TokenChain, max_blocks: int, known: Items[CachedBlock] = ()) -> list[CachedBlock]:
        """The longest cached prefix of ``chain``, of at most ``max_blocks`` blocks.

        Args:
            known: result of an earlier walk, so that only what changed since is looked at.
        """
        found = list(known[:max_blocks])
        while found and not (self.is_current(found[-1]) and found[-1].key == chain.key(len(found) - 1)):
            found.pop()  # a parent outlives its children, so what is before a current one is current
        parent = found[-1] if found else None
        for index in range(len(found), min(max_blocks, len(chain))):
            entry = self.find(chain, index, parent)
            if entry is None:
                break
            found.append(entry)
            parent = entry
        return found

    def walk_replayed(self, chain: TokenChain, max_blocks: int) -> list[CachedBlock]:
        """As :meth:`walk`; where exact blocks end, goes on over blocks that were computed after a bounded replay.

        Turns ``chain`` there if it does.
        """
        if chain.replayed_from is not None:
            found = self.walk(chain, max_blocks)
            if len(found) > chain.replayed_from:
                return found
        chain.turn(None)
        found = self.walk(chain, max_blocks)
        index = len(found)
        if index >= min(max_blocks, len(chain)):
            return found
        parent = found[-1] if found else None
        if self._verified(chain.replayed_key(index), chain.content(index), parent) is None:
            return found
        chain.turn(index)
        return self.walk(chain, max_blocks)

    def add(self, chain: TokenChain, index: int, parent: CachedBlock | None, block: int) -> CachedBlock | None:
        """Make block ``index`` of ``chain`` findable. Returns None if its key is taken: the first one stays."""
        return self.insert(chain.key(index), chain.content(index), parent, block)

    def insert(self, key: BlockKey, content: bytes, parent: CachedBlock | None, block: int) -> CachedBlock | None:
        """As :meth:`add`, of a block whose key is known: one that a tier below has kept."""
        if key in self._by_key:
            return None
        assert block not in self._by_block, f"{block=} holds {self._by_block[block]} already"
        assert self.pool.ref_count(block) > 0, f"{block=} is nobody's"
        entry = CachedBlock(key, content, block, parent, 0 if parent is None else parent.depth + 1)
        self._by_key[key] = self._by_block[block] = entry
        if parent is not None:
            parent.children.add(entry)
        self.version += 1
        return entry

    def is_current(self, entry: CachedBlock) -> bool:
        """Whether the entry can still be found."""
        return self._by_key.get(entry.key) is entry

    def take(self, entries: Iterable[CachedBlock]) -> list[int]:
        """Add a reference to each block. Returns their numbers."""
        blocks = []
        for entry in entries:
            self.pool.share(entry.block)
            blocks.append(entry.block)
        return blocks

    # ---- losing --------------------------------------------------------------------------------------------------

    def holds(self, block: int) -> bool:
        """Part of :class:`~deepinfer.kvcache.block_pool.BlockOwner`."""
        return block in self._by_block

    def released(self, block: int) -> None:
        """Part of :class:`~deepinfer.kvcache.block_pool.BlockOwner`: the last use of a block ends now."""
        entry = self._by_block[block]
        entry.worth = self._clock + 1 + entry.depth / DEPTH_OF_DOUBLE_COST
        self._offer(entry)

    def evict(self) -> int:
        """Part of :class:`~deepinfer.kvcache.block_pool.BlockOwner`."""
        while self._victims:
            worth, offer, entry = heapq.heappop(self._victims)
            if offer == entry.offer and self._is_victim(entry):
                self._clock = max(self._clock, worth)
                self.num_evictions += 1
                self._remove(entry)
                return entry.block
        raise AssertionError("no cached block can be given up, yet the pool counts on one")

    def forget(self, entry: CachedBlock) -> None:
        """Lose an entry and all that build on it, because its content is not to be trusted."""
        subtree = [entry] if self._by_key.get(entry.key) is entry else []
        for each in subtree:  # grows while it is walked: parents stand before their children
            subtree.extend(each.children)
        for each in reversed(subtree):
            self._remove(each)
            self.pool.forget(each.block)

    def _verified(self, key: BlockKey, content: bytes, parent: CachedBlock | None) -> CachedBlock | None:
        entry = self._by_key.get(key)
        if entry is None or entry.parent is not parent or entry.content != content:
            return None
        return entry

    def _is_victim(self, entry: CachedBlock) -> bool:
        is_ours = self._by_block.get(entry.block) is entry
        return is_ours and not entry.children and self.pool.ref_count(entry.block) == 0

    def _offer(self, entry: CachedBlock) -> None:
        if not self._is_victim(entry):
            return
        if len(self._victims) > 4 * len(self._by_key) + 64:
            self._victims = [each for each in self._victims if each[1] == each[2].offer and self._is_victim(each[2])]
            heapq.heapify(self._victims)
        entry.offer = next(self._tick)
        heapq.heappush(self._victims, (entry.worth, entry.offer, entry))

    def _remove(self, entry: CachedBlock) -> None:
        del self._by_key[entry.key], self._by_block[entry.block]
        if entry.checkpoint is not None:
            self.freed_checkpoints.append(entry.checkpoint)
            entry.checkpoint = None
        if entry.parent is not None:
            entry.parent.children.discard(entry)
            self._offer(entry.parent)
        self.version += 1

    def check(self) -> None:
        """Raise AssertionError if the tree is inconsistent or a kept block could not be given up."""
        assert set(self._by_block) == {entry.block for entry in self._by_key.values()}
        for key, entry in self._by_key.items():
            assert entry.key == key
            assert self._by_block[entry.block] is entry, f"{entry} is not in its block"
            parent = entry.parent
            if parent is not None:
                assert self._by_key.get(parent.key) is parent, f"{entry} outlived its parent"
                assert entry in parent.children, f"{parent} does not know {entry}"
                assert parent.depth == entry.depth - 1, f"{entry} hangs on {parent}"
                held, above = self.pool.ref_count(entry.block), self.pool.ref_count(parent.block)
                assert above >= held > 0 or held == 0, f"{entry} has {held} references, its parent {above}"
            assert all(self._by_key.get(child.key) is child for child in entry.children), f"{entry} has lost children"
        waiting = {entry for _worth, offer, entry in self._victims if offer == entry.offer}
        missing = [entry for entry in self._by_key.values() if self._is_victim(entry) and entry not in waiting]
        assert not missing, f"leaves that nobody would give up: {missing}"
