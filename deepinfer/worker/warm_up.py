"""Prompts that nobody asked for: so that no request is the first of its kind on a machine."""

from __future__ import annotations

from deepinfer.layers.caches import BLOCK_TOKENS
from deepinfer.messages import Chunk

_SHORTEST = 16


def typical_lengths(max_rows: int) -> list[int]:
    """Powers of two from 16 on and one and a half times as much, one less than each, and ``max_rows``, the largest.

    A prompt's length chooses among kernels at such numbers, and Triton compiles apart for multiples of 16 and others.
    """
    steps = [step for power in range(max_rows.bit_length()) for step in (2**power, 3 * 2**power // 2)]
    reached = [step for step in steps if _SHORTEST <= step <= max_rows]
    return sorted({max_rows, *reached, *(step - 1 for step in reached)})


def null_prompt(num_rows: int, decoder_floor: int = 0) -> Chunk:
    """A whole prompt, its last row sampled, in the slot and the block that no sequence uses."""
    blocks = (0,) * -(-num_rows // BLOCK_TOKENS)
    return Chunk("", 0, (0,) * num_rows, (), blocks, 0, 1, True, decoder_floor=decoder_floor)
