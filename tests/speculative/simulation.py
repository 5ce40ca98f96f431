"""Many requests decode side by side from small tables of probabilities instead of a model.

The next token depends on the one before it only: row t of ``target`` are the logits after token t. Requests differ in
their seeds and nothing else, so the tokens of all of them are draws from one distribution.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.sampling.batch import SamplingBatch, SamplingBatchBuilder
from deepinfer.sampling.params import SamplingParams
from deepinfer.sampling.sampler import Sampler
from deepinfer.sampling.state import SamplingState
from deepinfer.speculative.allocation import allocate_on_host, survivals_of
from deepinfer.speculative.budget import choose_budget
from deepinfer.speculative.cost_refinement import RefinedCost
from deepinfer.speculative.cost_table import CostTable
from deepinfer.speculative.draft_sampling import CoupledDraftSampler, DraftSampler, IndependentDraftSampler
from deepinfer.speculative.drafts import Drafts
from deepinfer.speculative.gumbel_verifier import GumbelVerifier
from deepinfer.speculative.rejection_verifier import RejectionVerifier
from deepinfer.speculative.stale_rates import StaleRates
from deepinfer.speculative.verification import RowLayout, Verified, Verifier
from tests.sampling.reference import chi_square, chi_square_bound, naive_distribution

PROMPT = (0,)


@dataclass
class World:
    """What the models say."""

    target: Tensor
    """float32 ``[vocab, vocab]``."""
    draft: Tensor
    """float32 ``[vocab, vocab]``."""
    confidence: Callable[[Tensor], Tensor]
    """Drafts ``[requests, slots]`` to confidences of the same shape. That of a slot looks at earlier slots only."""

    @property
    def vocab_size(self) -> int:
        return self.target.shape[1]


def random_world(vocab_size: int, seed: int, closeness: float = 0.5) -> World:
    """Random tables; the draft is a mixture of the target and something else."""
    generator = torch.Generator().manual_seed(seed)
    target = 1.5 * torch.randn(vocab_size, vocab_size, generator=generator)
    other = 1.5 * torch.randn(vocab_size, vocab_size, generator=generator)
    return World(target, closeness * target + (1 - closeness) * other, by_draft_before)


def by_draft_before(token_ids: Tensor) -> Tensor:
    """Confidences that give away the draft before: near 1 after an even token, low after an odd one."""
    before = torch.cat([torch.zeros_like(token_ids[:, :1]), token_ids[:, :-1]], 1)
    return torch.where(before % 2 == 0, 0.95, 0.15)


Schedule = Callable[[int, list[list[float]]], list[int]]
"""(step, survivals of the drafts at hand) to rows per request."""


def fixed(num_drafts: int) -> Schedule:
    return lambda step, survivals: [1 + num_drafts] * len(survivals)


def shuffled(seed: int) -> Schedule:
    """Any number of drafts, without a reason."""
    generator = torch.Generator().manual_seed(seed)

    def rows(step: int, survivals: list[list[float]]) -> list[int]:
        return [1 + int(torch.randint(len(each) + 1, (1,), generator=generator)) for each in survivals]

    return rows


class Scheduled:
    """Confidence-scheduled verification of ``engine_size`` requests at a time.

    Args:
        is_stale: budgets come from the generation before, as they should; otherwise from the drafts at hand.
    """

    def __init__(self, table: CostTable, engine_size: int, *, is_stale: bool = True) -> None:
        self.cost = RefinedCost(table)
        self.engine_size = engine_size
        self.is_stale = is_stale
        self.rates = StaleRates()

    def __call__(self, step: int, survivals: list[list[float]]) -> list[int]:
        rows = []
        for start in range(0, len(survivals), self.engine_size):
            names = [str(index) for index in range(start, start + self.engine_size)]
            fresh = survivals[start : start + self.engine_size]
            for name, each in zip(names, fresh, strict=True):
                self.rates.schedule(name)  # by the step that has just drafted
                self.rates.process(name, each)
            known = [self.rates.for_budget(name, len(fresh[0])) for name in names] if self.is_stale else fresh
            rows += allocate_on_host(fresh, choose_budget(known, self.cost).total_rows)
        return rows


def pair_of(kind: str, sampler: Sampler) -> tuple[Verifier, DraftSampler]:
    """A verifier and the draft sampler that belongs to it."""
    if kind == "gumbel":
        return GumbelVerifier(sampler), CoupledDraftSampler(sampler)
    return RejectionVerifier(sampler), IndependentDraftSampler(sampler)


class Crowd:
    """Requests that decode side by side."""

    def __init__(self, world: World, params: SamplingParams, num_requests: int, kind: str, num_slots: int) -> None:
        sampler = Sampler(world.vocab_size)
        self.world = world
        self.num_slots = num_slots
        self.builder = SamplingBatchBuilder(world.vocab_size)
        self.verifier, self.drafter = pair_of(kind, sampler)
        self.states = [
            SamplingState(params, PROMPT, vocab_size=world.vocab_size, seed=seed) for seed in range(num_requests)
        ]
        self.draft_batch = SamplingBatch.build(self.states, [state.next_position for state in self.states])
        self.num_accepted = self.num_verified = 0

    def last_tokens(self) -> Tensor:
        return torch.tensor([(state.output_ids or PROMPT)[-1] for state in self.states])

    def draw_drafts(self) -> Drafts:
        last = self.last_tokens()
        positions = torch.tensor([state.next_position for state in self.states])
        slots = []
        for slot in range(self.num_slots):
            drawn = self.drafter.sample(self.world.draft[last], self.draft_batch, positions + slot, slot)
            slots.append(drawn)
            last = drawn.token_ids
        if not slots:
            return Drafts.none(len(self.states), 0)
        return Drafts.of_slots([each.token_ids for each in slots], [each.distributions for each in slots])

    def verify(self, drafts: Drafts, num_rows: Tensor) -> Verified:
        layout = RowLayout.of(num_rows, int(num_rows.sum()))
        before = torch.cat([self.last_tokens()[:, None], drafts.token_ids], 1)[layout.request, layout.slot]
        owners = [self.states[request] for request in layout.request.tolist()]
        positions = [state.next_position + slot for state, slot in zip(owners, layout.slot.tolist(), strict=True)]
        pending = self._pending(drafts, layout) if self.states[0].params.uses_penalties else None
        batch = self.builder.build(owners, positions, pending)
        return self.verifier.verify(self.world.target[before.clamp(min=0)], batch, drafts, num_rows)

    @staticmethod
    def _pending(drafts: Drafts, layout: RowLayout) -> list[list[int]]:
        """The drafts before each row: as far as it is concerned they have been generated."""
        rows = zip(layout.request.tolist(), layout.slot.tolist(), strict=True)
        return [drafts.token_ids[request, :slot].tolist() for request, slot in rows]

    def step(self, index: int, schedule: Schedule) -> Verified:
        drafts = self.draw_drafts()
        survivals = survivals_of(self.world.confidence(drafts.token_ids)) if self.num_slots else drafts.token_ids
        num_rows = torch.tensor(schedule(index, survivals.tolist()))
        verified = self.verify(drafts, num_rows)
        for request, state in enumerate(self.states):
            state.append(verified.emitted(request))
        self.num_accepted += int(verified.num_accepted.sum())
        self.num_verified += int((num_rows - 1).sum())
        return verified


def decode(crowd: Crowd, schedule: Schedule, length: int) -> list[tuple[int, ...]]:
    """The first ``length`` tokens of every request."""
    for step in itertools.count():
        if min(len(state.output_ids) for state in crowd.states) >= length:
            return [tuple(state.output_ids[:length]) for state in crowd.states]
        crowd.step(step, schedule)
    raise AssertionError


def sequence_probabilities(world: World, params: SamplingParams, length: int) -> dict[tuple[int, ...], float]:
    """What the tokens of a request should be distributed like."""
    rows = [naive_distribution(row.tolist(), params) for row in world.target]
    sequences = itertools.product(range(world.vocab_size), repeat=length)
    return {
        sequence: math.prod(rows[a][b] for a, b in zip((*PROMPT, *sequence), sequence, strict=False))
        for sequence in sequences
    }


def misfit(tokens: list[tuple[int, ...]], probabilities: dict[tuple[int, ...], float]) -> float:
    """Chi-square over its 99.99 % point: above 1, the tokens are not of this distribution."""
    counts = Counter(tokens)
    assert not any(counts[sequence] for sequence, p in probabilities.items() if p == 0.0), "an impossible token"
    possible = {sequence: p for sequence, p in probabilities.items() if p > 0.0}
    statistic, freedom = chi_square([counts[sequence] for sequence in possible], possible.values())
    return statistic / chi_square_bound(max(freedom, 1))
