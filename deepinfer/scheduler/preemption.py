"""Who has to give up memory when blocks run out."""

from __future__ import annotations

from collections.abc import Sequence as Items

from deepinfer.scheduler.sequence import Sequence


def latest_behind(running: Items[Sequence], sequence: Sequence) -> Sequence | None:
    """The latest running sequence behind ``sequence``, or None.

    Args:
        running: in order, earliest first; holds ``sequence``.
        sequence: the one that needs blocks. Those before it are never touched, so the first always keeps its memory.

    A sequence that only waits for its last token is spared: its blocks come back by themselves.
    """
    for candidate in reversed(running):
        if candidate is sequence:
            return None
        if not candidate.is_at_limit:
            return candidate
    return None


def blocks_ending_soon(running: Items[Sequence], sequence: Sequence) -> int:
    """Blocks of other sequences that end as soon as the plans in flight are committed."""
    return sum(len(other.block_table) for other in running if other is not sequence and other.is_at_limit)
