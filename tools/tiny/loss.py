"""Logits and the weighted next-token loss."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tools.tiny.blocks import rms
from tools.tiny.fused import fused


@fused
def logits_of(hidden: Tensor, norm: Tensor, head: Tensor, eps: float) -> Tensor:
    """``[N, d]`` -> float32 ``[N, vocab]`` (spec 4.1)."""
    return rms(hidden, norm, eps).float() @ head.float().T


@fused
def next_token_loss(
    hidden: Tensor, norm: Tensor, head: Tensor, targets: Tensor, weights: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Weighted mean of the cross entropy, and the cross entropy of every row ``[N]`` without gradient."""
    logits = rms(hidden, norm, eps).float() @ head.float().T
    losses = F.cross_entropy(logits, targets, reduction="none")
    return (losses * weights).sum() / weights.sum().clamp(min=1.0), losses.detach()


def accuracy(logits: Tensor, targets: Tensor) -> Tensor:
    """``[N]`` booleans: the largest logit is the target's."""
    return logits.argmax(-1) == targets


def tensor(weights: dict[str, list[Tensor] | Tensor], key: str) -> Tensor:
    """A weight that exists once."""
    value = weights[key]
    assert isinstance(value, torch.Tensor), f"{key} is owned by layers"
    return value
