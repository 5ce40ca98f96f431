"""From the chunks of a launched step to what the verifier asks for: parameters, masks, drafts, and the rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress

import numpy as np
import torch
from torch import Tensor

from deepinfer.messages import Chunk
from deepinfer.sampling.batch import SamplingBatchBuilder
from deepinfer.sampling.state import SamplingState
from deepinfer.sampling.transfer import kept_on_device, to_device
from deepinfer.speculative.draft_distribution import DraftDistributions
from deepinfer.speculative.drafts import NO_DRAFT, Drafts
from deepinfer.speculative.verification import Verified, Verifier
from deepinfer.structured.masks import MaskBatch, MaskRows
from deepinfer.worker.device_tokens import DeviceTokens, SampledRows
from deepinfer.worker.step_results import Launched, RowOwner


@dataclass(frozen=True, slots=True)
class Sampling:
    """The chunks of a step that sample and are alive."""

    step: Launched
    chunks: tuple[Chunk, ...]
    owners: tuple[RowOwner, ...]
    rows: Tensor
    """``[samples]`` int64, rows of the step."""
    counts: Tensor
    """``[chunks]`` int64, samples of each."""
    has_every_row: bool
    """``rows`` are all rows of the step, in order."""
    slots: list[int]
    """State slots."""
    num_sampled: list[int]
    """Samples of each chunk."""
    firsts: list[int]
    """Position of each first sampled row; where the host guessed, it may be too early."""

    @classmethod
    def of(cls, step: Launched, states: Sequence[RowOwner | None]) -> Sampling | None:
        """None if nothing is sampled.

        Args:
            states: owners, one per chunk that samples, in plan order; None where that has ended.
        """
        chunks = [chunk for chunk in step.plan.chunks if chunk.num_sampled]
        owners = [owner for owner in states if owner is not None]
        if not owners:
            return None
        rows, has_every_row = step.result.sample_rows, step.result.samples_every_row
        if len(owners) < len(states):
            alive = [owner is not None for owner in states]
            places = np.flatnonzero(np.repeat(alive, [chunk.num_sampled for chunk in chunks]))
            rows, has_every_row = rows[kept_on_device(places, rows.device)], False
            chunks = list(compress(chunks, alive))
        num_sampled = [chunk.num_sampled for chunk in chunks]
        return cls(
            step=step,
            chunks=tuple(chunks),
            owners=tuple(owners),
            rows=rows,
            counts=kept_on_device(np.array(num_sampled, dtype=np.int64), rows.device),
            has_every_row=has_every_row,
            slots=[chunk.state_slot for chunk in chunks],
            num_sampled=num_sampled,
            firsts=[chunk.end - chunk.num_sampled for chunk in chunks],
        )

    @property
    def num_rows(self) -> int:
        """Samples of all chunks."""
        return sum(self.num_sampled)


class StepVerifier:
    """Runs the verifier on the sampled rows of a step.

    Args:
        batches: parameters of sampled rows. masks: of grammars. num_drafts: that a sequence can have.
    """

    def __init__(self, verifier: Verifier, batches: SamplingBatchBuilder, masks: MaskBatch, num_drafts: int) -> None:
        self._verifier, self._batches, self._masks = verifier, batches, masks
        self._num_drafts = num_drafts

    @property
    def needs_distributions(self) -> bool:
        """Whether drafts have to come with what they were drawn from."""
        return self._verifier.needs_distributions

    def verify(
        self,
        sampling: Sampling,
        sampled: SampledRows | None = None,
        distributions: DraftDistributions | None = None,
    ) -> Verified:
        """Choose tokens. Launches only.

        Args:
            sampled: rows of a chained step, as the device has them; no owner may need to know more of its tokens.
            distributions: of the drafts, where the verifier needs them.
        """
        chunks, owners = sampling.chunks, sampling.owners
        states: list[SamplingState] = []
        positions: list[int] = []
        for chunk, owner, first in zip(chunks, owners, sampling.firsts, strict=True):
            states += [owner.sampling] * chunk.num_sampled
            positions += range(first + 1, first + 1 + chunk.num_sampled)
        pending = None
        if any(owner.sampling.params.uses_penalties for owner in owners):
            pending = [drafts[:offset] for drafts in map(_drafts, chunks) for offset in range(len(drafts) + 1)]
        batch = self._batches.build(states, positions, pending, None if sampled is None else sampled.positions)
        constrained = _mask_rows(chunks, owners)
        masks = self._masks.compute(constrained) if constrained else None
        if masks is not None:
            batch = batch.with_grammar(masks)
        drafts = self._drafts_of(chunks, sampling.rows.device) if sampled is None else sampled.drafts
        logits = sampling.step.result.row_logits(slice(None) if sampling.has_every_row else sampling.rows)
        return self._verifier.verify(logits, batch, Drafts(drafts, distributions), sampling.counts)

    def sampled_rows(self, sampling: Sampling, tokens: DeviceTokens) -> SampledRows:
        """The rows of a chained step, as the device has them."""
        table = sampling.step.result.table
        assert table is not None, "a step whose rows only the host has"
        return tokens.sampled(table, sampling.rows, sampling.counts)

    def _drafts_of(self, chunks: Sequence[Chunk], device: torch.device) -> Tensor:
        """The drafts that the rows of ``chunks`` verify: int64 ``[chunks, drafts]``."""
        ids = np.full((len(chunks), self._num_drafts), NO_DRAFT, np.int64)
        for place, chunk in enumerate(chunks):
            drafts = _drafts(chunk)
            ids[place, : len(drafts)] = drafts
        return to_device(ids, device)


def _drafts(chunk: Chunk) -> tuple[int, ...]:
    """The drafts that a chunk verifies: none of a prompt."""
    return chunk.token_ids[chunk.num_rows - chunk.num_sampled + 1 :]


def _mask_rows(chunks: Sequence[Chunk], owners: Sequence[RowOwner]) -> list[MaskRows]:
    """The sampled rows that a grammar constrains, numbered as they are sampled."""
    found, row = [], 0
    for chunk, owner in zip(chunks, owners, strict=True):
        if owner.grammar is not None:
            found.append(MaskRows(owner.grammar, row, _drafts(chunk)))
        row += chunk.num_sampled
    return found
