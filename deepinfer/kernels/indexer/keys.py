"""Reading index keys inside kernels: which entries a row scores, where they are, and their values (spec 4.7, 5.2)."""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer.kernels.formats.e2m1 import e2m1_value


@triton.jit
def num_scored(num_visible, BLOCK_SIZE: tl.constexpr, NUM_BLOCKS: tl.constexpr):
    """How many entries a row scores: all visible ones, or those of its candidate blocks (``NUM_BLOCKS`` > 0).

    The blocks were chosen for the same number of visible entries, so the last visible block is the last of them, and
    the only one that may be incomplete.
    """
    if NUM_BLOCKS == 0:
        return num_visible
    blocks = (num_visible + BLOCK_SIZE - 1) // BLOCK_SIZE
    return num_visible - tl.maximum(blocks - NUM_BLOCKS, 0) * BLOCK_SIZE


@triton.jit
def entry_of(index, inside, blocks_ptr, BLOCK_SIZE: tl.constexpr, NUM_BLOCKS: tl.constexpr):
    """Logical entry behind the ``index``-th scored one. ``blocks_ptr``: this row's candidate blocks."""
    if NUM_BLOCKS == 0:
        return index
    return tl.load(blocks_ptr + index // BLOCK_SIZE, inside, other=0) * BLOCK_SIZE + index % BLOCK_SIZE


@triton.jit
def slot_of(entry, inside, table_ptr, PER_BLOCK: tl.constexpr):
    """Physical slot (int64) of a logical entry. ``table_ptr``: the block table of its sequence."""
    block = tl.load(table_ptr + entry // PER_BLOCK, inside, other=0).to(tl.int64)
    return block * PER_BLOCK + entry % PER_BLOCK


@triton.jit
def load_key_words(keys_ptr, slots, inside, WIDTH: tl.constexpr, WORDS: tl.constexpr, NIBBLES: tl.constexpr):
    """Packed codes and scale words of some keys, as they are stored.

    Args:
        keys_ptr: the store, in words of ``NIBBLES`` codes: int32 (8) or, where records are no multiple of 4 bytes,
            uint8 (2). slots, inside: ``[M]``; outside nothing is read.
        WIDTH: channels. WORDS: words of codes, rounded up to a power of two.
    Returns:
        codes and scales, ``[M, WORDS]`` int32 each; the scale word of a code word is the one that holds its scale.
    """
    num_words: tl.constexpr = WIDTH // NIBBLES
    record_words: tl.constexpr = (WIDTH // 2 + WIDTH // 32) * 2 // NIBBLES
    word = tl.arange(0, WORDS)[None, :]
    is_read = inside[:, None] & (word < num_words)
    # The compiler takes slot * 17 for a multiple of 16 (seen in Triton 3.6) and would load 16 bytes at odd words.
    record_ptr = keys_ptr + tl.multiple_of(slots[:, None] * record_words, (1, 1))
    scale_word = num_words + (word * NIBBLES // 32) * 2 // NIBBLES
    codes = tl.load(record_ptr + word, is_read, other=0).to(tl.int32)
    scales = tl.load(record_ptr + scale_word, is_read, other=0).to(tl.int32)
    return codes, scales


@triton.jit
def _nibble(codes, scale, index: tl.constexpr):
    return (e2m1_value(codes >> (4 * index)) * scale).to(tl.bfloat16)


@triton.jit
def key_values(codes, scales, ROWS: tl.constexpr, WORDS: tl.constexpr, NIBBLES: tl.constexpr):
    """Values ``[ROWS, WORDS * NIBBLES]`` bf16 (exact) of what :func:`load_key_words` read, in channel order."""
    if NIBBLES == 8:
        byte = tl.arange(0, WORDS)[None, :] // 4 % 4
        scale = (((scales >> (8 * byte)) & 255) << 23).to(tl.float32, bitcast=True)
        # A join adds the fastest axis: the outermost tells even from odd channels.
        even = tl.join(
            tl.join(_nibble(codes, scale, 0), _nibble(codes, scale, 4)),
            tl.join(_nibble(codes, scale, 2), _nibble(codes, scale, 6)),
        )
        odd = tl.join(
            tl.join(_nibble(codes, scale, 1), _nibble(codes, scale, 5)),
            tl.join(_nibble(codes, scale, 3), _nibble(codes, scale, 7)),
        )
    else:
        scale = ((scales & 255) << 23).to(tl.float32, bitcast=True)
        even = _nibble(codes, scale, 0)
        odd = _nibble(codes, scale, 1)
    return tl.reshape(tl.join(even, odd), [ROWS, WORDS * NIBBLES])
