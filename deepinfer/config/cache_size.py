"""How many blocks of KV memory to make, once the model's numbers and the free memory are known."""

from __future__ import annotations

import logging
from dataclasses import replace

from deepinfer.config.engine import EngineConfig
from deepinfer.config.resolve import Reason
from deepinfer.errors import CapacityError

logger = logging.getLogger(__name__)

NUM_NULL_BLOCKS = 1
"""Block 0 pads tables and is never handed out."""


def size_cache(
    config: EngineConfig, *, bytes_per_block: int, fixed_bytes: int, available_bytes: int, step_bytes: int = 0
) -> tuple[EngineConfig, Reason | None]:
    """``config`` with ``cache.num_blocks`` filled in, and why it is that many (None when it was given).

    Args:
        config: result of :func:`deepinfer.config.resolve.resolve`.
        bytes_per_block: one block over all streams of the model; 0 for a model of sliding windows only.
        fixed_bytes: what the caches take however many blocks there are: the state slots.
        available_bytes: free device memory before any cache is made.
        step_bytes: of it, what steps are going to take.
    Raises:
        CapacityError: not even one sequence of ``max_model_len`` fits, or the given number does not; the message has
            the arithmetic.
    """
    cache, limits = config.cache, config.scheduler
    if cache.num_blocks is not None:
        _check_given(config, cache.num_blocks, bytes_per_block, fixed_bytes, available_bytes - step_bytes)
        return config, None
    per_sequence = -(-limits.max_model_len // cache.block_tokens)
    wanted = limits.max_num_seqs * per_sequence + NUM_NULL_BLOCKS
    budget = int((available_bytes - step_bytes) * cache.memory_fraction) - fixed_bytes
    fitting = max(0, budget) // bytes_per_block if bytes_per_block else wanted * (budget >= 0)
    free = f"{_gib(available_bytes)} free"
    if step_bytes:
        free = f"({free} - {_gib(step_bytes)} for steps)"
    arithmetic = (
        f"({cache.memory_fraction:g} x {free} - {_gib(fixed_bytes)} for state slots)"
        f" / {bytes_per_block / 2**20:.3f} MiB per block = {fitting}"
    )
    if fitting < per_sequence + NUM_NULL_BLOCKS:
        raise CapacityError(
            f"KV memory holds {fitting} blocks: {arithmetic}",
            why=f"a sequence of max_model_len = {limits.max_model_len} tokens needs {per_sequence} and the null block",
            fix="lower max_model_len or max_num_seqs, raise memory_fraction, or free memory",
        )
    num_blocks = min(wanted, fitting)
    demand = f"{limits.max_num_seqs} sequences of {limits.max_model_len} tokens"
    if wanted <= fitting:
        why = f"{demand} and the null block; memory holds {fitting}"
    else:
        why = f"{arithmetic}, of {wanted} for {demand}"
    reason = Reason("cache.num_blocks", num_blocks, why)
    logger.info("%s", reason)
    return replace(config, cache=replace(cache, num_blocks=num_blocks)), reason


def _check_given(
    config: EngineConfig, num_blocks: int, bytes_per_block: int, fixed_bytes: int, available_bytes: int
) -> None:
    needed = num_blocks * bytes_per_block + fixed_bytes
    if needed > available_bytes:
        raise CapacityError(
            f"num_blocks is {num_blocks}",
            why=f"with the state slots they take {_gib(needed)}, and {_gib(max(0, available_bytes))} are free",
            fix="lower num_blocks or max_num_seqs, or leave num_blocks to 'auto'",
        )
    holds = (num_blocks - NUM_NULL_BLOCKS) * config.cache.block_tokens
    if holds < config.scheduler.max_model_len:
        logger.warning("num_blocks = %d holds %d tokens: longer sequences end early", num_blocks, holds)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.3f} GiB"
