"""Log-probabilities, ranks and most likely alternatives of chosen tokens and of prompt tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.sampling.params import SamplingParams
from deepinfer.sampling.truncation import MASS_BITS, keep_top, mass_of, stable_topk

LOGPROB_FLOOR = -9999.0
"""Stands for the log-probability of a token that cannot occur, since minus infinity is no JSON."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """One row per token."""

    logprobs: Tensor
    """float32 ``[rows]``, of the token itself."""
    ranks: Tensor
    """int64 ``[rows]``: 1 + number of tokens that are strictly more likely."""
    top_ids: Tensor
    """int64 ``[rows, k]``, most likely first, of equals the lower id."""
    top_logprobs: Tensor
    """float32 ``[rows, k]``."""


def scaled_scores(logits: Tensor, row_max: Tensor, temperature: Tensor | None, min_log_p: Tensor | None) -> Tensor:
    """Log-probabilities up to a constant per row: ``(logits - max) / temperature``, -inf below ``min_log_p``.

    Every operation is elementwise and exactly rounded, so a row is the same bits in any batch and on any device.

    Args:
        logits: float32 ``[rows, vocab]``.
        row_max: float32 ``[rows]``, the maximum of each row.
        temperature: float32 ``[rows, 1]``, or None for 1.
        min_log_p: float32 ``[rows, 1]``, the logarithm of min_p (-inf for off), or None.
    Returns:
        float32 ``[rows, vocab]``, a new tensor.
    """
    scores = logits - row_max[:, None]
    if temperature is not None:
        scores /= temperature
    if min_log_p is not None:
        scores.masked_fill_(scores < min_log_p, -torch.inf)
    return scores


def logprobs_of(scores: Tensor, token_ids: Tensor, num_top: int) -> TokenLogprobs:
    """Normalise scores and look tokens up.

    Args:
        scores: float32 ``[rows, vocab]`` as in :func:`scaled_scores`, -inf for tokens that cannot occur.
        token_ids: int64 ``[rows]``.
        num_top: alternatives per row, at most ``vocab``.
    """
    total = mass_of(scores).sum(-1)
    log_total = total.to(torch.float64).log() - MASS_BITS * math.log(2.0)
    own = scores.gather(1, token_ids[:, None])
    top_scores, top_ids = stable_topk(scores, num_top)
    return TokenLogprobs(
        logprobs=_normalise(own, log_total)[:, 0],
        ranks=(scores > own).sum(-1) + 1,
        top_ids=top_ids,
        top_logprobs=_normalise(top_scores, log_total),
    )


def _normalise(scores: Tensor, log_total: Tensor) -> Tensor:
    logprobs = (scores.to(torch.float64) - log_total[:, None]).to(torch.float32)
    return logprobs.clamp_(min=LOGPROB_FLOOR)


def token_logprobs(
    logits: Tensor, targets: Tensor, k: int, *, slab: int = 64, params: SamplingParams | None = None
) -> TokenLogprobs:
    """Log-probabilities of given tokens, as for ``prompt_logprobs``; exact, in bounded memory.

    Args:
        logits: float32 ``[tokens, vocab]``; row i is the distribution of ``targets[i]``.
        targets: int64 ``[tokens]``.
        k: alternatives per token, 0 to ``vocab``.
        slab: rows at a time; the temporaries take about ``slab * vocab * 24`` bytes. It does not change a bit.
        params: temperature, min_p, top_p and top_k to apply first, as sampling with them would (greedy parameters
            apply none); None for the log-softmax of ``logits``.
    """
    parts = []
    for top in range(0, logits.shape[0], slab):
        rows = logits[top : top + slab]
        parts.append(logprobs_of(_scores_under(rows, params), targets[top : top + slab], k))
    if not parts:
        parts.append(logprobs_of(logits, targets, k))
    return TokenLogprobs(
        logprobs=torch.cat([part.logprobs for part in parts]),
        ranks=torch.cat([part.ranks for part in parts]),
        top_ids=torch.cat([part.top_ids for part in parts]),
        top_logprobs=torch.cat([part.top_logprobs for part in parts]),
    )


def _scores_under(logits: Tensor, params: SamplingParams | None) -> Tensor:
    """Scores of the distribution that ``params`` samples from, without masks and penalties."""
    row_max = logits.amax(-1)
    if params is None or params.is_greedy:
        return scaled_scores(logits, row_max, None, None)
    rows, vocab_size = logits.shape
    temperature = logits.new_full((rows, 1), params.temperature)
    min_log_p = logits.new_full((rows, 1), math.log(params.min_p)) if params.min_p else None
    scores = scaled_scores(logits, row_max, temperature, min_log_p)
    top_k = params.top_k if 0 < params.top_k < vocab_size else None
    if params.top_p == 1.0 and top_k is None:
        return scores
    top_p = torch.full((rows,), params.top_p, dtype=torch.float64, device=logits.device) if params.top_p < 1.0 else None
    top_k_rows = None if top_k is None else torch.full((rows,), top_k, device=logits.device)
    return keep_top(scores, top_p, top_k_rows, top_k or vocab_size).spread(vocab_size)
