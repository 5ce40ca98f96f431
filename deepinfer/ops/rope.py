"""Rotary embedding on the last channels of a head, in adjacent pairs (spec 4.4)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from deepinfer.config.model import YarnConfig
from deepinfer.ops.registry import op


def rope_frequencies(theta: float, width: int, yarn: YarnConfig | None) -> Tensor:
    """Angle per position of each of the ``width / 2`` pairs, float64.

    Args:
        theta: base.
        width: rotary width in channels.
        yarn: frequency scaling of the compressing layers; None for ratio-0 layers and the draft.
    """
    plain = theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    if yarn is None:
        return plain

    def turning_point(rotations: float) -> float:
        length = yarn.original_max_position_embeddings / (rotations * 2 * math.pi)
        return width * math.log(length) / (2 * math.log(theta))

    low = max(math.floor(turning_point(yarn.beta_fast)), 0)
    high: float = min(math.ceil(turning_point(yarn.beta_slow)), width - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(width // 2, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
    return plain * (1 - ramp) + plain / yarn.factor * ramp


def rope_angles(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines ``[rows, width / 2]`` at ``positions`` ``[rows]``: computed in float64, kept in float32."""
    angles = positions.double().unsqueeze(-1) * frequencies
    return angles.cos().float(), angles.sin().float()


@op
def rotate(x: Tensor, cosines: Tensor, sines: Tensor, inverse: bool = False) -> Tensor:
    """Rotate the last ``2 * cosines.shape[-1]`` channels of every head; the other channels pass unchanged.

    Args:
        x: ``[rows, head_dim]`` or ``[rows, heads, head_dim]``.
        cosines, sines: ``[rows, width / 2]``, float32.
        inverse: rotate back.
    Returns:
        dtype and shape of ``x``; one rounding per rotated value.
    """
    width = 2 * cosines.shape[-1]
    if x.dim() == 3:
        cosines, sines = cosines.unsqueeze(1), sines.unsqueeze(1)
    if inverse:
        sines = -sines
    pairs = x[..., -width:].double().unflatten(-1, (-1, 2))
    first, second = pairs[..., 0], pairs[..., 1]
    turned = torch.stack((first * cosines - second * sines, first * sines + second * cosines), dim=-1)
    return torch.cat((x[..., :-width], turned.flatten(-2).to(x.dtype)), dim=-1)
