"""The pool of KV blocks: who holds which block, and which free block is handed out next."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Protocol

BLOCK_TOKENS = 128
"""Token positions per block, over all compressed streams of the model (spec 5.2)."""

NULL_BLOCK = 0
"""Padding rows write here; it is never handed out."""


class BlockOwner(Protocol):
    """Who knows which unreferenced blocks are worth keeping, and in which order they are not (the prefix index)."""

    def holds(self, block: int) -> bool:
        """Whether the content of ``block`` can be found again."""

    def released(self, block: int) -> None:
        """A block that it holds lost its last reference."""

    def evict(self) -> int:
        """Let go of the unreferenced block that is worth least, and name it."""


class BlockPool:
    """Reference counts over physical blocks and a first-in, first-out free list.

    The pool knows ids only; the tensors live in the worker. Block 0 is the null block. A freed block keeps its content
    until it is handed out again; :meth:`share` brings a free block back. Without an :attr:`owner` contents get lost in
    the order in which blocks became free. With one, blocks that it does not hold are handed out first, and after
    these the ones that it gives up.

    Only the scheduler side calls the methods that change state. They assert, because a wrong count is our own mistake.
    """

    def __init__(self, num_blocks: int, block_tokens: int = BLOCK_TOKENS) -> None:
        """Make a pool with all blocks free.

        Args:
            num_blocks: blocks in device memory, the null block included, so at least 2.
            block_tokens: tokens per block. Everything outside of tests uses the default.
        """
        assert num_blocks >= 2, f"{num_blocks=}: one null block and one usable block at least"
        assert block_tokens >= 1, f"{block_tokens=}"
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self.on_reuse: Callable[[int], None] | None = None
        """Called with the id of a free block just before it is handed out, when its old content is lost."""
        self.owner: BlockOwner | None = None
        """Set once, before the first block is handed out."""
        self._refs = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self._kept: set[int] = set()
        """Unreferenced blocks that the owner holds."""

    @property
    def num_usable(self) -> int:
        """Blocks that can be handed out at all."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out now, those with cached content included."""
        return len(self._free) + len(self._kept)

    @property
    def num_kept(self) -> int:
        """Free blocks with cached content."""
        return len(self._kept)

    @property
    def num_used(self) -> int:
        return self.num_usable - self.num_free

    @property
    def usage(self) -> float:
        """Share of the usable blocks that somebody holds, in [0, 1]."""
        return self.num_used / self.num_usable

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that cover ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_tokens)

    def ref_count(self, block: int) -> int:
        return self._refs[block]

    def allocate(self, count: int) -> list[int]:
        """Hand out ``count`` blocks with one reference each: first those without cached content, longest free first."""
        assert 0 <= count <= self.num_free, f"{count=} blocks asked for, num_free={self.num_free}"
        blocks = []
        for _ in range(count):
            if self._free:
                block, _none = self._free.popitem(last=False)
            else:
                assert self.owner is not None
                block = self.owner.evict()
                self._kept.remove(block)
            if self.on_reuse is not None:
                self.on_reuse(block)
            self._refs[block] = 1
            blocks.append(block)
        return blocks

    def share(self, block: int) -> None:
        """Add a reference (a second owner, or a pin). A free block leaves the free list with its content intact."""
        assert 1 <= block < self.num_blocks, f"{block=} is not in [1, {self.num_blocks})"
        if self._refs[block] == 0:
            if block in self._kept:
                self._kept.remove(block)
            else:
                del self._free[block]
        self._refs[block] += 1

    def free(self, blocks: Iterable[int]) -> None:
        """Drop one reference per listed block; those without any go to the end of the free list.

        A table is freed from its tail, so that the beginning of a sequence, which is more likely to be a prefix of
        another, survives longest.
        """
        for block in reversed(tuple(blocks)):
            assert 1 <= block < self.num_blocks, f"{block=} is not in [1, {self.num_blocks})"
            refs = self._refs[block] - 1
            assert refs >= 0, f"{block=} freed twice: it has ref=0"
            self._refs[block] = refs
            if refs == 0:
                if self.owner is not None and self.owner.holds(block):
                    self._kept.add(block)
                    self.owner.released(block)
                else:
                    self._free[block] = None

    def forget(self, block: int) -> None:
        """The owner does not hold ``block`` any more, for a reason other than :meth:`BlockOwner.evict`."""
        if block in self._kept:
            self._kept.remove(block)
            self._free[block] = None

    def check(self) -> None:
        """Raise AssertionError unless the free list holds exactly the usable blocks without a reference."""
        assert self._refs[NULL_BLOCK] == 0, f"the null block has ref={self._refs[NULL_BLOCK]}"
        unreferenced = {block for block in range(1, self.num_blocks) if self._refs[block] == 0}
        listed = set(self._free) | self._kept
        assert not set(self._free) & self._kept, f"blocks free twice: {sorted(set(self._free) & self._kept)}"
        if self.owner is not None:
            lost = [block for block in self._kept if not self.owner.holds(block)]
            assert not lost, f"blocks are kept for content that nobody can find: {lost}"
            stray = [block for block in self._free if self.owner.holds(block)]
            assert not stray, f"blocks with cached content count as empty: {stray}"
        assert listed == unreferenced, f"free list and counts differ in blocks {sorted(listed ^ unreferenced)}"
        negative = [block for block, refs in enumerate(self._refs) if refs < 0]
        assert not negative, f"negative reference counts in blocks {negative}"
