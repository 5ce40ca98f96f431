"""Counter-based random numbers: a pure function of (seed, absolute position, purpose, index), and of nothing else.

Definition, with all integers modulo 2**64 and ``mix`` the finaliser of SplitMix64 (Steele et al. 2014)::

    key  = mix(mix(seed + purpose * 0xD1342543DE82EF95) + position * 0x9E3779B97F4A7C15)
    bits = mix(key + (index + 1) * 0x9E3779B97F4A7C15)

so one (seed, position, purpose) is a SplitMix64 stream of its own over the vocabulary. From ``bits``:

- uniform: the top 53 bits times 2**-53, a double in [0, 1);
- Gumbel: the top bit names a half of the table in :mod:`deepinfer.sampling.gumbel_table`; the other 63, without their
  lowest 10 and with bit 22 set, are the mass ``v * 2**64``. Below its leading one, ten bits pick the point and the next
  24 (a fraction f) the way to the following one: ``value + f * slope``, in float32, rounded after each operation.

Everything is integer arithmetic or exactly rounded, so no device, batch shape or library version changes a bit. The
definition is frozen by known answers in the tests: a new one would change every seeded result that users have kept.
"""

from __future__ import annotations

import enum

import torch
from torch import Tensor

from deepinfer.sampling.gumbel_table import FRACTION_BITS, HALF_SIZE, MANTISSA_BITS, MIN_EXPONENT, gumbel_table

_MASK64 = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_PURPOSE_STEP = 0xD1342543DE82EF95
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_CHILD_STEP = 0xA0761D6478BD642F  # odd, so that children of one seed differ
_CPU_SLAB = 1 << 15  # elements at a time on a CPU: the temporaries stay in its L2 cache
_DEVICE_SLAB = 1 << 24  # elements at a time elsewhere: bounds the temporaries to half a GiB


class Purpose(enum.IntEnum):
    """What a draw is for. Draws for different purposes are independent."""

    TARGET = 0
    """The token at a position. A draft that is coupled to the target uses the same noise."""
    ACCEPT = 1
    """The accept test of rejection sampling."""
    RESIDUAL = 2
    """The token after a rejected draft."""
    DRAFT = 3
    """Drafts of a rejection sampler."""


def as_int64(number: int) -> int:
    """The signed 64-bit integer with the same low 64 bits; tensors have no unsigned arithmetic."""
    number &= _MASK64
    return number - 2**64 if number >= 2**63 else number


def mix64(number: int) -> int:
    """SplitMix64's finaliser on a Python int, modulo 2**64: a bijection whose output bits look independent."""
    number &= _MASK64
    number = ((number ^ (number >> 30)) * _MIX_1) & _MASK64
    number = ((number ^ (number >> 27)) * _MIX_2) & _MASK64
    return number ^ (number >> 31)


def child_seed(seed: int, index: int) -> int:
    """Seed of output ``index`` of a request with several outputs; child 0 has the seed itself. In ``[0, 2**64)``."""
    return seed & _MASK64 if index == 0 else mix64(mix64(seed) + index * _CHILD_STEP)


def _mix_(x: Tensor) -> Tensor:
    """:func:`mix64` of every element of an int64 tensor, in place."""
    for shift, factor in ((30, _MIX_1), (27, _MIX_2), (31, None)):
        high = x >> shift
        high &= (1 << (64 - shift)) - 1  # an arithmetic shift copies the sign down; drop the copies
        x ^= high
        if factor is not None:
            x *= as_int64(factor)
    return x


def row_keys(seeds: Tensor, positions: Tensor, purpose: Purpose) -> Tensor:
    """The stream of each row. All int64 ``[rows]``, on any device; no synchronisation."""
    keys = _mix_(seeds + as_int64(purpose * _PURPOSE_STEP))
    keys += positions * as_int64(_GOLDEN)
    return _mix_(keys)


def uniform(seeds: Tensor, positions: Tensor, purpose: Purpose, count: int = 1) -> Tensor:
    """Uniform numbers in [0, 1), multiples of 2**-53.

    Args:
        seeds, positions: int64 ``[rows]``.
        count: numbers per row; number i does not depend on ``count``.
    Returns:
        float64 ``[rows, count]``.
    """
    indices = torch.arange(count, device=seeds.device)
    bits = _bits(row_keys(seeds, positions, purpose)[:, None], indices)
    return ((bits >> 11) & (2**53 - 1)).to(torch.float64).mul_(2.0**-53)


def gumbel_noise(seeds: Tensor, positions: Tensor, vocab_size: int, purpose: Purpose = Purpose.TARGET) -> Tensor:
    """Standard Gumbel noise for every token of every row.

    Args:
        seeds: int64 ``[rows]``, see :func:`as_int64`.
        positions: int64 ``[rows]``, absolute position that the sampled token will have.
        vocab_size: number of tokens; the noise of a token does not depend on it.
    Returns:
        float32 ``[rows, vocab_size]``, between -3.4 and 29.2.
    """
    keys = row_keys(seeds, positions, purpose)
    rows = keys.shape[0]
    noise = torch.empty((rows, vocab_size), dtype=torch.float32, device=keys.device)
    slab = _CPU_SLAB if keys.device.type == "cpu" else _DEVICE_SLAB
    columns = min(vocab_size, slab)
    step = max(1, slab // max(columns, 1))
    for left in range(0, vocab_size, columns):
        right = min(left + columns, vocab_size)
        indices = torch.arange(left, right, device=keys.device)
        for top in range(0, rows, step):
            bits = _bits(keys[top : top + step, None], indices)
            noise[top : top + step, left:right] = gumbel_of_bits(bits)
    return noise


def gumbel_noise_at(seeds: Tensor, positions: Tensor, token_ids: Tensor, purpose: Purpose = Purpose.TARGET) -> Tensor:
    """The noise of some tokens only: ``gumbel_noise(...).gather(1, token_ids)``, bit for bit.

    Args:
        token_ids: int64 ``[rows, count]``.
    Returns:
        float32 ``[rows, count]``.
    """
    return gumbel_of_bits(_bits(row_keys(seeds, positions, purpose)[:, None], token_ids))


def _bits(keys: Tensor, indices: Tensor) -> Tensor:
    """64 random bits per (row, index): int64, the broadcast shape of both."""
    return _mix_(keys + (indices + 1) * as_int64(_GOLDEN))


def gumbel_of_bits(bits: Tensor) -> Tensor:
    """Map 64 random bits to Gumbel noise. int64 to float32 of the same shape; ``bits`` is overwritten."""
    values, slopes = gumbel_table(bits.device)
    half = bits >> 63  # -1 or 0
    half &= HALF_SIZE
    bits &= 2**63 - 2**10  # at most 53 significant bits: the conversion below is exact
    bits |= 1 << MIN_EXPONENT
    double = bits.to(torch.float64).view(torch.int64)  # exponent in bits 52 to 62, then the mantissa
    fraction = ((double >> (52 - MANTISSA_BITS - FRACTION_BITS)) & (2**FRACTION_BITS - 1)).to(torch.float32)
    point = double
    point >>= 52 - MANTISSA_BITS
    point -= (1023 + MIN_EXPONENT) << MANTISSA_BITS
    point += half
    flat = point.view(-1)
    fraction *= slopes.index_select(0, flat).view_as(fraction)
    fraction += values.index_select(0, flat).view_as(fraction)
    return fraction
