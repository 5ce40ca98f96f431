"""Which generation of rates a budget sees."""

from __future__ import annotations

import pytest

from deepinfer.speculative.stale_rates import StaleRates


def test_synchronous_steps_use_the_generation_before_the_newest():
    rates = StaleRates()
    assert rates.for_budget("a", 2) == (0.0, 0.0)
    for generation in range(4):
        rates.schedule("a")
        rates.process("a", [generation / 10, 0.0])
        expected = (1.0, 1.0) if generation == 0 else ((generation - 1) / 10, 0.0)
        assert rates.for_budget("a", 2) == expected
        assert rates.for_allocation("a", 2) == (generation / 10, 0.0)
    rates.check()


def test_asynchronous_steps_use_the_newest_that_is_here():
    """The drafts that the next step verifies are still being drawn, so whatever is here is older than they are."""
    rates = StaleRates()
    rates.schedule("a")
    assert rates.for_budget("a", 2) == (1.0, 1.0)
    rates.process("a", [0.1, 0.1])
    rates.schedule("a")
    assert rates.for_budget("a", 2) == (0.1, 0.1)
    with pytest.raises(AssertionError, match="not here yet"):
        rates.for_allocation("a", 2)
    rates.process("a", [0.2, 0.2])
    assert rates.for_budget("a", 2) == (0.1, 0.1)
    rates.schedule("a")
    assert rates.for_budget("a", 2) == (0.2, 0.2)


def test_a_request_that_pauses_keeps_its_own_count():
    """Steps without a request do not make its rates older: what it would verify is still its newest generation."""
    rates = StaleRates()
    for name, value in (("a", 0.3), ("a", 0.6), ("b", 0.9), ("b", 0.9), ("b", 0.9)):
        rates.schedule(name)
        rates.process(name, [value])
    assert rates.for_budget("a", 1) == (0.3,)


def test_lengths_are_padded_and_cut():
    rates = StaleRates()
    for value in (0.5, 0.6):
        rates.schedule("a")
        rates.process("a", [value])
    assert rates.for_budget("a", 3) == (0.5, 0.0, 0.0)
    assert rates.for_budget("a", 0) == ()


def test_a_chained_step_is_launched_before_the_one_before_it_is_committed():
    rates = StaleRates()
    for generation in range(3):
        rates.schedule("a")
        if generation:
            rates.process("a", [generation / 10])
        assert rates.for_budget("a", 1) == ((generation / 10 if generation else 1.0),)
    rates.check()


def test_forgotten_requests_begin_again():
    rates = StaleRates()
    rates.schedule("a")
    rates.forget("a")
    rates.process("a", [0.5])
    rates.forget("never seen")
    assert len(rates) == 0
    assert rates.for_budget("a", 1) == (0.0,)


def test_only_two_steps_may_be_on_their_way():
    rates = StaleRates()
    rates.schedule("a")
    rates.schedule("a")
    with pytest.raises(AssertionError, match="3 steps"):
        rates.schedule("a")
