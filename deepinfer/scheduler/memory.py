"""Blocks and state slots of running sequences: taking them, and giving them back at a safe time."""

from __future__ import annotations

from deepinfer.kvcache.block_pool import BlockPool
from deepinfer.kvcache.state_slots import StateSlots
from deepinfer.scheduler.sequence import Sequence
from deepinfer.scheduler.step_draft import UncommittedPlan


class SequenceMemory:
    """Moves blocks and slots between the pools and sequences.

    The rule of return: what a sequence holds while it has rows in an uncommitted plan goes back to the pools only when
    the newest such plan is committed. So no plan that the device may still be running names a block or a slot that
    another sequence got meanwhile.
    """

    def __init__(self, pool: BlockPool, slots: StateSlots) -> None:
        self.pool = pool
        self.slots = slots
        self.num_coming = 0
        """Blocks that wait for a commit to become free."""

    def missing_blocks(self, sequence: Sequence, end: int) -> int:
        """Blocks to allocate before rows up to ``end`` (exclusive) can run; negative when there is slack."""
        return self.pool.blocks_for(end) - len(sequence.block_table)

    def rows_within_reach(self, sequence: Sequence, start: int) -> int:
        """Rows from ``start`` on that fit the sequence's blocks and all free ones."""
        return (len(sequence.block_table) + self.pool.num_free) * self.pool.block_tokens - start

    def rows_in_table(self, sequence: Sequence, start: int) -> int:
        """Rows from ``start`` on that fit the blocks that the sequence has."""
        return len(sequence.block_table) * self.pool.block_tokens - start

    def open(self, sequence: Sequence) -> None:
        """Give the sequence a state slot."""
        sequence.state_slot = self.slots.allocate()
        sequence.state_generation = self.slots.generation(sequence.state_slot)

    def grow(self, sequence: Sequence, end: int) -> None:
        """Extend the block table to cover rows up to ``end`` (exclusive). There have to be enough free blocks."""
        missing = self.missing_blocks(sequence, end)
        if missing > 0:
            sequence.block_table.extend(self.pool.allocate(missing))

    def close(self, sequence: Sequence, holder: UncommittedPlan | None) -> None:
        """Take everything from the sequence. ``holder`` is the newest uncommitted plan with rows of it, if any."""
        blocks, slot = sequence.drop_memory()
        if holder is None:
            self._give_back(blocks, slot)
        else:
            holder.releases.append((blocks, slot))
            self.num_coming += len(blocks)

    def settle(self, committed: UncommittedPlan) -> None:
        """Return what waited for this plan's commit."""
        for blocks, slot in committed.releases:
            self.num_coming -= len(blocks)
            self._give_back(blocks, slot)

    def _give_back(self, blocks: list[int], slot: int) -> None:
        self.slots.free(slot)
        self.pool.free(blocks)
