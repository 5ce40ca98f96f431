"""Where each sequence stands, by state slot, in the device's memory: a step can be launched before the host has seen
the tokens of the one before it, or how many drafts were accepted.

What the host does not know it leaves open in the table of a step: such rows have the token -1, and their positions are
counted from a guess of where the chunk starts. The device completes them (:meth:`DeviceTokens.complete`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from deepinfer.layers.fused.device_rows import Column
from deepinfer.speculative.drafts import NO_DRAFT
from deepinfer.speculative.verification import Verified


class SampledRows(NamedTuple):
    """What the verifier needs to know of the rows that a step samples."""

    positions: Tensor
    """``[samples]`` int64: of the token that each row gives."""
    firsts: Tensor
    """``[requests]`` int32: position of each request's first sampled row."""
    drafts: Tensor
    """``[requests, drafts]`` int64: the tokens behind it, :data:`NO_DRAFT` where there are none."""


class DeviceTokens:
    """Written by the sampler of a step and by the draft, read by the forward of the next step.

    Args:
        num_slots: state slots. ngram_size: ids that the n-gram hash sees, the newest included; 0 keeps none.
        num_drafts: most drafts of a sequence.
    """

    def __init__(self, num_slots: int, ngram_size: int, num_drafts: int, device: torch.device) -> None:
        self.num_drafts = num_drafts
        self.newest = torch.zeros(num_slots, dtype=torch.int32, device=device)
        """The token that was sampled last."""
        self.next_position = torch.zeros(num_slots, dtype=torch.int32, device=device)
        """Its position; it has not been computed."""
        self.ngrams = torch.full((num_slots, max(ngram_size, 1)), -1, dtype=torch.int32, device=device)
        """It and the ones before it, newest first; -1 before the start of a sequence."""
        self.drafts = torch.zeros(num_slots, max(num_drafts, 1), dtype=torch.int64, device=device)
        """What is proposed behind it."""

    def complete(self, table: Tensor, ngram_ids: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Fill in the rows that the host left open. Launches only.

        Args:
            table: ``[len(Column), rows]`` int32. An open row has token -1; row ``start + j`` of its chunk becomes the
                j-th row from where the slot stands: its newest token (0), or its draft j - 1.
            ngram_ids: ``[rows, n]`` int32; those of open rows are not looked at.
        Returns:
            new tensors of the same shapes. Padding has token 0 and n-gram ids of -1.
        """
        if table.is_cuda:
            from deepinfer.kernels import device_tokens as kernels  # Triton is there where CUDA is

            return kernels.complete(table, ngram_ids, self.newest, self.next_position, self.drafts, self.ngrams)
        return self.complete_reference(table, ngram_ids)

    def complete_reference(self, table: Tensor, ngram_ids: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """:meth:`complete` in PyTorch: the meaning of the kernel."""
        is_live = table[Column.POSITION] >= 0
        is_open = is_live & (table[Column.TOKEN] < 0)
        slots = table[Column.SLOT].long()
        offset = table[Column.POSITION] - table[Column.START]
        shift = torch.where(is_open, self.next_position[slots] - table[Column.START], 0)
        ahead = (offset - 1).long()
        draft = self.drafts[slots, ahead.clamp(0, self.drafts.shape[1] - 1)].to(torch.int32)
        own = torch.where(offset == 0, self.newest[slots], draft)
        found = table.clone()
        found[Column.TOKEN] = torch.where(is_open, own, table[Column.TOKEN]).clamp_min(0)
        for column in (Column.POSITION, Column.START, Column.END):
            found[column] += shift
        if ngram_ids is None:
            return found, None
        size = ngram_ids.shape[1]
        known = torch.where(is_live[:, None], ngram_ids, -1)
        place = ahead[:, None] - torch.arange(size, device=table.device)  # of the draft, else in the slot's n-grams
        drafted = self.drafts[slots[:, None], place.clamp(0, self.drafts.shape[1] - 1)].to(torch.int32)
        before = self.ngrams[slots[:, None], (-1 - place).clamp(0, size - 1)]
        return found, torch.where(is_open[:, None], torch.where(place >= 0, drafted, before), known)

    def sampled(self, table: Tensor, rows: Tensor, counts: Tensor) -> SampledRows:
        """Look up the rows that a step samples. Launches only.

        Args:
            table: completed. rows: ``[samples]`` int64, of the table. counts: ``[requests]`` int64, at least 1 each and
                at most 1 more than there may be drafts.
        """
        if table.is_cuda:
            from deepinfer.kernels import device_tokens as kernels

            return SampledRows(*kernels.sampled_rows(table, rows, counts, self.num_drafts, len(self.newest)))
        return self.sampled_reference(table, rows, counts)

    def sampled_reference(self, table: Tensor, rows: Tensor, counts: Tensor) -> SampledRows:
        """:meth:`sampled` in PyTorch: the meaning of the kernel."""
        first = counts.cumsum(0) - counts
        positions, tokens = table[Column.POSITION][rows], table[Column.TOKEN][rows].long()
        behind = torch.arange(1, self.num_drafts + 1, device=table.device)
        drafts = tokens[(first[:, None] + behind).clamp_max(len(rows) - 1)]
        drafts = drafts.masked_fill(behind >= counts[:, None], NO_DRAFT)
        return SampledRows(positions.long() + 1, positions[first], drafts)

    def advance(
        self, slots: Tensor, verified: Verified, firsts: Tensor, rows: Tensor, ngram_ids: Tensor | None
    ) -> None:
        """Record what a step emitted: behind it stand the sequences now. Launches only.

        Args:
            slots: ``[requests]`` int64, distinct. verified: of these requests. firsts: of :class:`SampledRows`.
            rows: ``[samples]`` int64, rows of the step that were sampled.
            ngram_ids: ``[rows of the step, n]`` int32, completed.
        """
        if slots.is_cuda:
            from deepinfer.kernels import device_tokens as kernels

            kernels.advance(
                slots,
                verified.token_ids,
                verified.num_accepted,
                firsts,
                verified.first_row,
                rows,
                ngram_ids,
                self.newest,
                self.next_position,
                self.ngrams,
            )
        else:
            self.advance_reference(slots, verified, firsts, rows, ngram_ids)

    def advance_reference(
        self, slots: Tensor, verified: Verified, firsts: Tensor, rows: Tensor, ngram_ids: Tensor | None
    ) -> None:
        """:meth:`advance` in PyTorch: the meaning of the kernel."""
        accepted = verified.num_accepted
        newest = verified.token_ids.gather(1, accepted[:, None])[:, 0].clamp_min(0).to(torch.int32)
        self.newest.index_copy_(0, slots, newest)
        self.next_position.index_copy_(0, slots, firsts + accepted.to(torch.int32) + 1)
        if ngram_ids is not None:
            older = ngram_ids[rows[verified.first_row + accepted]][:, :-1]
            self.ngrams.index_copy_(0, slots, torch.cat((newest[:, None], older), dim=1))

    def propose(self, slots: Tensor, drafts: Tensor) -> None:
        """Record the drafts behind the newest tokens: ``[requests, num_drafts]`` int64."""
        self.drafts.index_copy_(0, slots, drafts)
