"""Prompts that nobody asked for: so that no request is the first of its kind on a machine."""

from __future__ import annotations

from collections.abc import Sequence

from deepinfer.layers.caches import BLOCK_TOKENS
from deepinfer.messages import Chunk

_SHORTEST = 2
_MORE = (288, 576)
"""Where the shapes of hyper-connections and the tiles of products change beside these numbers
(``deepinfer/kernels/hyper_connection/launches_cuda.py``, ``deepinfer/kernels/dense/plans.py``)."""


def typical_lengths(max_rows: int, limits: Sequence[int] = ()) -> list[int]:
    """Powers of two and one and a half times as much, a few more, ``limits``, one less than each, one more than each
    limit, and ``max_rows``.

    A prompt's length chooses among kernels at such numbers, and Triton compiles apart for multiples of 16 and others.

    Args:
        limits: more lengths up to which one choice holds: those of a model's experts and hyper-connections. Between
            one of each kind there may be no other length.
    """
    steps = [step for power in range(max_rows.bit_length()) for step in (2**power, 3 * 2**power // 2)]
    steps += [*_MORE, *limits, *(limit + 1 for limit in limits)]
    reached = [step for step in steps if _SHORTEST <= step <= max_rows]
    return sorted({max_rows, *reached, *(step - 1 for step in reached)})


def null_prompt(num_rows: int, decoder_keep: int = 0) -> Chunk:
    """A whole prompt, its last row sampled, in the slot and the block that no sequence uses.

    Args:
        decoder_keep: rows that the decoder layers run on; 0: all.
    """
    blocks = (0,) * -(-num_rows // BLOCK_TOKENS)
    floor = max(0, num_rows - decoder_keep) if decoder_keep else 0
    return Chunk("", 0, (0,) * num_rows, (), blocks, 0, 1, True, decoder_floor=floor)


def null_prompts(max_rows: int, decoder_keep: int, limits: Sequence[int] = ()) -> list[Chunk]:
    """Prompts of :func:`typical_lengths`, and the first part of one that is longer than a step."""
    prompts = [null_prompt(num_rows, decoder_keep) for num_rows in typical_lengths(max_rows, limits)]
    if decoder_keep:
        prompts.append(prompts[-1]._replace(num_sampled=0, decoder_floor=2 * max_rows))
    return prompts
