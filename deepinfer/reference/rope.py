"""Rotary position embedding: frequencies with and without YaRN, rotation of adjacent pairs (spec 4.4)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from deepinfer.config.model import TextConfig, YarnConfig


def plain_frequencies(theta: float, width: int) -> Tensor:
    """``theta**(-2i/width)`` in radians per token, ``[width / 2]`` float64."""
    pair = torch.arange(width // 2, dtype=torch.float64)
    return theta ** (-2 * pair / width)


def yarn_bounds(theta: float, width: int, yarn: YarnConfig) -> tuple[float, float]:
    """``lo`` and ``hi``: pairs below ``lo`` keep their frequency, pairs above ``hi`` are slowed down by the factor."""

    def pair_of(rotations: float) -> float:
        """The pair that turns ``rotations`` times within the original context length."""
        length = yarn.original_max_position_embeddings
        return width * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_of(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_of(yarn.beta_slow)), width - 1)
    return (low, high + 0.001) if low == high else (low, high)


def yarn_frequencies(theta: float, width: int, yarn: YarnConfig) -> Tensor:
    """Frequencies stretched for long contexts, ``[width / 2]`` float64. No magnitude factor belongs to it."""
    plain = plain_frequencies(theta, width)
    low, high = yarn_bounds(theta, width, yarn)
    ramp = ((torch.arange(width // 2, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
    return plain * (1 - ramp) + plain / yarn.factor * ramp


def layer_frequencies(text: TextConfig, ratio: int) -> Tensor:
    """The one table of a layer: everything in it, its window keys and index queries included, turns with this."""
    if ratio == 0:
        return plain_frequencies(text.rope_theta, text.qk_rope_head_dim)
    if text.rope_scaling is None:
        return plain_frequencies(text.compress_rope_theta, text.qk_rope_head_dim)
    return yarn_frequencies(text.compress_rope_theta, text.qk_rope_head_dim, text.rope_scaling)


def rotate(x: Tensor, positions: Tensor, frequencies: Tensor, *, inverse: bool = False) -> Tensor:
    """Turn the last ``2 * len(frequencies)`` channels of every row by its position; the others pass through.

    Args:
        x: ``[rows, channels]`` or ``[rows, heads, channels]``.
        positions: ``[rows]`` absolute positions in tokens.
        frequencies: radians per token of each adjacent channel pair.
        inverse: turn back.
    Returns:
        As ``x``. Not rounded: the caller does that.
    """
    width = 2 * len(frequencies)
    angles = positions.double()[:, None] * frequencies  # [rows, pairs], float64 so that long positions stay exact
    if x.dim() == 3:
        angles = angles[:, None]
    cos, sin = angles.cos().float().to(x.dtype), angles.sin().float().to(x.dtype)  # the tables are fp32
    if inverse:
        sin = -sin
    first, second = x[..., -width::2], x[..., x.shape[-1] - width + 1 :: 2]
    turned = torch.stack((first * cos - second * sin, first * sin + second * cos), -1).flatten(-2)
    return torch.cat((x[..., :-width], turned), -1)
