"""Mixture-of-experts sublayer: router weights, routed and shared experts (spec 4.9)."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.layers.step_state import StepState
from deepinfer.layers.weights import WeightSource
from deepinfer.ops.moe import ExpertWeights
from deepinfer.ops.numerics import Numerics
from deepinfer.ops.registry import Ops


class MoE:
    """Routed experts chosen per row, plus one shared expert."""

    def __init__(
        self,
        num_experts: int,
        num_selected: int,
        scale: float,
        limit: float,
        weights: WeightSource,
        ops: Ops,
        numerics: Numerics,
    ) -> None:
        self.num_selected, self.scale, self.limit = num_selected, scale, limit
        self.ops = ops
        self.quantize = numerics.quantize
        self.gate = weights.wide("gate.weight")
        self.bias = weights.wide("gate.bias")
        self.image_bias = weights.wide("gate.bias_vl")
        self.experts = [_expert(weights.child(f"experts.{index}")) for index in range(num_experts)]
        self.shared = _expert(weights.child("shared_experts"))

    def forward(self, x: Tensor, state: StepState, name: str) -> Tensor:
        """``x`` ``[rows, hidden]`` (normed) to ``[rows, hidden]``; ``name`` labels the trace."""
        bias = self.bias
        if state.is_image is not None:
            bias = torch.where(state.is_image.unsqueeze(-1), self.image_bias, self.bias)
        experts, weights = self.ops.route(x, self.gate, bias, self.num_selected, self.scale)
        output = self.ops.moe(x, experts, weights, self.experts, self.shared, self.limit, self.quantize)
        state.record(f"{name}.experts", experts)
        state.record(f"{name}.weights", weights)
        state.record(f"{name}.output", output)
        return output


def _expert(weights: WeightSource) -> ExpertWeights:
    return ExpertWeights(weights.stacked("w1.weight", "w3.weight"), weights.wide("w2.weight"))
