"""Phases add up, also those that end with an error."""

from __future__ import annotations

import time

import pytest

from deepinfer.observe.step_timer import StepTimer


def test_phases_add_up():
    timer = StepTimer()
    for _ in range(3):
        with timer.phase("forward"):
            time.sleep(0.002)
    with timer.phase("sample"):
        pass
    assert timer.counts == {"forward": 3, "sample": 1}
    assert 0.006 <= timer.seconds["forward"] < 2
    assert 0 <= timer.seconds["sample"] < timer.seconds["forward"]
    assert timer.milliseconds("forward") == 1e3 * timer.seconds["forward"]
    assert timer.milliseconds("draft") == 0
    timer.reset()
    assert timer.seconds == timer.counts == {}


def test_an_error_passes_and_is_timed():
    timer = StepTimer()
    with pytest.raises(ValueError, match="x"), timer.phase("forward"):
        raise ValueError("x")
    assert timer.counts == {"forward": 1}
    assert timer.seconds["forward"] >= 0
