"""How a draft token is drawn from the draft model's logits.

Two ways, one per verifier. *Coupled*: with the noise that the target will use at the same position, so that equal
distributions give equal tokens. *Independent*: with noise of its own, keeping the distribution for the accept test.
Both process the logits as the request asks (temperature, top-p, top-k, masks), and both are greedy for greedy requests.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from deepinfer.sampling.batch import Kind, SamplingBatch
from deepinfer.sampling.distribution import without_logprobs
from deepinfer.sampling.random import Purpose, gumbel_noise
from deepinfer.sampling.sampler import Sampler
from deepinfer.sampling.truncation import first_argmax
from deepinfer.speculative.draft_distribution import DraftDistributions

_SLOT_SHIFT = 40  # positions stay far below 2**40


@dataclass(frozen=True, slots=True)
class DraftTokens:
    """One slot of every request."""

    token_ids: Tensor
    """int64 ``[requests]``, always in ``[0, vocab)``: they go back into the draft model."""
    distributions: DraftDistributions | None


class DraftSampler(Protocol):
    """Draws the draft tokens of one slot."""

    def sample(self, logits: Tensor, batch: SamplingBatch, positions: Tensor, slot: int) -> DraftTokens:
        """Draw a token per request. Never raises for what a row contains, and never synchronises on an accelerator.

        Args:
            logits: float32 ``[requests, vocab]`` of the draft model at this slot, not changed.
            batch: built for one row per request; its masks and penalties are those of the slot.
            positions: int64 ``[requests]``: absolute position that the draft will have.
            slot: number of the draft in its block, from 0.
        """
        ...


class CoupledDraftSampler:
    """For the Gumbel verifier: the noise of (seed, position), shared with the target."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def sample(self, logits: Tensor, batch: SamplingBatch, positions: Tensor, slot: int) -> DraftTokens:
        del slot
        # A token that teacher forcing demands is the target's business: the draft shows what it would have proposed.
        quiet = replace(without_logprobs(batch), positions=positions, forced=None)
        return DraftTokens(self._sampler.sample(logits, quiet).token_ids, None)


class IndependentDraftSampler:
    """For the rejection verifier: noise of (seed, position, slot).

    The slot is part of the key because a position may be drafted several times, as third draft of one step and as
    second of the next. With the same noise the later draft would resemble the earlier one, whose confidences have
    meanwhile entered the budget: the schedule would know something about the draft that it admits, and bias the output.
    A pair (position, slot) belongs to one step only, since every step emits a token.
    """

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def sample(self, logits: Tensor, batch: SamplingBatch, positions: Tensor, slot: int) -> DraftTokens:
        # What teacher forcing demands is the target's business: a draft is drawn from its stored distribution.
        batch = replace(without_logprobs(batch), positions=positions, forced=None)
        keys = positions + (slot << _SLOT_SHIFT)
        token_ids = torch.empty_like(positions)
        stored = torch.empty_like(logits)
        for group, scores in self._sampler.distributions(logits, batch):
            scores = _point_mass_if_bad(scores).to(torch.bfloat16).to(torch.float32)
            stored[group.rows] = scores
            noise = gumbel_noise(group.seeds, keys[group.rows], batch.vocab_size, Purpose.DRAFT)
            token_ids[group.rows] = first_argmax(noise.add_(scores))
        return DraftTokens(token_ids, DraftDistributions.of(stored, _max_kept(batch)))


def _point_mass_if_bad(scores: Tensor) -> Tensor:
    """Rows with NaN become all mass on token 0: a draft model that fails costs acceptance, not the request."""
    is_bad = scores.amax(-1).isnan()
    scores = scores.masked_fill(is_bad[:, None], -torch.inf)
    scores[:, 0].masked_fill_(is_bad, 0.0)
    return scores


def _max_kept(batch: SamplingBatch) -> int:
    """Most tokens that a row of the batch can be sampled from, as far as the host knows."""
    return max(1 if group.kind is Kind.GREEDY else group.max_top_k for group in batch.constants.groups)
