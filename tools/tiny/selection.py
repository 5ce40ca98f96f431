"""Which entries a training forward lets each query see, and how the indexer learns to choose them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from tools.tiny.attention import HIDDEN
from tools.tiny.fused import fused


def visible_mask(num_tokens: int, num_entries: int, ratio: int, device: torch.device) -> Tensor:
    """``[T, n]``: entries whose group is complete at the query's position."""
    position = torch.arange(num_tokens, device=device)[:, None]
    return torch.arange(num_entries, device=device) < (position + 1) // ratio


def top_mask(scores: Tensor, allowed: Tensor, count: int) -> Tensor:
    """``[B, T, n]`` booleans: the ``count`` best of the allowed entries.

    A slope far below the spacing of real scores makes the lower index win among equal scores, as the specification
    asks; scores of exactly zero are common.
    """
    num_entries = scores.shape[-1]
    slope = torch.arange(num_entries, device=scores.device) * -1e-7
    ranked = (scores + slope).masked_fill(~allowed, HIDDEN)
    best = ranked.topk(min(count, num_entries), -1).indices
    return torch.zeros_like(ranked, dtype=torch.bool).scatter_(-1, best, True) & allowed


def block_mask(scores: Tensor, visible: Tensor, size: int, count: int) -> Tensor:
    """``[B, T, n]``: entries inside the candidate blocks of each row; the last visible block is always one of them."""
    num_entries = scores.shape[-1]
    padded = torch.nn.functional.pad(scores.masked_fill(~visible, HIDDEN), (0, -num_entries % size), value=HIDDEN)
    best = padded.unflatten(-1, (-1, size)).amax(-1)  # [B, T, blocks]
    last = (visible.sum(-1) - 1).div(size, rounding_mode="floor")  # [T]
    is_last = torch.arange(best.shape[-1], device=scores.device) == last[:, None]
    kept = top_mask(best.masked_fill(is_last, -HIDDEN), best.new_ones(best.shape, dtype=torch.bool), count)
    return kept.repeat_interleave(size, -1)[..., :num_entries]


@fused
def attention_mass(queries: Tensor, entries: Tensor, local_sum: Tensor, visible: Tensor) -> Tensor:
    """Share of dense attention on every entry, summed over heads: ``[B, R, n]``.

    Args:
        queries: ``[B, R, H, D]`` of some rows; local_sum ``[B, R, H]``: log-sum-exp of window and sink there.
        visible: ``[R, n]``.
    """
    heads, width = queries.shape[2:]
    logits = (queries.flatten(1, 2) @ entries.transpose(1, 2)).unflatten(1, (-1, heads)).float() * width**-0.5
    logits = logits.masked_fill(~visible[:, None], HIDDEN)
    total = torch.logaddexp(local_sum, torch.logsumexp(logits, -1))
    return torch.exp(logits - total[..., None]).sum(2)


@dataclass(slots=True)
class IndexLesson:
    """What one index source has to learn from one forward pass."""

    scores: Tensor
    """``[B, R, n]`` of some rows, with gradient."""
    visible: Tensor
    """``[R, n]``."""
    mass: Tensor
    """``[B, R, n]``: attention mass of the layers that use its selection, without gradient."""
    num_layers: int = 0


@dataclass(slots=True)
class IndexLessons:
    """All lessons of a forward pass; ``rows`` are the positions that take part."""

    rows: Tensor
    by_source: dict[int, IndexLesson] = field(default_factory=dict)

    def add_mass(self, source: int, mass: Tensor, share: float = 1.0) -> None:
        lesson = self.by_source[source]
        lesson.mass = lesson.mass + share * mass
        lesson.num_layers += 1

    def loss(self, temperature: float) -> Tensor:
        """Cross entropy between attention mass and softmax of the scores; a row counts by its mass on entries."""
        losses = []
        for lesson in self.by_source.values():
            logits = (lesson.scores * temperature).masked_fill(~lesson.visible, HIDDEN)
            weight = lesson.mass.sum(-1, keepdim=True)
            target = lesson.mass / weight.clamp(min=1e-6)
            cross = -(target * torch.log_softmax(logits, -1)).sum(-1)
            weight = weight[..., 0].clamp(max=1) + 0.02
            losses.append((cross * weight).sum() / weight.sum())
        return torch.stack(losses).mean()

    def recall(self, count: int) -> dict[int, float]:
        """Share of the attention mass that the ``count`` best-scored entries hold, by source."""
        result = {}
        for source, lesson in self.by_source.items():
            chosen = top_mask(lesson.scores.detach(), lesson.visible.expand_as(lesson.scores), count)
            result[source] = float((lesson.mass * chosen).sum() / lesson.mass.sum().clamp(min=1e-6))
        return result
