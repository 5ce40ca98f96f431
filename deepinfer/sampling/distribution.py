"""The distribution that a row is sampled from, for those who need more of it than one token (speculation)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from deepinfer.sampling.batch import Kind, RowGroup, SamplingBatch
from deepinfer.sampling.logprobs import scaled_scores
from deepinfer.sampling.truncation import first_argmax, keep_top


def distribution_scores(group: RowGroup, logits: Tensor, row_max: Tensor) -> Tensor:
    """Log-probabilities up to a constant of the row, after temperature, min_p, top-p and top-k.

    Args:
        logits: float32 ``[rows of the group, vocab]``, with masks, biases and penalties applied.
        row_max: float32 ``[rows of the group]``, the maximum of each row.
    Returns:
        float32, same shape: the largest of a row is 0, tokens that cannot be sampled have -inf. A greedy row has one
        token, the first arg-max.
    """
    if group.kind is Kind.GREEDY:
        scores = torch.full_like(logits, -torch.inf)
        return scores.scatter_(1, first_argmax(logits)[:, None], 0.0)
    scores = scaled_scores(logits, row_max, group.temperature, group.min_log_p)
    if group.kind is Kind.TRUNCATED:
        return keep_top(scores, group.top_p, group.top_k, group.max_top_k).spread(logits.shape[1])
    return scores


def without_logprobs(batch: SamplingBatch) -> SamplingBatch:
    """The same batch with nobody asking for log-probabilities: for draws that no user sees."""
    constants = batch.constants
    if not constants.wants_logprobs:
        return batch
    groups = tuple(replace(group, wants_logprobs=False, num_top=0) for group in constants.groups)
    quiet = replace(constants, groups=groups, raw_groups=(), top_counts=(), wants_logprobs=False)
    return replace(batch, constants=quiet)
