"""Prompts that nobody asked for: so that no request is the first of its kind on a machine."""

from __future__ import annotations

from deepinfer.layers.caches import BLOCK_TOKENS
from deepinfer.messages import Chunk

_SHORTEST = 16


def typical_lengths(max_rows: int) -> list[int]:
    """Powers of two from 16 on, one less than each, and ``max_rows``, above which there is none.

    A prompt's length chooses among kernels at powers of two or near them, and Triton compiles apart for multiples of 16
    and other numbers.
    """
    powers = [2**power for power in range(max_rows.bit_length()) if _SHORTEST <= 2**power <= max_rows]
    return sorted({max_rows, *powers, *(power - 1 for power in powers)})


def null_prompt(num_rows: int, decoder_floor: int = 0) -> Chunk:
    """A whole prompt, its last row sampled, in the slot and the block that no sequence uses."""
    blocks = (0,) * -(-num_rows // BLOCK_TOKENS)
    return Chunk("", 0, (0,) * num_rows, (), blocks, 0, 1, True, decoder_floor=decoder_floor)
