"""Verification by coupling: the target draws its own token with noise of (seed, position), and a draft has to equal it.

The emitted token at a position is ``argmax(log q + g(seed, position))`` whether there was a draft or not. So the output
does not depend on the drafter, on how many drafts are verified or on which step verifies them, and its marginal is the
target distribution exactly (engine spec 5.3). Drafts drawn with the same noise are accepted with a probability between
(1 - TV) / (1 + TV) and 1 - TV, where TV is the total variation distance of the two distributions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.sampling.batch import SamplingBatch
from deepinfer.sampling.sampler import Sampler, SamplerOutput
from deepinfer.sampling.transfer import has_kernels
from deepinfer.speculative.drafts import Drafts
from deepinfer.speculative.verification import RowLayout, Verified, accepted_prefix


class GumbelVerifier:
    """The default verifier; see :class:`~deepinfer.speculative.verification.Verifier`. Stateless."""

    needs_distributions = False

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def verify(self, logits: Tensor, batch: SamplingBatch, drafts: Drafts, num_rows: Tensor) -> Verified:
        sampled = self._sampler.sample(logits, batch)
        if has_kernels(logits.device):
            return _accept_on_device(sampled, drafts, num_rows)
        layout = RowLayout.of(num_rows, batch.num_rows)
        is_accepted = sampled.token_ids == layout.drafts_of_rows(drafts.token_ids)
        return accepted_prefix(layout, drafts.num_slots, sampled, is_accepted, is_accepted.to(torch.float32))


def _accept_on_device(sampled: SamplerOutput, drafts: Drafts, num_rows: Tensor) -> Verified:
    from deepinfer.kernels.sampling.verification import accept_prefix  # the kernels are there where a GPU is

    found = accept_prefix(sampled.token_ids, sampled.is_bad, drafts.token_ids.contiguous(), num_rows)
    return Verified(
        token_ids=found.token_ids,
        num_accepted=found.num_accepted,
        is_bad=found.is_bad,
        acceptance=found.acceptance,
        rows=sampled,
        first_row=found.first_row,
    )
