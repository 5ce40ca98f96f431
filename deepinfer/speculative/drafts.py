"""``Drafts``: the tokens proposed for the requests of a step, and how they move to the step that verifies them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.speculative.draft_distribution import DraftDistributions

NO_DRAFT = -1
"""Stands where nothing was proposed: never accepted, and it must never reach the model."""


@dataclass(frozen=True, slots=True)
class Drafts:
    """Proposed tokens, in the order of positions."""

    token_ids: Tensor
    """int64 ``[requests, slots]``, each in ``[0, vocab)`` or :data:`NO_DRAFT`."""
    distributions: DraftDistributions | None = None
    """Rows in the order (request, slot): what each was drawn from. Rejection sampling only."""

    @classmethod
    def none(cls, num_requests: int, num_slots: int, device: torch.device | None = None) -> Drafts:
        """No proposal for anybody; enough for a verifier that needs no distributions, or with ``num_slots`` 0."""
        return cls(torch.full((num_requests, num_slots), NO_DRAFT, dtype=torch.int64, device=device))

    @classmethod
    def of_slots(cls, token_ids: Sequence[Tensor], distributions: Sequence[DraftDistributions | None]) -> Drafts:
        """Put the slots of a draft pass together; one entry per slot, int64 ``[requests]`` each."""
        stored = [each for each in distributions if each is not None]
        assert len(stored) in (0, len(token_ids)), f"{len(stored)} distributions of {len(token_ids)} slots"
        return cls(torch.stack(list(token_ids), 1), DraftDistributions.interleave(stored) if stored else None)

    @property
    def num_slots(self) -> int:
        return self.token_ids.shape[1]

    def select(self, remap: Tensor) -> Drafts:
        """The drafts of another step's requests.

        Args:
            remap: int64 ``[new requests]``: index here, or -1 for a request that has no drafts.
        """
        index = remap.clamp(min=0)
        token_ids = self.token_ids[index].masked_fill(remap[:, None] < 0, NO_DRAFT)
        if self.distributions is None:
            return Drafts(token_ids)
        slots = torch.arange(self.num_slots, device=remap.device)
        rows = (index[:, None] * self.num_slots + slots).flatten()
        return Drafts(token_ids, self.distributions.select(rows))
