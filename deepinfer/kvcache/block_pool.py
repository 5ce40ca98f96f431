"""The pool of KV blocks: who holds which block, and which free block is handed out next."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

BLOCK_TOKENS = 128
"""Token positions per block, over all compressed streams of the model (spec 5.2)."""

NULL_BLOCK = 0
"""Padding rows write here; it is never handed out."""


class BlockPool:
    """Reference counts over physical blocks and a first-in, first-out free list.

    The pool knows ids only; the tensors live in the worker. Block 0 is the null block. A freed block keeps its content
    until it is handed out again, and the free list is the order in which contents get lost: a prefix cache built on top
    calls :meth:`share` on a free block to bring it back, and sets :attr:`on_reuse` to hear of losses.

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
        self._refs = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))

    @property
    def num_usable(self) -> int:
        """Blocks that can be handed out at all."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_usable - len(self._free)

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
        """Hand out the ``count`` blocks that have been free for longest, each with one reference."""
        assert 0 <= count <= len(self._free), f"{count=} blocks asked for, num_free={len(self._free)}"
        blocks = []
        for _ in range(count):
            block, _none = self._free.popitem(last=False)
            if self.on_reuse is not None:
                self.on_reuse(block)
            self._refs[block] = 1
            blocks.append(block)
        return blocks

    def share(self, block: int) -> None:
        """Add a reference (a second owner, or a pin). A free block leaves the free list with its content intact."""
        assert 1 <= block < self.num_blocks, f"{block=} is not in [1, {self.num_blocks})"
        if self._refs[block] == 0:
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
                self._free[block] = None

    def check(self) -> None:
        """Raise AssertionError unless the free list holds exactly the usable blocks without a reference."""
        assert self._refs[NULL_BLOCK] == 0, f"the null block has ref={self._refs[NULL_BLOCK]}"
        unreferenced = {block for block in range(1, self.num_blocks) if self._refs[block] == 0}
        listed = set(self._free)
        assert listed == unreferenced, f"free list and counts differ in blocks {sorted(listed ^ unreferenced)}"
        negative = [block for block, refs in enumerate(self._refs) if refs < 0]
        assert not negative, f"negative reference counts in blocks {negative}"
