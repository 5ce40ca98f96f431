"""What a waiting sequence would find in the prefix cache, and where its computation would start."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from deepinfer.kvcache.block_pool import BlockPool
from deepinfer.kvcache.prefix_index import CachedBlock, PrefixIndex
from deepinfer.scheduler.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Hit:
    """Cached blocks for the beginning of a sequence. Decided by global KV alone: windows come back one way or another.

    Positions in tokens.
    """

    entries: tuple[CachedBlock, ...] = ()
    resume: int = 0
    """First row to run. Rows before the end of the hit read the cached entries and write none."""
    num_cached: int = 0
    """Tokens that count as found."""
    num_hit_tokens: int = 0
    """Tokens whose entries were found, whether or not their rows run again."""
    checkpoint: CachedBlock | None = None
    """The state at the end of this block is restored before the first row (``exact``)."""
    is_replay: bool = False
    """The rows from ``resume`` on begin with an empty window (``bounded``)."""


MISS = Hit()


def blocks_from_free(pool: BlockPool, sequence: Sequence, hit: Hit) -> int:
    """Free blocks that a start with ``hit`` uses up in the end: new ones, and cached ones that nobody holds."""
    held = sum(pool.ref_count(entry.block) > 0 for entry in hit.entries)
    return pool.blocks_for(sequence.num_prefill) - held


@dataclass(slots=True)
class HitFinder:
    """Looks prefixes up for one engine.

    Args:
        window: sliding window of the model, in tokens.
        decoder_keep: prompt tokens that the decoder layers run on; 0: all (spec 6.1).
    """

    index: PrefixIndex
    is_bounded: bool
    window: int
    decoder_keep: int = 0
    _seen: dict[Sequence, tuple[int, int, Hit]] = field(default_factory=dict)

    def is_exact(self, sequence: Sequence) -> bool:
        """Whether the sequence may only use what is bit-identical to a cold run."""
        return sequence.prefix.wants_exact or not self.is_bounded

    def find(self, sequence: Sequence) -> Hit:
        """The hit of a sequence that is about to start. At least its last token is always computed."""
        chain = sequence.prefix.chain
        if chain is None or not sequence.prefix.reads:
            return MISS
        seen = self._seen.get(sequence)
        if seen is not None and seen[:2] == (self.index.version, sequence.num_prefill):
            return seen[2]
        chain.extend(sequence.token_ids)
        max_blocks = (sequence.num_prefill - 1) // self.index.pool.block_tokens
        if self.is_exact(sequence):
            hit = self._exact(sequence, max_blocks, () if seen is None else seen[2].entries)
        else:
            hit = self._bounded(sequence, max_blocks)
        self._seen[sequence] = (self.index.version, sequence.num_prefill, hit)
        return hit

    def forget(self, sequence: Sequence) -> None:
        """The sequence started or ended."""
        self._seen.pop(sequence, None)

    def last_resume(self, sequence: Sequence) -> int:
        """Latest position at which an exact restart can begin.

        With truncation a state holds decoder windows of its own prompt only; so the rows that the decoder layers keep
        all have to run again.
        """
        if not self.decoder_keep:
            return sequence.num_prefill - 1
        return max(0, len(sequence.prompt_ids) - self.decoder_keep)

    def _exact(self, sequence: Sequence, max_blocks: int, known: Items[CachedBlock]) -> Hit:
        """Start at the last checkpoint inside the cached blocks (spec 6.3)."""
        chain, block_tokens = sequence.prefix.chain, self.index.pool.block_tokens
        assert chain is not None
        chain.turn(None)
        entries = self.index.walk(chain, max_blocks, known)
        limit = self.last_resume(sequence) // block_tokens
        checkpoint = next((entry for entry in reversed(entries[:limit]) if entry.checkpoint is not None), None)
        resume = 0 if checkpoint is None else (checkpoint.depth + 1) * block_tokens
        return Hit(tuple(entries), resume, resume, len(entries) * block_tokens, checkpoint)

    def _bounded(self, sequence: Sequence, max_blocks: int) -> Hit:
        """Start one window before the end of the cached blocks (spec 6.2)."""
        chain = sequence.prefix.chain
        assert chain is not None
        entries = self.index.walk_replayed(chain, max_blocks)
        end = len(entries) * self.index.pool.block_tokens
        resume = end - min(end, self.window)
        return Hit(tuple(entries), resume, end, end, is_replay=resume > 0)
