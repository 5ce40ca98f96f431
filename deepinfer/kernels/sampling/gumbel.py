"""Counter-based Gumbel noise inside kernels: the definition of :mod:`deepinfer.sampling.random`, bit for bit.

SplitMix64 in 64-bit integers gives the bits, a table with linear interpolation the noise. Kernels that use it have to
be launched with ``enable_fp_fusion=False``: the interpolation rounds after each operation.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MANTISSA_BITS = 10
MIN_EXPONENT = 22
FRACTION_BITS = 24
HALF_SIZE = (63 - MIN_EXPONENT) << MANTISSA_BITS

_HALF_SIZE = tl.constexpr(HALF_SIZE)
_MASS_BITS = tl.constexpr(2**63 - 2**10)  # at most 53 significant bits: the conversion to a double is exact
_SMALLEST_MASS = tl.constexpr(1 << MIN_EXPONENT)
_POINT_SHIFT = tl.constexpr(52 - MANTISSA_BITS)
_FRACTION_SHIFT = tl.constexpr(52 - MANTISSA_BITS - FRACTION_BITS)
_FRACTION_MASK = tl.constexpr(2**FRACTION_BITS - 1)
_FIRST_POINT = tl.constexpr((1023 + MIN_EXPONENT) << MANTISSA_BITS)

GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_PURPOSE_STEP = tl.constexpr(0xD1342543DE82EF95)
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)
_LOW_HALF_LIMIT = tl.constexpr(0.37)  # the median is 0.3666
_BOUND_SLACK = tl.constexpr(0.01)


def pack_gumbel_table(values: Tensor, slopes: Tensor) -> Tensor:
    """Value and slope of each point in one 64-bit word, so that a look-up is one load.

    Args:
        values, slopes: float32 ``[points]``, from :func:`deepinfer.sampling.gumbel_table.gumbel_table`.
    Returns:
        int64 ``[points]``: the value's bits below the slope's.
    """
    assert values.shape == slopes.shape == (2 * HALF_SIZE,), f"{values.shape=} {slopes.shape=}"
    return torch.stack((values, slopes), dim=-1).contiguous().view(torch.int64).flatten()


@triton.jit
def mix64(x):
    """SplitMix64's finaliser on uint64."""
    x = (x ^ (x >> 30)) * _MIX_1
    x = (x ^ (x >> 27)) * _MIX_2
    return x ^ (x >> 31)


@triton.jit
def row_key(seed, position, PURPOSE: tl.constexpr):
    """The stream of one row, uint64; ``seed`` and ``position`` are int64 scalars."""
    key = mix64(seed.to(tl.uint64) + PURPOSE * _PURPOSE_STEP)
    return mix64(key + position.to(tl.uint64) * GOLDEN)


@triton.jit
def noise_bound(bits):
    """A cheap upper bound of the noise of uint64 ``bits``, float32.

    In the upper half of the table the noise is at most ``-log(v)`` with v the mass above it; the other half ends at
    the median.
    """
    above = ((bits >> 32) & 0x7FFFFFFF).to(tl.int32).to(tl.float32) * (2.0**-32)  # v, rounded down
    upper = tl.log2(above) * -0.6931471805599453 + _BOUND_SLACK
    return tl.where((bits >> 63) != 0, upper, _LOW_HALF_LIMIT)


@triton.jit
def gumbel_of_bits(bits, table_ptr, mask):
    """Gumbel noise of uint64 ``bits``, float32; what the table is not read for (``mask`` false) is 0."""
    half = (bits >> 63).to(tl.int32) * _HALF_SIZE
    mass = ((bits & _MASS_BITS) | _SMALLEST_MASS).to(tl.int64)
    double = mass.to(tl.float64).to(tl.int64, bitcast=True)  # exponent, then mantissa
    step = ((double >> _FRACTION_SHIFT) & _FRACTION_MASK).to(tl.int32)
    point = (double >> _POINT_SHIFT).to(tl.int32) - _FIRST_POINT + half
    entry = tl.load(table_ptr + point, mask=mask, other=0)
    value = entry.to(tl.int32).to(tl.float32, bitcast=True)
    slope = (entry >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    return step.to(tl.float32) * slope + value
