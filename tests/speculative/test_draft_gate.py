"""Drafting goes on while it pays, stops where it does not, and is tried again."""

from __future__ import annotations

import random

import pytest

from deepinfer.speculative.draft_gate import DraftGate


class Machine:
    """Steps with made-up times: a gate that is asked one step before its result is known."""

    def __init__(self, seed: int = 0) -> None:
        self.gate = DraftGate()
        self.rng = random.Random(seed)
        self.drafted = 0

    def run(self, steps: int, accepted: float, requests: int = 4, draft_ms: float = 3.0) -> float:
        """Share of steps that drafted. A step takes 10 ms, with drafts 2 more for verification; 1 in 20 is slow."""
        before, num_drafted = self.drafted, 0
        for _ in range(steps):
            wants = self.gate.wants(requests)
            tokens = requests + (round(requests * accepted + self.rng.uniform(-1, 1)) if before else 0)
            step_ms = 10 + (2 if before else 0) + (draft_ms if wants else 0)
            step_ms *= 5 if self.rng.random() < 0.05 else self.rng.uniform(0.95, 1.05)
            self.gate.observe(requests, wants, tokens, step_ms)
            num_drafted, before = num_drafted + wants, wants
        self.drafted = before
        return num_drafted / steps


@pytest.mark.parametrize("seed", range(5))
def test_good_drafts_are_used_nearly_always(seed: int) -> None:
    assert Machine(seed).run(1000, accepted=1.5) > 0.97


@pytest.mark.parametrize("seed", range(5))
def test_bad_drafts_are_given_up_and_cost_little(seed: int) -> None:
    machine = Machine(seed)
    assert machine.run(1000, accepted=0.1) < 0.06
    assert machine.run(1000, accepted=0.1) < 0.03


def test_a_change_of_the_text_is_noticed() -> None:
    machine = Machine()
    machine.run(400, accepted=0.1)
    machine.run(2200, accepted=2.0)
    assert machine.run(200, accepted=2.0) > 0.9
    machine.run(2200, accepted=0.0)
    assert machine.run(200, accepted=0.0) < 0.1


def test_numbers_of_requests_are_judged_apart() -> None:
    machine = Machine()
    for _ in range(10):
        machine.run(60, accepted=1.0, requests=2)
        machine.run(60, accepted=1.0, requests=32, draft_ms=30.0)
    assert machine.run(60, accepted=1.0, requests=2) > 0.8
    assert machine.run(60, accepted=1.0, requests=32, draft_ms=30.0) < 0.2


def test_transitions_are_not_counted() -> None:
    """The first step after a change verifies nothing, or drafts nothing: it belongs to neither side."""
    gate = DraftGate()
    for number in range(100):
        gate.observe(1, number % 2 == 0, 1, 1.0)
    bucket = gate._bucket(1)
    assert not bucket.sides[True].steps
    assert not bucket.sides[False].steps
