"""Which requests are accepted at all, and which waiting sequences may start."""

from __future__ import annotations

from collections.abc import Sequence as Items

from deepinfer.config.scheduler import SchedulerConfig
from deepinfer.errors import CapacityError, RequestError
from deepinfer.kvcache.block_pool import BlockPool
from deepinfer.scheduler.sequence import Sequence

_POOL_SHARE = 64


class PromptTooLongError(RequestError, CapacityError):
    """A prompt that can never run here.

    Attributes:
        length: tokens of the prompt.
        limit: most tokens that a prompt may have.
    """

    def __init__(self, length: int, limit: int, *, why: str, fix: str) -> None:
        super().__init__("prompt length", length, why=why, fix=fix)
        self.length = length
        self.limit = limit


def row_limit(sequence: Sequence, config: SchedulerConfig) -> int:
    """Most rows that the sequence may ever have: its own limit, and at most the scheduler's."""
    if sequence.max_model_len is None:
        return config.max_model_len
    return min(sequence.max_model_len, config.max_model_len)


def refuse_impossible(sequence: Sequence, config: SchedulerConfig, pool: BlockPool) -> None:
    """Raise :class:`PromptTooLongError` for a prompt that no amount of waiting would let run."""
    length = len(sequence.prompt_ids)
    limit = row_limit(sequence, config)
    if length > limit:
        raise PromptTooLongError(
            length,
            limit,
            why=f"max_model_len lets a sequence compute {limit} tokens, and all of a prompt are computed",
            fix="shorten the prompt or raise max_model_len",
        )
    rows = min(length + 1, limit)
    if pool.blocks_for(rows) > pool.num_usable:
        room = pool.num_usable * pool.block_tokens
        raise PromptTooLongError(
            length,
            room - 1,
            why=f"the KV cache holds {room} tokens ({pool.num_usable} blocks of {pool.block_tokens}) in all, "
            "and the first output token needs a place too",
            fix="shorten the prompt or give the KV cache more memory",
        )


def headroom_blocks(pool: BlockPool, num_running: int) -> int:
    """Blocks that a newcomer has to leave free, for the growth of those that run.

    Without it a sequence that was preempted for want of a block would start again at once and lose its memory to the
    next block that an older one needs.
    """
    return min(num_running, -(-pool.num_usable // _POOL_SHARE))


def may_look_further(skipped: Items[Sequence], config: SchedulerConfig) -> bool:
    """Whether a sequence behind the ``skipped`` ones may start before them."""
    if len(skipped) > config.max_lookahead:
        return False
    return all(sequence.num_bypassed < config.max_bypasses for sequence in skipped)
