"""Counts of a window."""

from __future__ import annotations

import math

import pytest

from deepinfer.speculative.statistics import SpeculationStatistics


def test_counts_and_rates_per_slot():
    statistics = SpeculationStatistics(3)
    statistics.observe(2, 3)
    statistics.observe(0, 1)
    statistics.observe(1, 1)
    statistics.observe(0, 0)
    report = statistics.report()
    assert report.verified == (3, 1, 1)
    assert report.accepted == (2, 1, 0)
    assert report.acceptance_rates == pytest.approx((2 / 3, 1.0, 0.0))
    assert report.acceptance_rate == pytest.approx(3 / 5)
    assert report.mean_verified == pytest.approx(5 / 4)
    assert report.mean_emitted == pytest.approx(7 / 4)
    assert report.num_rows == 9
    assert "1.75 tokens per step" in report.line()


def test_confidence_error_and_bias():
    statistics = SpeculationStatistics(3)
    statistics.observe(1, 2, [0.9, 0.5, 0.1], [0.7, 0.6, math.nan])
    report = statistics.report()
    assert report.confidence_error == pytest.approx(0.15)
    assert report.confidence_bias == pytest.approx(0.05)


def test_taking_a_window_begins_a_new_one():
    statistics = SpeculationStatistics(2)
    statistics.observe(2, 2)
    assert statistics.take().accepted == (1, 1)
    empty = statistics.report()
    assert empty.accepted == (0, 0)
    assert math.isnan(empty.acceptance_rate)
    assert math.isnan(empty.confidence_error)
    assert "nan" in empty.line()


def test_impossible_counts_are_refused():
    with pytest.raises(AssertionError, match="num_accepted"):
        SpeculationStatistics(2).observe(2, 1)
