"""What stays the same during one forward pass: configuration, roundings and ablation."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from deepinfer.config.model import TextConfig
from deepinfer.reference.ablation import Ablation
from deepinfer.reference.building_blocks import rms_norm
from deepinfer.reference.roundings import Roundings


@dataclass(frozen=True, slots=True)
class Setting:
    """Passed to every part of the model."""

    text: TextConfig
    roundings: Roundings
    ablation: Ablation

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """The RMS norm of the text model: the configuration's epsilon, one bf16 rounding (spec 4.3)."""
        return rms_norm(x, weight, self.text.rms_norm_eps, self.roundings.bf16_norm)
