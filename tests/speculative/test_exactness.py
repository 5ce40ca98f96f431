"""The output has the target's distribution, whatever the drafter says and however many drafts are verified."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from deepinfer.sampling.params import SamplingParams
from deepinfer.speculative.cost_table import CostTable
from tests.speculative.simulation import (
    Crowd,
    Scheduled,
    World,
    decode,
    fixed,
    misfit,
    random_world,
    sequence_probabilities,
    shuffled,
)

STAIRS = CostTable.of([(2, 1.0), (4, 1.7), (5, 1.8), (8, 3.0), (16, 3.2)])
MIXES = [
    {},
    {"temperature": 0.7, "top_p": 0.8},
    {"top_k": 3},
    {"temperature": 1.3, "min_p": 0.1},
    {"top_p": 0.9, "top_k": 2},
]
IN_CI = [
    ("rejection", 1, "fixed", 0),
    ("rejection", 2, "scheduled", 1),
    ("rejection", 3, "shuffled", 2),
    ("rejection", 4, "fixed", 3),
    ("rejection", 5, "scheduled", 4),
    ("rejection", 7, "scheduled", 0),
    ("gumbel", 2, "scheduled", 1),
    ("gumbel", 5, "fixed", 0),
]
EVERY = [
    (kind, slots, how, mix)
    for kind in ("rejection", "gumbel")
    for slots in range(1, 8)
    for how in ("fixed", "scheduled", "shuffled")
    for mix in range(len(MIXES))
]


def _misfit(kind: str, num_slots: int, how: str, mix: int, num_requests: int, length: int = 3) -> float:
    world = random_world(5, seed=100 * num_slots + mix)
    params = SamplingParams(**MIXES[mix])
    schedule = {"fixed": fixed(num_slots), "scheduled": Scheduled(STAIRS, 2), "shuffled": shuffled(mix)}[how]
    crowd = Crowd(world, params, num_requests, kind, num_slots)
    tokens = decode(crowd, schedule, length)
    assert 0 < crowd.num_accepted < crowd.num_verified  # both branches of the test ran
    return misfit(tokens, sequence_probabilities(world, params, length))


@pytest.mark.parametrize(("kind", "num_slots", "how", "mix"), IN_CI)
def test_output_has_the_distribution_of_the_target(kind, num_slots, how, mix):
    assert _misfit(kind, num_slots, how, mix, num_requests=1600) < 1.0


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "num_slots", "how", "mix"), EVERY)
def test_output_has_the_distribution_of_the_target_everywhere(kind, num_slots, how, mix):
    assert _misfit(kind, num_slots, how, mix, num_requests=6000) < 1.0


def _counterexample(confidence) -> World:
    target = torch.tensor([[0.7, 0.3], [0.7, 0.3]]).log()
    return World(target, torch.zeros(2, 2), confidence)


def _second_confidence_shows_first_draft(token_ids):
    return torch.where(token_ids.roll(1, 1) == 0, 1.0, 0.0).index_fill_(1, torch.tensor([0]), 0.8)


# Relative speeds 1, 0.5 and 0.45 with 1, 2 and 3 rows: two drafts are worth it only if both are likely.
CURVE = CostTable.of([(1, 1.0), (2, 2.0), (3, 1 / 0.45)])


def _first_tokens(is_stale: bool, kind: str = "rejection", length: int = 4):
    world = _counterexample(_second_confidence_shows_first_draft)
    crowd = Crowd(world, SamplingParams(), 2000, kind, 2)
    tokens = decode(crowd, Scheduled(CURVE, 1, is_stale=is_stale), length)
    assert crowd.num_verified > 0
    return tokens, sequence_probabilities(world, SamplingParams(), length)


def test_budget_from_the_drafts_at_hand_biases_rejection_sampling():
    """The known counter-example: 0.85 instead of 0.7."""
    tokens, probabilities = _first_tokens(is_stale=False)
    share = sum(token[0] == 0 for token in tokens) / len(tokens)
    assert abs(share - 0.85) < 4 * math.sqrt(0.85 * 0.15 / len(tokens))
    assert misfit(tokens, probabilities) > 3.0


def test_budget_from_stale_rates_does_not():
    tokens, probabilities = _first_tokens(is_stale=True)
    assert misfit(tokens, probabilities) < 1.0


def test_gumbel_verification_does_not_mind_fresh_budgets():
    tokens, probabilities = _first_tokens(is_stale=False, kind="gumbel")
    assert misfit(tokens, probabilities) < 1.0


class _SameNoiseInEverySlot:
    """Draws a position's draft with the same noise in whichever step it is drafted."""

    def __init__(self, drafter) -> None:
        self._drafter = drafter

    def sample(self, logits, batch, positions, slot):
        return self._drafter.sample(logits, batch, positions, 0)


def _third_confidence_shows_second_draft(token_ids):
    return torch.stack(
        [torch.full_like(token_ids[:, 0], 1, dtype=torch.float32), torch.ones(len(token_ids)), 1.0 - token_ids[:, 1]], 1
    )


@pytest.mark.parametrize("reuses_noise", [False, True])
def test_stale_rates_need_fresh_noise_for_every_draft(reuses_noise):
    """A draft that repeats what stood at its position before is known to a budget that has seen the one before."""
    world = _counterexample(_third_confidence_shows_second_draft)
    crowd = Crowd(world, SamplingParams(), 3000, "rejection", 3)
    if reuses_noise:
        crowd.drafter = _SameNoiseInEverySlot(crowd.drafter)
    schedule = Scheduled(CostTable.of([(1, 1.0), (3, 3.01), (4, 3.3)]), 1)  # three drafts or none
    was_rejected = crowd.step(0, schedule).num_accepted == 0
    crowd.step(1, schedule)
    # Given the past, and be it a rejection, the next token has the target's distribution.
    tokens = [(state.output_ids[1],) for state, rejected in zip(crowd.states, was_rejected, strict=True) if rejected]
    fit = misfit(tokens, sequence_probabilities(world, SamplingParams(), 1))
    assert fit > 2.0 if reuses_noise else fit < 1.0


def test_no_drafts_and_undrafted_slots_leave_the_distribution_unchanged():
    """Placeholders after a prompt: they are never accepted, and the token is a fresh draw."""
    world = random_world(5, seed=1)
    crowd = Crowd(world, SamplingParams(), 1500, "rejection", 3)
    drafts = crowd.draw_drafts()
    nobody = dataclasses.replace(drafts, token_ids=torch.full_like(drafts.token_ids, -1))
    verified = crowd.verify(nobody, torch.full((1500,), 4))
    assert not verified.num_accepted.any()
    tokens = [(token,) for token in verified.token_ids[:, 0].tolist()]
    assert misfit(tokens, sequence_probabilities(world, SamplingParams(), 1)) < 1.0


@pytest.mark.parametrize("kind", ["gumbel", "rejection"])
def test_greedy_requests_get_the_greedy_tokens(kind):
    world = random_world(7, seed=3)
    params = SamplingParams(temperature=0)
    tokens = decode(Crowd(world, params, 3, kind, 4), shuffled(0), 12)
    expected, last = [], 0
    for _ in range(12):
        last = int(world.target[last].argmax())
        expected.append(last)
    assert tokens == [tuple(expected)] * 3


@pytest.mark.parametrize("kind", ["gumbel", "rejection"])
def test_a_crowd_without_drafts_is_sampled_plainly(kind):
    world = random_world(5, seed=1)
    tokens = decode(Crowd(world, SamplingParams(), 1500, kind, 0), fixed(0), 2)
    assert misfit(tokens, sequence_probabilities(world, SamplingParams(), 2)) < 1.0
