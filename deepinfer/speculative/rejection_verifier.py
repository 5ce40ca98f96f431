"""Verification by rejection sampling, token by token (spec 7.5, engine spec 4.6).

With q the target's and p the draft's distribution, draft x stands with probability min(1, q(x) / p(x)); otherwise the
token is drawn from ``max(q - p * exp(-SLACK), 0)``, normalised. The emitted token then has distribution q, up to the
bias of the slack: with e = 1 - exp(-SLACK), every token's probability lies in [q - e / (1 + e), (1 + e) * q].

The distribution is exact under any schedule that does not look at a draft to decide whether it is verified; the budget
has to use stale rates for that (see :mod:`deepinfer.speculative.stale_rates`). Which tokens come out depends on where
steps begin and end. Use the Gumbel verifier where they must not.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from deepinfer.sampling.batch import RowGroup, SamplingBatch
from deepinfer.sampling.distribution import without_logprobs
from deepinfer.sampling.random import Purpose, gumbel_noise, uniform
from deepinfer.sampling.sampler import Sampler, SamplerOutput
from deepinfer.sampling.truncation import first_argmax
from deepinfer.speculative.draft_distribution import DraftDistributions, log_mass
from deepinfer.speculative.drafts import NO_DRAFT, Drafts
from deepinfer.speculative.verification import RowLayout, Verified, accepted_prefix

SLACK = 5e-5
"""Keeps the residual above zero where p and q are equal up to rounding."""
_KEPT_SHARE = math.exp(-SLACK)


class RejectionVerifier:
    """The classic verifier; see :class:`~deepinfer.speculative.verification.Verifier`. Stateless.

    The accept test, the draw after a rejection and the draw of a row without a draft have random streams of their own,
    each a function of (seed, position).
    """

    needs_distributions = True

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def verify(self, logits: Tensor, batch: SamplingBatch, drafts: Drafts, num_rows: Tensor) -> Verified:
        stored, num_slots = drafts.distributions, drafts.num_slots
        assert stored is not None or num_slots == 0, "rejection sampling needs the distributions of the drafts"
        layout = RowLayout.of(num_rows, batch.num_rows)
        fresh = self._sampler.sample(logits, without_logprobs(batch))
        token_ids = fresh.token_ids.clone()  # what a row without a draft emits
        row_drafts = layout.drafts_of_rows(drafts.token_ids)
        is_accepted = torch.zeros_like(fresh.is_bad)
        acceptance = torch.zeros(batch.num_rows, device=logits.device)
        if stored is not None:
            stored_rows = layout.request * num_slots + layout.slot.clamp(max=num_slots - 1)
            for group, target in self._sampler.distributions(logits, batch):
                rows = group.rows
                positions, proposed = batch.positions[rows], row_drafts[rows]
                judged = _judge(group, positions, target, proposed, stored, stored_rows[rows])
                is_accepted[rows], redrawn, acceptance[rows] = judged
                verdict = torch.where(is_accepted[rows], proposed, redrawn)
                token_ids[rows] = torch.where(proposed == NO_DRAFT, token_ids[rows], verdict)
        if batch.forced is not None:  # teacher forcing: the forced token stands, and so does a draft that equals it
            is_forced = batch.forced >= 0
            token_ids = torch.where(is_forced, batch.forced, token_ids)
            is_accepted = torch.where(is_forced, row_drafts == batch.forced, is_accepted)
            acceptance = torch.where(is_forced, is_accepted.to(torch.float32), acceptance)
        sampled = self._report(logits, batch, fresh, token_ids)
        return accepted_prefix(layout, num_slots, sampled, is_accepted, acceptance)

    def _report(self, logits: Tensor, batch: SamplingBatch, fresh: SamplerOutput, token_ids: Tensor) -> SamplerOutput:
        """The sampler's own report on tokens that are already chosen."""
        if not batch.constants.wants_logprobs:
            return replace(fresh, token_ids=token_ids.masked_fill(fresh.is_bad, 0))
        return self._sampler.sample(logits, replace(batch, forced=token_ids))


def _judge(
    group: RowGroup,
    positions: Tensor,
    target: Tensor,
    proposed: Tensor,
    stored: DraftDistributions,
    stored_rows: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """The accept test of a group's rows, and the token of each in case it fails.

    Args:
        positions: int64 ``[rows]``.
        target: float32 scores ``[rows, vocab]`` of q.
        proposed: int64 ``[rows]``, :data:`NO_DRAFT` for none.
        stored_rows: int64 ``[rows]``, where p of each row is stored.
    Returns:
        accepted, bool; the redrawn token, int64; 1 - (mass of the residual), float32; all ``[rows]``.
    """
    seeds = group.seeds
    target_log_mass = log_mass(target)  # [rows], float64
    draft, draft_log_mass = stored.scores_of(stored_rows)
    ids = proposed.clamp(min=0)[:, None]
    log_q = target.gather(1, ids)[:, 0].to(torch.float64) - target_log_mass
    log_p = draft.gather(1, ids)[:, 0].to(torch.float64) - draft_log_mass
    is_accepted = uniform(seeds, positions, Purpose.ACCEPT)[:, 0] < (log_q - log_p).exp()
    weights = target.sub(target_log_mass.to(torch.float32)[:, None]).exp_()
    weights -= draft.sub_(draft_log_mass.to(torch.float32)[:, None]).exp_().mul_(_KEPT_SHARE)
    weights.clamp_(min=0.0)
    residual_mass = weights.sum(-1)
    noise = gumbel_noise(seeds, positions, target.shape[1], Purpose.RESIDUAL)
    redrawn = first_argmax(noise.add_(weights.log_()))
    redrawn = torch.where(residual_mass > 0, redrawn, first_argmax(target))
    return is_accepted & (proposed != NO_DRAFT), redrawn, (1.0 - residual_mass).clamp_(0.0, 1.0)
