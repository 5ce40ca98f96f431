"""Muon for the matrices of the layers, Adam for everything else.

Source of Muon: Jordan et al. 2024; of the update scale that lets both share a learning rate: Liu et al. 2025
(arXiv:2502.16982), 0.2 * sqrt(max(rows, columns)).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from deepinfer.checkpoint import Kind
from tools.tiny.fused import fused
from tools.tiny.parameters import StackedParameters

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ADAM_FACTOR = {"engram.embed.weight": 1.5, "hc_attn_fn": 0.3, "hc_ffn_fn": 0.3}
"""Multiples of the learning rate: table rows are met rarely, hyper-connection products are sensitive."""


@fused
def orthogonalise(matrices: Tensor) -> Tensor:
    """Five Newton-Schulz steps towards the nearest orthogonal matrix, ``[..., rows, columns]``."""
    a, b, c = _COEFFICIENTS
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = (matrices.mT if is_tall else matrices).bfloat16()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x.mT if is_tall else x


def is_matrix(key: str, kind: Kind) -> bool:
    """Whether Muon trains a stack: the projections, experts and compressors."""
    if kind in (Kind.FP8, Kind.FP4):
        return True
    return key.endswith(("compressor.wkv.weight", "compressor.wgate.weight", "indexer.wk.weight"))


@dataclass(slots=True)
class Optimizer:
    """State and step of both rules over the stacks whose key starts with ``prefix``."""

    parameters: StackedParameters
    prefix: str
    momentum: float = 0.95
    betas: tuple[float, float] = (0.9, 0.95)
    decay: float = 0.1
    clip: float = 1.0
    step_number: int = 0
    state: dict[str, Tensor] = field(default_factory=dict)

    def trained(self) -> list[tuple[str, nn.Parameter]]:
        return [item for item in self.parameters.items(self.prefix) if item[1].requires_grad]

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """One update with learning rate ``rate``; gradients are cleared. Adam's gradients are clipped together."""
        self.step_number += 1
        trained = self.trained()
        adam = []
        for key, parameter in trained:
            if parameter.grad is None:
                continue
            if is_matrix(key, self.parameters.stacks[key].kind):
                self._muon(key, parameter, rate)
            else:
                adam.append((key, parameter))
        torch.nn.utils.clip_grad_norm_([parameter for _, parameter in adam], self.clip)
        for key, parameter in adam:
            self._adam(key, parameter, rate)
        for parameter in self.parameters.parameters():
            parameter.grad = None

    def _buffer(self, name: str, like: Tensor) -> Tensor:
        if name not in self.state:
            self.state[name] = torch.zeros_like(like)
        return self.state[name]

    def _muon(self, key: str, parameter: nn.Parameter, rate: float) -> None:
        assert parameter.grad is not None
        buffer = self._buffer(f"{key}/momentum", parameter)
        buffer.lerp_(parameter.grad, 1 - self.momentum)
        update = orthogonalise(parameter.grad.lerp(buffer, self.momentum))
        scale = 0.2 * math.sqrt(max(parameter.shape[-2:]))
        parameter.mul_(1 - rate * self.decay)
        parameter.add_(update.float(), alpha=-rate * scale)

    def _adam(self, key: str, parameter: nn.Parameter, rate: float) -> None:
        assert parameter.grad is not None
        first, second = self._buffer(f"{key}/first", parameter), self._buffer(f"{key}/second", parameter)
        first.lerp_(parameter.grad, 1 - self.betas[0])
        second.lerp_(parameter.grad.square(), 1 - self.betas[1])
        correction = math.sqrt(1 - self.betas[1] ** self.step_number) / (1 - self.betas[0] ** self.step_number)
        factor = next((value for end, value in _ADAM_FACTOR.items() if key.endswith(end)), 1.0)
        if key in ("embed.weight", "head.weight"):
            parameter.mul_(1 - rate * self.decay)
        parameter.addcdiv_(first, second.sqrt() + 1e-8, value=-rate * factor * correction)


def learning_rate(step: int, total: int, peak: float, *, warm_up: int = 200, decay_from: float = 0.5) -> float:
    """Linear warm-up, a plateau, then a cosine from ``decay_from`` of the run down to 1 % of the peak."""
    if step < warm_up:
        return peak * (step + 1) / warm_up
    start = decay_from * total
    if step < start:
        return peak
    progress = min((step - start) / max(total - start, 1), 1.0)
    return peak * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress)))
