"""Coupled verification: the tokens are the same whatever is drafted and however much of it is verified."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from deepinfer.sampling.params import SamplingParams
from deepinfer.speculative.cost_table import CostTable
from tests.speculative.simulation import Crowd, Scheduled, decode, fixed, random_world, shuffled

MIXES = [
    {},
    {"temperature": 0},
    {"temperature": 0.7, "top_p": 0.8, "logprobs": 2},
    {"top_k": 3, "min_p": 0.01, "logprobs": 1, "logprobs_mode": "raw"},
    {"golden_token_ids": [3, -1, 5, 5, -1, 0]},
    {"repetition_penalty": 1.5, "presence_penalty": 1.0, "frequency_penalty": 0.5, "min_tokens": 8, "max_tokens": 20},
]
TABLE = CostTable.of([(4, 1.0), (6, 1.1), (12, 1.9), (64, 4.0)])


@pytest.mark.parametrize("mix", MIXES, ids=str)
def test_tokens_are_the_same_for_every_length_drafter_and_schedule(mix):
    world = random_world(11, seed=5)
    params = SamplingParams(**mix)
    plain = decode(Crowd(world, params, 40, "gumbel", 0), fixed(0), 12)
    assert len(set(plain)) > 1 or params.is_greedy
    for closeness in (0.0, 0.7, 1.0):
        drafted = dataclasses.replace(world, draft=random_world(11, seed=5, closeness=closeness).draft)
        for num_slots in (1, 2, 3, 5, 7):
            crowd = Crowd(drafted, params, 40, "gumbel", num_slots)
            assert decode(crowd, fixed(num_slots), 12) == plain
        for schedule in (Scheduled(TABLE, 4), Scheduled(TABLE, 4, is_stale=False), shuffled(1)):
            assert decode(Crowd(drafted, params, 40, "gumbel", 5), schedule, 12) == plain


def test_a_perfect_drafter_is_always_accepted():
    world = random_world(11, seed=5, closeness=1.0)
    crowd = Crowd(world, SamplingParams(temperature=0.8, top_p=0.9), 50, "gumbel", 4)
    verified = crowd.step(0, fixed(4))
    assert verified.num_accepted.tolist() == [4] * 50


@pytest.mark.parametrize("closeness", [0.0, 0.5, 0.9])
def test_acceptance_lies_between_its_bounds(closeness):
    """Between (1 - TV) / (1 + TV) and 1 - TV, for one draft after the prompt."""
    world = random_world(6, seed=8, closeness=closeness)
    crowd = Crowd(world, SamplingParams(), 4000, "gumbel", 1)
    rate = float(crowd.step(0, fixed(1)).num_accepted.float().mean())
    distance = 0.5 * float((world.target[0].softmax(0) - world.draft[0].softmax(0)).abs().sum())
    noise = 4 * (0.25 / 4000) ** 0.5
    assert (1 - distance) / (1 + distance) - noise <= rate <= 1 - distance + noise


@pytest.mark.parametrize("mix", [{"logprobs": 3}, {"top_p": 0.8, "logprobs": 2}, {"temperature": 0, "logprobs": 1}])
def test_logprobs_are_those_of_unspeculated_tokens(mix):
    world = random_world(11, seed=5)
    params = SamplingParams(**mix)
    plain, drafting = (Crowd(world, params, 20, "gumbel", slots) for slots in (0, 4))
    reports: list[list[tuple]] = []
    for crowd, num_drafts in ((plain, 0), (drafting, 4)):
        seen: list[list[tuple]] = [[] for _ in crowd.states]
        for step in range(8):
            out = crowd.step(step, fixed(num_drafts)).cpu()
            for request in range(20):
                first = int(out.first_row[request])
                seen[request] += [
                    (token, float(out.rows.logprobs[first + j]), out.rows.alternatives(first + j))
                    for j, token in enumerate(out.emitted(request))
                ]
        reports.append([entry for request in seen for entry in request[:8]])
    assert reports[0] == reports[1]


def test_a_bad_row_ends_its_request_only_if_it_is_reached():
    world = random_world(5, seed=2, closeness=1.0)
    crowd = Crowd(world, SamplingParams(), 3, "gumbel", 2)
    drafts = crowd.draw_drafts()
    wrong = drafts.token_ids.clone()
    wrong[1, 0] = (wrong[1, 0] + 1) % 5  # request 1 stops at its first row
    rows = torch.full((3,), 3)
    good = crowd.verify(dataclasses.replace(drafts, token_ids=wrong), rows)
    assert not good.is_bad.any()
    assert good.num_accepted.tolist() == [2, 0, 2]

    class Broken:
        needs_distributions = False

        def __init__(self, inner):
            self.inner = inner

        def verify(self, logits, batch, drafts, num_rows):
            logits = logits.clone()
            logits[[1, 4]] = torch.nan  # the second rows of requests 0 and 1
            return self.inner.verify(logits, batch, drafts, num_rows)

    crowd.verifier = Broken(crowd.verifier)
    bad = crowd.verify(dataclasses.replace(drafts, token_ids=wrong), rows)
    assert bad.is_bad.tolist() == [True, False, False]
    assert bad.num_accepted.tolist() == [1, 0, 2]
    assert bad.token_ids[1].tolist() == good.token_ids[1].tolist()
    assert bad.token_ids[2].tolist() == good.token_ids[2].tolist()
