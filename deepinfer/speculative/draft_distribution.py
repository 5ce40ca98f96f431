"""``DraftDistributions``: what drafts were drawn from, in as little memory as it takes.

A row of float32 log-probabilities over the vocabulary is half a megabyte; five per request and 256 requests would be
0.66 GB. Here a row is either dense, bf16 over the vocabulary, or sparse, the ids and bf16 scores of what top-k left.
Scores are rounded to bf16 *before* the draft is drawn, so what is stored is exactly what was drawn from, and the two
forms of a row stand for the same distribution bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.sampling.truncation import MASS_BITS, mass_of, stable_topk


def log_mass(scores: Tensor) -> Tensor:
    """Logarithm of the sum of ``exp(scores)`` along each row, whatever the order of summation.

    Args:
        scores: float32 ``[rows, n]``, at most 0.
    Returns:
        float64 ``[rows]``.
    """
    return mass_of(scores).sum(-1).to(torch.float64).log() - MASS_BITS * math.log(2.0)


@dataclass(frozen=True, slots=True)
class DraftDistributions:
    """One distribution per row."""

    vocab_size: int
    scores: Tensor
    """bf16 ``[rows, vocab]`` (dense) or ``[rows, kept]`` (sparse): log-probabilities up to a constant, at most 0."""
    token_ids: Tensor | None
    """int32 ``[rows, kept]``, distinct in a row; None if dense."""

    @classmethod
    def of(cls, scores: Tensor, max_kept: int) -> DraftDistributions:
        """Store rows of scores.

        Args:
            scores: float32 ``[rows, vocab]``, at most 0; no NaN.
            max_kept: upper bound of the tokens above -inf in any row, known on the host; ``vocab`` for no bound.
        """
        vocab_size = scores.shape[1]
        if 3 * max_kept >= vocab_size:  # an id and a score take three times the room of a score
            return cls(vocab_size, scores.to(torch.bfloat16), None)
        kept, ids = stable_topk(scores, max_kept)
        return cls(vocab_size, kept.to(torch.bfloat16), ids.to(torch.int32))

    @classmethod
    def interleave(cls, parts: Sequence[DraftDistributions]) -> DraftDistributions:
        """Rows in the order (row, part): row r of part s becomes row ``r * len(parts) + s``.

        Parts are of one form and width, as the steps of one draft pass are.
        """
        first = parts[0]
        scores = torch.stack([part.scores for part in parts], 1).flatten(0, 1)
        if first.token_ids is None:
            return cls(first.vocab_size, scores, None)
        ids = [part.token_ids for part in parts if part.token_ids is not None]
        return cls(first.vocab_size, scores, torch.stack(ids, 1).flatten(0, 1))

    @property
    def num_bytes(self) -> int:
        ids = 0 if self.token_ids is None else self.token_ids.numel() * self.token_ids.element_size()
        return self.scores.numel() * self.scores.element_size() + ids

    def select(self, rows: Tensor) -> DraftDistributions:
        """These rows only. int64 ``[n]``, each in range."""
        ids = None if self.token_ids is None else self.token_ids[rows]
        return DraftDistributions(self.vocab_size, self.scores[rows], ids)

    def scores_of(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The scores of some rows by token id, and the logarithm of their masses.

        Args:
            rows: int64 ``[n]``.
        Returns:
            float32 ``[n, vocab]``, a new tensor, and float64 ``[n]``.
        """
        scores = self.scores[rows].to(torch.float32)
        total = log_mass(scores)
        if self.token_ids is None:
            return scores, total
        full = scores.new_full((scores.shape[0], self.vocab_size), -torch.inf)
        return full.scatter_(1, self.token_ids[rows].to(torch.int64), scores), total
