"""Confidence intervals: published values, edges, and the promise that they keep on simulated data."""

from __future__ import annotations

import math

import numpy as np
import pytest

from deepinfer.evaluation.intervals import PairCounts, mcnemar, paired_difference, ratio_difference, wilson
from deepinfer.evaluation.suite import DEFAULT_SAMPLES


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_gives_the_limits_in_newcombes_table(successes, n, low, high):
    found = wilson(successes, n)
    assert (found.low, found.high) == (pytest.approx(low, abs=5e-5), pytest.approx(high, abs=5e-5))
    assert found.value == successes / n


def test_wilson_at_the_edges():
    assert wilson(20, 20).high == 1.0
    assert wilson(20, 20).low == pytest.approx(1 - 0.1611, abs=5e-5)
    nothing = wilson(0, 0)
    assert math.isnan(nothing.value)
    assert (nothing.low, nothing.high) == (0.0, 1.0)


def test_default_sample_count_tells_95_from_90_percent():
    high, low = (
        wilson(round(0.95 * DEFAULT_SAMPLES), DEFAULT_SAMPLES),
        wilson(round(0.90 * DEFAULT_SAMPLES), DEFAULT_SAMPLES),
    )
    assert high.low > 0.90
    assert low.high < 0.95


def test_pairs_are_counted_by_who_was_right():
    counts = PairCounts.of([True, True, False, False, True], [True, False, True, False, True])
    assert (counts.both, counts.only_a, counts.only_b, counts.neither, counts.n) == (2, 1, 1, 1, 5)
    with pytest.raises(ValueError):
        PairCounts.of([True], [])


def test_paired_difference_without_any_difference_still_has_width():
    found = paired_difference(PairCounts(both=200, only_a=0, only_b=0, neither=0))
    assert found.value == 0
    assert found.low == pytest.approx(-0.0188, abs=1e-3)
    assert found.high == pytest.approx(0.0188, abs=1e-3)


def test_paired_difference_is_antisymmetric_and_narrower_than_independent_samples():
    found = paired_difference(PairCounts(both=150, only_a=12, only_b=4, neither=34))
    mirrored = paired_difference(PairCounts(both=150, only_a=4, only_b=12, neither=34))
    assert (found.value, found.low, found.high) == pytest.approx((-mirrored.value, -mirrored.high, -mirrored.low))
    independent = math.hypot(
        wilson(162, 200).value - wilson(162, 200).low, wilson(154, 200).high - wilson(154, 200).value
    )
    assert found.high - found.low < 1.5 * independent


def test_paired_difference_covers_the_truth_95_percent_of_the_time():
    rng = np.random.default_rng(1)
    shares = np.array([0.75, 0.10, 0.05, 0.10])  # both, only A, only B, neither: B - A is -0.05
    covered = 0
    for _ in range(1000):
        both, only_a, only_b, neither = rng.multinomial(120, shares).tolist()
        found = paired_difference(PairCounts(both, only_a, only_b, neither))
        covered += found.low <= -0.05 <= found.high
    assert 925 <= covered <= 985


def test_mcnemar_is_the_exact_binomial_test():
    assert mcnemar(PairCounts(10, 0, 0, 5)) == 1.0
    assert mcnemar(PairCounts(0, 1, 9, 0)) == pytest.approx(2 * (1 + 10) / 2**10)
    assert mcnemar(PairCounts(0, 9, 1, 0)) == mcnemar(PairCounts(0, 1, 9, 0))
    assert mcnemar(PairCounts(0, 5, 5, 0)) == 1.0


def test_ratio_difference_uses_the_pairs():
    rng = np.random.default_rng(2)
    wholes = rng.uniform(50, 150, 80)
    noise = rng.normal(0, 10, 80)
    a, b = 2 * wholes + noise, 2.1 * wholes + noise  # the noise is common: pairs cancel it
    found = ratio_difference((a, b), (wholes, wholes))
    assert found.value == pytest.approx(0.1)
    assert found.high - found.low < 1e-9
    apart = ratio_difference((a, 2.1 * wholes + rng.permutation(noise)), (wholes, wholes))
    assert apart.high - apart.low > 0.01
    assert found == ratio_difference((a, b), (wholes, wholes))
    assert math.isnan(ratio_difference(([], []), ([], [])).value)
