"""What verification is: the rows of a step, the drafts they check, and what is emitted. Two verifiers implement it.

A request with d drafts has rows 0..d, consecutive in the step: row j gives the target's distribution at the position of
draft j + 1, row d that of the token after the last draft (the bonus row). A step emits the accepted prefix of the
drafts and one token more, so a request advances by 1 to d + 1 tokens. Everything here is tensor arithmetic without
synchronisation: how many rows a request has may be known on the device only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from deepinfer.sampling.batch import SamplingBatch
from deepinfer.sampling.sampler import SamplerOutput
from deepinfer.sampling.transfer import pinned_copies
from deepinfer.speculative.drafts import NO_DRAFT, Drafts

NO_TOKEN = -1
"""Fills the emitted tokens of a request behind its last one. It must never reach the model."""


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Which row of the step checks which draft."""

    first_row: Tensor
    """int64 ``[requests]``."""
    num_drafts: Tensor
    """int64 ``[requests]``: drafts that are verified, rows - 1."""
    request: Tensor
    """int64 ``[rows]``: owner of each row."""
    slot: Tensor
    """int64 ``[rows]``: number of the row in its request, from 0."""

    @classmethod
    def of(cls, num_rows: Tensor, total_rows: int) -> RowLayout:
        """Lay the requests out one behind the other.

        Args:
            num_rows: int64 ``[requests]``, each at least 1; they add up to ``total_rows``, which the host knows.
        """
        ends = num_rows.cumsum(0)
        rows = torch.arange(total_rows, device=num_rows.device)
        request = torch.searchsorted(ends, rows, right=True)
        first_row = ends - num_rows
        return cls(first_row, num_rows - 1, request, rows - first_row[request])

    def drafts_of_rows(self, token_ids: Tensor) -> Tensor:
        """The draft that each row checks: int64 ``[rows]``, :data:`NO_DRAFT` in bonus rows.

        Args:
            token_ids: int64 ``[requests, slots]``.
        """
        num_slots = token_ids.shape[1]
        if num_slots == 0:
            return torch.full_like(self.request, NO_DRAFT)
        drafts = token_ids[self.request, self.slot.clamp(max=num_slots - 1)]
        return drafts.masked_fill(self.slot >= self.num_drafts[self.request], NO_DRAFT)

    def by_slot(self, values: Tensor, num_slots: int, padding: float) -> Tensor:
        """Values of rows as ``[requests, num_slots]``, with ``padding`` where a request has no such row."""
        slots = torch.arange(num_slots, device=values.device)
        rows = (self.first_row[:, None] + slots).clamp(max=values.shape[0] - 1)
        return values[rows].masked_fill(slots > self.num_drafts[:, None], padding)


@dataclass(frozen=True, slots=True)
class Verified:
    """Result of a step, on the device of the logits."""

    token_ids: Tensor
    """int64 ``[requests, slots + 1]``: accepted drafts and one more token, then :data:`NO_TOKEN`."""
    num_accepted: Tensor
    """int64 ``[requests]``: accepted drafts; ``num_accepted + 1`` tokens are emitted."""
    is_bad: Tensor
    """bool ``[requests]``: an emitted token comes from a row without a distribution (NaN, +inf, nothing allowed)."""
    acceptance: Tensor
    """float32 ``[requests, slots]``: estimated probability that the draft is accepted, given the ones before it; NaN
    where none was verified. The Gumbel verifier knows the outcome only: 0 or 1."""
    rows: SamplerOutput
    """Per row of the step, as the sampler reports it: token ``token_ids[r, j]`` is that of row ``first_row[r] + j``."""
    first_row: Tensor
    """int64 ``[requests]``."""

    def cpu(self) -> Verified:
        """The same on the host. Waits for the device."""
        names = ("token_ids", "num_accepted", "is_bad", "acceptance", "first_row")
        return replace(self, rows=self.rows.cpu(), **{name: getattr(self, name).cpu() for name in names})

    def to_host(self) -> Verified:
        """What an engine reads of it in pinned host memory, the rest left where it is.

        The copies do not wait: read them behind an event on the current stream.
        """
        names = ("token_ids", "num_accepted", "is_bad", "first_row")
        copies = dict(zip(names, pinned_copies([getattr(self, name) for name in names]), strict=True))
        return replace(self, rows=self.rows.to_host(), **copies)

    def emitted(self, request: int) -> list[int]:
        """Tokens of one request; call it on the host."""
        return self.token_ids[request, : int(self.num_accepted[request]) + 1].tolist()


class Verifier(Protocol):
    """Decides which drafts stand and what follows them."""

    needs_distributions: bool
    """Whether drafts have to carry the distributions that they were drawn from."""

    def verify(self, logits: Tensor, batch: SamplingBatch, drafts: Drafts, num_rows: Tensor) -> Verified:
        """Verify the drafts of a step. Never raises for what a row contains, and never synchronises on an accelerator.

        Args:
            logits: float32 ``[rows, vocab]`` of the target, not changed.
            batch: built for the same rows; the position of row j is that of the token it gives.
            drafts: of the requests of the step; a request uses its first ``num_rows - 1``.
            num_rows: int64 ``[requests]``, 1 to slots + 1; they add up to ``rows``.
        """
        ...


def accepted_prefix(
    layout: RowLayout, num_slots: int, sampled: SamplerOutput, is_accepted: Tensor, acceptance: Tensor
) -> Verified:
    """Cut every request behind its first row that accepts no draft.

    Args:
        num_slots: drafts that a request can have.
        sampled: the token that each row emits if it is reached.
        is_accepted: bool ``[rows]``: the row's token is its draft. Ignored in bonus and in bad rows.
        acceptance: float32 ``[rows]``, see :class:`Verified`.
    """
    is_draft_row = layout.slot < layout.num_drafts[layout.request]
    goes_on = (is_accepted & is_draft_row & ~sampled.is_bad).to(torch.int64)
    num_accepted = layout.by_slot(goes_on, num_slots, 0).cumprod(1).sum(1)  # [requests]
    behind = torch.arange(num_slots + 1, device=num_accepted.device) > num_accepted[:, None]
    return Verified(
        token_ids=layout.by_slot(sampled.token_ids, num_slots + 1, NO_TOKEN).masked_fill_(behind, NO_TOKEN),
        num_accepted=num_accepted,
        is_bad=(layout.by_slot(sampled.is_bad, num_slots + 1, False) & ~behind).any(1),
        acceptance=layout.by_slot(acceptance.masked_fill(~is_draft_row, torch.nan), num_slots, torch.nan),
        rows=sampled,
        first_row=layout.first_row,
    )
