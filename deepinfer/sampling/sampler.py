"""``Sampler``: logits in, one token per row out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from deepinfer.sampling.batch import Kind, RowGroup, Rows, SamplingBatch
from deepinfer.sampling.distribution import distribution_scores
from deepinfer.sampling.logprobs import LOGPROB_FLOOR, logprobs_of, scaled_scores
from deepinfer.sampling.processors import process
from deepinfer.sampling.random import gumbel_noise, gumbel_noise_at
from deepinfer.sampling.transfer import pinned_copy, to_device
from deepinfer.sampling.truncation import MAX_VOCAB, Kept, first_argmax, keep_top

if TYPE_CHECKING:
    from deepinfer.sampling.device_choice import DeviceChoice


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """One token per row, on the device of the logits; :meth:`cpu` brings everything over at once."""

    token_ids: Tensor
    """int64 ``[rows]``; 0 in bad rows."""
    is_bad: Tensor
    """bool ``[rows]``: the row had NaN or +inf, or no token was left. Its request has to end with an error."""
    logprobs: Tensor | None
    """float32 ``[rows]``: of the token; NaN in rows that did not ask. None if no row asked, as are the next three."""
    ranks: Tensor | None
    """int64 ``[rows]``: 1 + number of strictly more likely tokens; 0 in rows that did not ask."""
    top_ids: Tensor | None
    """int64 ``[rows, most alternatives of a row]``, most likely first; -1 beyond what a row's group extracted."""
    top_logprobs: Tensor | None
    """float32, same shape."""
    top_counts: tuple[int, ...]
    """Alternatives that each row asked for; empty if no row asked for log-probabilities."""

    def cpu(self) -> SamplerOutput:
        """The same on the host. Waits for the device."""
        names = ("token_ids", "is_bad", "logprobs", "ranks", "top_ids", "top_logprobs")
        tensors = {name: getattr(self, name) for name in names}
        return replace(self, **{name: tensor.cpu() for name, tensor in tensors.items() if tensor is not None})

    def to_host(self) -> SamplerOutput:
        """The log-probabilities in pinned host memory; tokens stay where they are.

        The copies do not wait: read them behind an event on the current stream.
        """
        names = ("logprobs", "ranks", "top_ids", "top_logprobs")
        tensors = {name: getattr(self, name) for name in names}
        copies: dict[str, Any] = {name: pinned_copy(each) for name, each in tensors.items() if each is not None}
        return replace(self, **copies) if copies else self

    def alternatives(self, row: int) -> list[tuple[int, float]]:
        """(id, log-probability) of exactly as many most likely tokens as the row asked for; call it on the host."""
        if self.top_ids is None or self.top_logprobs is None:
            return []
        count = self.top_counts[row]
        return list(zip(self.top_ids[row, :count].tolist(), self.top_logprobs[row, :count].tolist(), strict=True))


class Sampler:
    """Chooses the tokens of a step. Stateless; every row depends on its own logits, parameters, seed and position only.

    A sampled token is ``argmax(log q + g)`` with the Gumbel noise ``g`` of (seed, position): an exact draw from q, and
    the same with or without speculation, in any batch (engine spec 5.3). Ties go to the lowest id.

    Args:
        vocab_size: width of the logits.
        banned_ids: tokens that are never generated.
        device: where the logits are.
    """

    def __init__(self, vocab_size: int, *, banned_ids: Sequence[int] = (), device: torch.device | None = None) -> None:
        assert 0 < vocab_size <= MAX_VOCAB, f"{vocab_size=}, and sums of masses have room for {MAX_VOCAB} tokens"
        assert all(0 <= token < vocab_size for token in banned_ids), f"{banned_ids=} for {vocab_size=}"
        self.vocab_size = vocab_size
        ids = np.unique(np.asarray(banned_ids, dtype=np.int64))
        self._host_banned_ids: list[int] = ids.tolist()
        self._device_choice: DeviceChoice | None = None
        self._banned_ids = to_device(ids, device or torch.device("cpu")) if len(ids) else None

    def sample(self, logits: Tensor, batch: SamplingBatch) -> SamplerOutput:
        """Sample every row. Never raises for what a row contains, and never synchronises on an accelerator.

        Args:
            logits: float32 ``[rows, vocab]``, not changed.
            batch: built for the same rows.
        """
        expected = (batch.num_rows, self.vocab_size)
        assert tuple(logits.shape) == expected, f"{tuple(logits.shape)=}, {expected=}"
        assert logits.dtype == torch.float32, f"{logits.dtype=}"
        logits = logits.contiguous()
        if batch.constants.parameters is not None and not batch.constants.wants_logprobs:
            return self._choose_on_device(logits, batch)
        raw_max = logits.amax(-1)  # NaN if there is one in the row
        is_bad = ~raw_max.isfinite()
        processed = process(logits, batch, self._banned_ids)
        row_max = raw_max
        if processed is not logits:
            row_max = processed.amax(-1)
            is_bad |= ~row_max.isfinite()
        report = _Report(batch, logits.device) if batch.constants.wants_logprobs else None
        token_ids = torch.empty(batch.num_rows, dtype=torch.int64, device=logits.device)
        for group in batch.constants.groups:
            chosen, scores = _choose(group, batch, processed[group.rows], row_max[group.rows])
            token_ids[group.rows] = chosen
            if report is not None and scores is not None:
                report.write(group.rows, scores, chosen, group.num_top)
        if report is None:
            return SamplerOutput(token_ids.masked_fill_(is_bad, 0), is_bad, None, None, None, None, ())
        for rows, num_top in batch.constants.raw_groups:
            report.write(rows, scaled_scores(logits[rows], raw_max[rows], None, None), token_ids[rows], num_top)
        report.blank(is_bad)
        return SamplerOutput(
            token_ids.masked_fill_(is_bad, 0),
            is_bad,
            report.logprobs,
            report.ranks,
            report.top_ids,
            report.top_logprobs,
            batch.constants.top_counts,
        )

    def _choose_on_device(self, logits: Tensor, batch: SamplingBatch) -> SamplerOutput:
        if self._device_choice is None:
            from deepinfer.sampling.device_choice import DeviceChoice  # the kernels are there where a GPU is

            self._device_choice = DeviceChoice(self.vocab_size, self._host_banned_ids, logits.device)
        token_ids, is_bad = self._device_choice.sample(logits, batch)
        if batch.forced is not None:
            token_ids = torch.where((batch.forced >= 0) & ~is_bad, batch.forced, token_ids)
        return SamplerOutput(token_ids, is_bad, None, None, None, None, ())

    def distributions(self, logits: Tensor, batch: SamplingBatch) -> Iterator[tuple[RowGroup, Tensor]]:
        """What :meth:`sample` draws from, a group of rows at a time; teacher forcing is left to the caller.

        Args:
            logits: float32 ``[rows, vocab]``, not changed.
            batch: built for the same rows.
        Yields:
            the group and float32 scores ``[rows of the group, vocab]``: log-probabilities up to a constant of the row,
            the largest 0, and -inf for tokens that cannot be sampled. NaN in rows that :meth:`sample` calls bad.
        """
        logits = logits.contiguous()
        processed = process(logits, batch, self._banned_ids)
        row_max = processed.amax(-1)
        for group in batch.constants.groups:
            yield group, distribution_scores(group, processed[group.rows], row_max[group.rows])


class _Report:
    """Collects log-probabilities of all rows."""

    def __init__(self, batch: SamplingBatch, device: torch.device) -> None:
        shape = (batch.num_rows, max(batch.constants.top_counts))
        self.logprobs = torch.full(shape[:1], torch.nan, device=device)
        self.ranks = torch.zeros(shape[:1], dtype=torch.int64, device=device)
        self.top_ids = torch.full(shape, -1, dtype=torch.int64, device=device)
        self.top_logprobs = torch.full(shape, torch.nan, device=device)

    def write(self, rows: Rows, scores: Tensor, token_ids: Tensor, num_top: int) -> None:
        found = logprobs_of(scores, token_ids, num_top)
        self.logprobs[rows] = found.logprobs
        self.ranks[rows] = found.ranks
        if num_top:
            self.top_ids[rows, :num_top] = found.top_ids
            self.top_logprobs[rows, :num_top] = found.top_logprobs

    def blank(self, is_bad: Tensor) -> None:
        """Bad rows get the floor instead of what NaN left behind."""
        self.logprobs.masked_fill_(is_bad, LOGPROB_FLOOR)
        self.ranks.masked_fill_(is_bad, 0)
        self.top_logprobs.masked_fill_(is_bad[:, None], LOGPROB_FLOOR)


def _choose(group: RowGroup, batch: SamplingBatch, logits: Tensor, row_max: Tensor) -> tuple[Tensor, Tensor | None]:
    """The tokens of a group's rows and, if it wants log-probabilities, the scores to take them from.

    Args:
        logits: float32 ``[rows of the group, vocab]``, processed.
        row_max: float32 ``[rows of the group]``.
    """
    scores = None
    if group.kind is Kind.GREEDY:
        chosen = first_argmax(logits)
        if group.wants_logprobs:  # at temperature 1: in the near-greedy limit every log-probability would be 0
            scores = scaled_scores(logits, row_max, None, None)
    else:
        positions = batch.positions[group.rows]
        scores = scaled_scores(logits, row_max, group.temperature, group.min_log_p)
        if group.kind is Kind.FULL:
            noise = gumbel_noise(group.seeds, positions, batch.vocab_size)
            chosen = first_argmax(noise.add_(scores))
        else:
            kept = keep_top(scores, group.top_p, group.top_k, group.max_top_k)
            chosen = _race(kept, group.seeds, positions, batch.vocab_size)
            scores = kept.spread(batch.vocab_size) if group.wants_logprobs else None
    if batch.forced is not None:
        forced = batch.forced[group.rows]
        chosen = torch.where(forced >= 0, forced, chosen)
    return chosen, scores if group.wants_logprobs else None


def _race(kept: Kept, seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """``argmax(score + noise)`` over the kept tokens, lowest id among equals; int64 ``[rows]``."""
    keys = gumbel_noise_at(seeds, positions, kept.token_ids).add_(kept.scores)
    is_best = keys == keys.amax(-1, keepdim=True)
    winners = torch.where(is_best, kept.token_ids, vocab_size).amin(-1)
    return winners.clamp_(max=vocab_size - 1)  # a row of NaN has no winner
