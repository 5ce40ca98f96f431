"""What is always true of a scheduler between two calls; each function raises AssertionError if it is not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Items

from deepinfer.scheduler.memory import SequenceMemory
from deepinfer.scheduler.sequence import Sequence, Status
from deepinfer.scheduler.step_draft import UncommittedPlan


def check_queues(waiting: Items[Sequence], running: Items[Sequence], live: Mapping[str, Sequence]) -> None:
    """Every live sequence is in exactly one queue, the one of its status, in order."""
    for queue, status in ((waiting, Status.WAITING), (running, Status.RUNNING)):
        order = [sequence.order for sequence in queue]
        assert order == sorted(order), f"{status.value} queue out of order: {order}"
        for sequence in queue:
            assert sequence.status is status, f"{sequence.request_id} is {sequence.status} in the {status.value} queue"
            assert live.get(sequence.request_id) is sequence, f"{sequence.request_id} is queued but not live"
    assert len(waiting) + len(running) == len(live), f"{len(waiting)=} + {len(running)=} != {len(live)=}"


def check_in_flight(running: Items[Sequence], uncommitted: Iterable[UncommittedPlan]) -> None:
    """In-flight rows and pending tokens of each sequence are those of its epoch in the uncommitted plans."""
    rows: Counter[Sequence] = Counter()
    pending: Counter[Sequence] = Counter()
    for record in uncommitted:
        for chunk, (sequence, epoch) in zip(record.plan.chunks, record.owners, strict=True):
            if sequence.epoch == epoch:
                rows[sequence] += chunk.num_rows
                pending[sequence] += chunk.num_sampled
    for sequence in running:
        name = sequence.request_id
        assert sequence.num_in_flight == rows[sequence], (
            f"{name}: {sequence.num_in_flight=}, plans hold {rows[sequence]}"
        )
        assert sequence.num_pending == pending[sequence], f"{name}: {sequence.num_pending=}, not {pending[sequence]}"
    strays = set(rows) - set(running)
    assert not strays, f"rows in flight of sequences that do not run: {[stray.request_id for stray in strays]}"


def check_memory(
    memory: SequenceMemory,
    running: Items[Sequence],
    uncommitted: Iterable[UncommittedPlan],
    pinned: Mapping[int, int] | None = None,
) -> None:
    """Every block's count equals its owners, every used slot has one owner, and nothing else is in use.

    Args:
        pinned: references that copies to and from a tier hold, by block.
    """
    memory.pool.check()
    memory.slots.check()
    owners: Counter[int] = Counter(pinned or {})
    slots: Counter[int] = Counter()
    for sequence in running:
        sequence.check(memory.pool.block_tokens)
        owners.update(sequence.block_table)
        slots[sequence.state_slot] += 1
        assert memory.slots.is_current(sequence.state_slot, sequence.state_generation), (
            f"{sequence.request_id}: stale slot"
        )
    coming = 0
    for record in uncommitted:
        for blocks, slot in record.releases:
            owners.update(blocks)
            slots[slot] += 1
            coming += len(blocks)
    assert coming == memory.num_coming, f"{memory.num_coming=}, releases hold {coming}"
    for block in range(1, memory.pool.num_blocks):
        refs = memory.pool.ref_count(block)
        assert refs == owners[block], f"{block=} has {refs=} and {owners[block]} owners"
    for slot in range(1, memory.slots.num_slots):
        assert slots[slot] == memory.slots.is_used(slot), f"{slot=} has {slots[slot]} owners"
