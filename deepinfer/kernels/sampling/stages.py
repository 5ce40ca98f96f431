"""What the sampler's launches share: order keys of tokens, their scores, masses and noise, and who is last of a row."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from deepinfer.kernels.sampling.gumbel import gumbel_of_bits

LOWEST = tl.constexpr(-(2**63))
_ID_MASK = tl.constexpr(2**32 - 1)
_MASS_SCALE = tl.constexpr(2.0**44)
_HAS_LIBDEVICE = tl.constexpr(not triton.knobs.runtime.interpret)


@triton.jit
def ordinal_of(value):
    """Float32 as an int32 of the same order; both zeros are equal."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(ordinal):
    """Inverse of :func:`ordinal_of`."""
    bits = ordinal ^ ((ordinal >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def key_of(value, ids):
    """Distinct int64 keys in the order of ``value``, of equals the lower id first (largest)."""
    return (ordinal_of(value).to(tl.int64) << 32) + (ids.to(tl.int64) ^ _ID_MASK)


@triton.jit
def id_of(key):
    return ((key & _ID_MASK) ^ _ID_MASK).to(tl.int32)


@triton.jit
def scores_of(x, row_max, temperature, min_log_p):
    """Log-probabilities up to a constant, rounded as the reference rounds them."""
    scores = x - row_max
    if temperature != 1.0:
        scores = tl.div_rn(scores, temperature)
    return tl.where(scores < min_log_p, float("-inf"), scores)


@triton.jit
def load_logits(row_ptr, ids, vocab, mask_ptr, MASKED: tl.constexpr):
    """Logits of tokens, -inf outside the vocabulary and where the row's mask has no bit."""
    x = tl.load(row_ptr + ids, mask=ids < vocab, other=float("-inf"))
    if MASKED:
        word = tl.load(mask_ptr + ids // 32, mask=ids < vocab, other=0)
        x = tl.where(((word >> (ids % 32)) & 1) != 0, x, float("-inf"))
    return x


@triton.jit
def mask_of(mask_ptr, mask_row_ptr, row, vocab, MASKED: tl.constexpr):
    """The mask of a row."""
    if MASKED:
        mask_ptr += tl.load(mask_row_ptr + row).to(tl.int64) * ((vocab + 31) // 32)
    return mask_ptr


@triton.jit
def masses_of(scores):
    """Integer masses. libdevice has the ``exp`` that torch uses on a GPU; Triton's own is less accurate."""
    if _HAS_LIBDEVICE:
        probability = libdevice.exp(scores)
    else:
        probability = tl.exp(scores)
    return (probability * _MASS_SCALE).to(tl.int64)


@triton.jit
def arrive(counter_ptr, splits):
    """Count this program; whether it is the last one of its row. What others stored before is then visible."""
    tl.debug_barrier()
    is_last = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu") == splits - 1
    if is_last:
        tl.store(counter_ptr, 0)
    tl.debug_barrier()
    return is_last


@triton.jit
def row_maximum(maxima_ptr, row, num_blocks, splits, SPLITS: tl.constexpr):
    """Key of the largest logit of a row."""
    each = tl.arange(0, SPLITS)
    return tl.max(tl.load(maxima_ptr + row * num_blocks + each, mask=each < splits, other=LOWEST), axis=0)


@triton.jit
def race_of_block(bits, scores, ids, allowed, table_ptr):
    """Race keys of a block, lowest where not allowed."""
    race = gumbel_of_bits(bits, table_ptr, allowed) + scores
    return tl.where(allowed, key_of(race, ids), LOWEST)
