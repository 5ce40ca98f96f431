"""Confidence intervals: what a count of samples can and cannot tell. All of them are for 95 % confidence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_Z = 1.959963984540054
"""Standard deviations on both sides that hold 95 % of a normal distribution."""
_RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate and the 95 % interval around it."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class PairCounts:
    """Two yes-or-no results on the same samples."""

    both: int
    only_a: int
    only_b: int
    neither: int

    @classmethod
    def of(cls, a: Sequence[bool], b: Sequence[bool]) -> PairCounts:
        """Count; both sequences are in the order of the samples."""
        counts = [0, 0, 0, 0]
        for left, right in zip(a, b, strict=True):
            counts[2 * left + right] += 1
        return cls(both=counts[3], only_a=counts[2], only_b=counts[1], neither=counts[0])

    @property
    def n(self) -> int:
        return self.both + self.only_a + self.only_b + self.neither


def wilson(successes: int, n: int) -> Interval:
    """Interval of a share from ``successes`` of ``n``; [0, 1] with NaN in the middle without samples.

    Source: Wilson 1927; it keeps its promise near 0 and 1, where the textbook interval has no width.
    """
    assert 0 <= successes <= n, f"{successes=} of {n=}"
    if n == 0:
        return Interval(math.nan, 0.0, 1.0)
    share = successes / n
    scale = 1 + _Z**2 / n
    centre = (share + _Z**2 / (2 * n)) / scale
    half = _Z * math.sqrt(share * (1 - share) / n + _Z**2 / (4 * n**2)) / scale
    return Interval(share, max(0.0, min(centre - half, share)), min(1.0, max(centre + half, share)))


def paired_difference(counts: PairCounts) -> Interval:
    """Interval of (share of B) - (share of A) for results on the same samples.

    Source: Newcombe 1998 (Statistics in Medicine 17:2635), method 10: Wilson limits of both shares, combined with the
    correlation of the pairs. Without any difference its width is that of the rule of three, not zero.
    """
    n = counts.n
    if n == 0:
        return Interval(math.nan, -1.0, 1.0)
    a, b = wilson(counts.both + counts.only_a, n), wilson(counts.both + counts.only_b, n)
    correlation = _correlation(counts)

    def combine(x: float, y: float) -> float:
        return math.sqrt(max(x * x - 2 * correlation * x * y + y * y, 0.0))

    difference = b.value - a.value
    low = difference - combine(b.value - b.low, a.high - a.value)
    high = difference + combine(b.high - b.value, a.value - a.low)
    return Interval(difference, max(low, -1.0), min(high, 1.0))


def _correlation(counts: PairCounts) -> float:
    """Phi of the two-by-two table, its numerator moved towards zero where it is positive."""
    margins = (
        (counts.both + counts.only_a)
        * (counts.only_b + counts.neither)
        * (counts.both + counts.only_b)
        * (counts.only_a + counts.neither)
    )
    if margins == 0:
        return 0.0
    product: float = counts.both * counts.neither - counts.only_a * counts.only_b
    if product > 0:
        product = max(product - counts.n / 2, 0)
    return product / math.sqrt(margins)


def mcnemar(counts: PairCounts) -> float:
    """Two-sided exact probability of a split of the discordant pairs that is this uneven, if A and B were equal.

    Source: McNemar 1947, with the binomial distribution rather than its approximation.
    """
    discordant = counts.only_a + counts.only_b
    fewer = min(counts.only_a, counts.only_b)
    tail = sum(math.comb(discordant, k) for k in range(fewer + 1)) / 2**discordant
    return min(1.0, 2 * tail)


def ratio_difference(
    parts: tuple[Sequence[float], Sequence[float]], wholes: tuple[Sequence[float], Sequence[float]]
) -> Interval:
    """Bootstrap interval of ``sum(parts) / sum(wholes)`` of B minus that of A, where whole samples are drawn.

    Args:
        parts, wholes: (A, B), each with one number per sample in the order of the samples; wholes are above 0.
    """
    part, whole = np.asarray(parts, float), np.asarray(wholes, float)  # [2, n]
    n = part.shape[1]
    if n == 0:
        return Interval(math.nan, math.nan, math.nan)
    drawn = np.random.default_rng(0).integers(0, n, (_RESAMPLES, n))  # the same in every run
    ratios = part[:, drawn].sum(-1) / whole[:, drawn].sum(-1)  # [2, resamples]
    low, high = np.percentile(ratios[1] - ratios[0], (2.5, 97.5))
    estimates = part.sum(-1) / whole.sum(-1)
    return Interval(float(estimates[1] - estimates[0]), float(low), float(high))
