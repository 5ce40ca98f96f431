"""Quantile table of the standard Gumbel distribution, from IEEE basic arithmetic only.

``log`` differs in its last bit between libraries and devices, and one flipped bit can flip a token. So the noise is
read from a table with linear interpolation. The table itself is made with +, -, * and / in double precision, which IEEE
754 rounds the same way everywhere; hence the same bits on every machine.

Layout: two halves of ``OCTAVES * 2**MANTISSA_BITS`` points. Half 0 holds the quantiles ``g(v)``, half 1 ``g(1 - v)``,
both at ``v = 2**(e - 64) * (1 + m / 2**MANTISSA_BITS)`` for e = MIN_EXPONENT..62 and m = 0..2**MANTISSA_BITS - 1, where
``g(u) = -log(-log(u))``. The spacing follows ``v``, so both tails are resolved down to a mass of 2**-42. Between points
the linear interpolation is off by less than 1.3e-7, about the rounding of a float32 of that size.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch

MANTISSA_BITS = 10
MIN_EXPONENT = 22
OCTAVES = 63 - MIN_EXPONENT
HALF_SIZE = OCTAVES << MANTISSA_BITS
FRACTION_BITS = 24
"""The place between two points is an integer of this many bits (exact in float32)."""

_LN2 = 0.6931471805599453
_SERIES_TERMS = 24  # arguments are at most 1/3 in size, so the remainder is below 3**-48


def _two_atanh(y: np.ndarray) -> np.ndarray:
    """``2 * atanh(y) = log((1 + y) / (1 - y))`` for ``|y| <= 1/3``, by its power series (Horner)."""
    square = y * y
    total = np.zeros_like(y)
    for term in range(_SERIES_TERMS, 0, -1):
        total = total * square + 1.0 / (2 * term - 1)
    return 2.0 * y * total


def _log(x: np.ndarray) -> np.ndarray:
    """Natural logarithm of positive doubles."""
    mantissa, exponent = np.frexp(x)  # mantissa in [0.5, 1)
    return exponent * _LN2 + _two_atanh((mantissa - 1.0) / (mantissa + 1.0))


def _quantiles() -> tuple[np.ndarray, np.ndarray]:
    """``g(v)`` and ``g(1 - v)`` at all points of a half and at its end, ``v = 1/2``; float64."""
    exponent = np.repeat(np.arange(MIN_EXPONENT, 63), 1 << MANTISSA_BITS)
    mantissa = np.tile(np.arange(1 << MANTISSA_BITS), OCTAVES) / (1 << MANTISSA_BITS)
    v = np.append(np.ldexp(1.0 + mantissa, exponent - 64), 0.5)
    low = -_log(-_log(v))
    high = -_log(_two_atanh(v / (2.0 - v)))  # -log(1 - v) without the cancellation
    return low, high


@lru_cache
def gumbel_table(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Value and slope at every point.

    Returns:
        Two float32 tensors ``[2 * HALF_SIZE]`` on ``device``: the quantile, and the difference to the next point per
        ``2**-FRACTION_BITS`` of the way.
    """
    values, slopes = [], []
    for half in _quantiles():
        values.append(half[:-1])
        slopes.append(np.diff(half) * 2.0**-FRACTION_BITS)
    return tuple(torch.from_numpy(np.concatenate(part).astype(np.float32)).to(device) for part in (values, slopes))  # type: ignore[return-value]
