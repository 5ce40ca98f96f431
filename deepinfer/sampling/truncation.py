"""Top-p and top-k, exactly, and the integer masses that make them independent of the order of summation.

A *score* is a log-probability up to a constant of its row, with maximum 0. Its *mass* is ``floor(exp(score) * 2**44)``.
Masses are integers, so their sums do not depend on the device, the batch, or how a sum is split; with at most 2**18
tokens they stay below 2**62, and the rounding is at most 2**-26 of the whole.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

MASS_BITS = 44
MAX_VOCAB = 1 << 18


def mass_of(scores: Tensor) -> Tensor:
    """Integer masses of float32 scores <= 0; int64, same shape. A score of -inf has mass 0."""
    return scores.exp().mul_(2.0**MASS_BITS).to(torch.int64)


def first_argmax(x: Tensor) -> Tensor:
    """Index of the largest element of each row, the lowest among equals. float32 ``[rows, n]`` to int64 ``[rows]``.

    Rows with NaN give some index in range.
    """
    if x.device.type == "cpu":
        return torch.from_numpy(x.detach().numpy().argmax(axis=1))  # NumPy promises the first one, and is the fastest
    return _first_argmax_anywhere(x)


def _first_argmax_anywhere(x: Tensor) -> Tensor:
    ids = torch.arange(x.shape[1], device=x.device)
    is_max = x == x.amax(-1, keepdim=True)
    return torch.where(is_max, ids, x.shape[1]).amin(-1).clamp_(max=x.shape[1] - 1)


def stable_topk(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The ``k`` largest of each row in descending order; of equals the lower index comes first.

    Every element becomes a distinct integer, value above and reversed index below, so that there are no ties left for
    a library to break in its own way.

    Args:
        x: float32 ``[rows, n]``, ``n < 2**32``.
    Returns:
        values float32 and indices int64, both ``[rows, k]``.
    """
    n = x.shape[1]
    bits = (x + 0.0).view(torch.int32)  # -0.0 + 0.0 is 0.0: the two zeros are equal
    bits ^= (bits >> 31) & 0x7FFFFFFF  # the order of floats as the order of signed integers
    keys = bits.to(torch.int64) << 32
    keys += torch.arange(n - 1, -1, -1, device=x.device)
    indices = (n - 1) - (keys.topk(k, dim=-1, sorted=True).values & 0xFFFFFFFF)
    return x.gather(1, indices), indices


@dataclass(frozen=True, slots=True)
class Kept:
    """What top-p and top-k left, in descending order of score."""

    token_ids: Tensor
    """int64 ``[rows, candidates]``, ids distinct in a row."""
    scores: Tensor
    """float32 ``[rows, candidates]``, -inf for candidates that were dropped."""

    def spread(self, vocab_size: int) -> Tensor:
        """The scores by token id: float32 ``[rows, vocab_size]``, -inf where a token was dropped."""
        full = self.scores.new_full((self.scores.shape[0], vocab_size), -torch.inf)
        return full.scatter_(1, self.token_ids, self.scores)


def keep_top(scores: Tensor, top_p: Tensor | None, top_k: Tensor | None, max_top_k: int) -> Kept:
    """Apply top-p, then top-k on what remains (engine spec 5.1).

    Tokens are ordered by descending score, equal scores by ascending id. Top-p drops a token iff the mass strictly
    before it exceeds ``top_p`` times the row's mass, so the token that crosses the threshold stays; top-k keeps the
    first k of those left. Both leave a prefix of the order.

    Args:
        scores: float32 ``[rows, vocab]``, at most 0, and 0 somewhere in each row.
        top_p: float64 ``[rows]``, 1 for off; None if it is off in all rows.
        top_k: int64 ``[rows]``, ``vocab`` or more for off; None if it is off in all rows.
        max_top_k: the largest ``top_k`` (``vocab`` if any row is without): known on the host, so nothing synchronises.
    """
    vocab_size = scores.shape[1]
    mass = limit = None
    num_candidates = min(max_top_k, vocab_size)
    if top_p is not None:
        mass = mass_of(scores)
        total = mass.sum(-1)
        # Off means no limit: with p = 1 a token of mass 0 stays too.
        limit = torch.where(top_p < 1.0, (total * top_p).to(torch.int64), torch.iinfo(torch.int64).max)
        if scores.device.type == "cpu":
            num_candidates = _count_candidates(scores, total, top_p, top_k)
    kept, ids = stable_topk(scores, num_candidates)
    if mass is not None and limit is not None:
        kept_mass = mass.gather(1, ids)
        before = kept_mass.cumsum(-1) - kept_mass
        kept.masked_fill_(before > limit[:, None], -torch.inf)
    if top_k is not None:
        rank = torch.arange(num_candidates, device=scores.device)
        kept.masked_fill_(rank >= top_k[:, None], -torch.inf)
    return Kept(ids, kept)


def _count_candidates(scores: Tensor, total: Tensor, top_p: Tensor, top_k: Tensor | None) -> int:
    """How many of the largest scores are enough for every row. Reads the data, so for a CPU only.

    All tokens below ``(1 - p) * total / vocab`` together weigh less than ``(1 - p) * total``. The tokens at or above
    then weigh more than ``p * total``, so top-p drops everything below. This spares sorting the vocabulary.
    """
    vocab_size = scores.shape[1]
    share = (1.0 - top_p) * total / vocab_size
    floor = share.log() - (MASS_BITS * math.log(2.0) + 0.01)  # the 0.01 covers the rounding of exp and of the masses
    counts = (scores >= floor[:, None].to(torch.float32)).sum(-1)  # log(0) = -inf keeps all of a row with p = 1
    if top_k is not None:
        counts = torch.minimum(counts, top_k)
    return min(max(int(counts.max()), 1), vocab_size)
