"""Switches that remove one mechanism from the model, to measure what it is worth."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Ablation:
    """All off: the model as specified."""

    no_engram: bool = False
    """Skip the n-gram memory."""
    window_only: bool = False
    """Attention sees its sliding window and no compressed entries."""
    random_selection: int | None = None
    """Seed: replace every index score by a random number, the same for a (layer, position) at every sequence length."""
