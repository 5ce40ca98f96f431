"""Mixture-of-experts sublayer in few launches (spec 4.9)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from deepinfer.kernels.dense.linear import BESIDE_ROWS, Fp8Linear
from deepinfer.kernels.dense.row_scaled import RowCodes
from deepinfer.kernels.hyper_connection.parts import ExpertOutputs, Update
from deepinfer.kernels.moe.expert_sum import sum_experts
from deepinfer.kernels.moe.experts import ExpertInput, RoutedExperts
from deepinfer.kernels.moe.router import Router
from deepinfer.kernels.moe.swiglu import swiglu_row_codes
from deepinfer.layers.fused.residual import InputForms, SublayerInput
from deepinfer.layers.fused.step import FusedStep
from deepinfer.layers.fused.weights import PackedSource


class FeedForward:
    """Routed experts chosen per row, plus one shared expert. Their sum is left to the write into the streams.

    Args:
        num_selected: experts per row. make_experts: builds the routed experts of a layer from their weights.
    """

    def __init__(
        self,
        num_selected: int,
        scale: float,
        weights: PackedSource,
        make_experts: Callable[[PackedSource], RoutedExperts],
    ) -> None:
        self.invariant = weights.invariant
        bias, image_bias = weights.fp32("gate.bias"), weights.fp32("gate.bias_vl")
        self.router = Router(weights.bf16("gate.weight"), bias, image_bias, num_selected, scale)
        self.experts = make_experts(weights)
        shared = ("shared_experts.w1.weight", "shared_experts.w3.weight")
        self.gate_up = Fp8Linear(*weights.fp8(*shared), is_fast=weights.is_fast)
        self.down = Fp8Linear(*weights.fp8("shared_experts.w2.weight"), is_fast=weights.is_fast)

    def input_forms(self, rows: int) -> InputForms:
        """What :meth:`forward` reads of an input of ``rows`` rows."""
        wants_codes = self.experts.wants_codes
        row_codes = not wants_codes and self.gate_up.takes_codes(rows, invariant=self.invariant)
        rounded = not (row_codes and self.experts.takes_row_codes(rows))
        return InputForms(rounded, wants_codes, row_codes)

    def forward(self, inputs: SublayerInput, step: FusedStep, is_image: Tensor | None = None) -> Update:
        """Outputs of the chosen experts and of the shared one, each rounded to bf16, not yet added up.

        Args:
            is_image: bool or uint8 ``[rows]``, rows of image spans; None in steps without any.
        """
        rows, experts = inputs.x.shape[0], self.experts
        given = ExpertInput(inputs.x, inputs.codes, inputs.scales, inputs.rounded, inputs.row_codes)
        routing = self.router.forward(
            inputs.x,
            positions=step.rows.positions,
            is_image=is_image,
            block=experts.block_of(rows),
            invariant=self.invariant,
        )
        # This product runs beside the router: behind the kernel of the logits, which waits for the input before it
        # lets others start.
        gate_up = self.gate_up.forward(
            inputs.operand, dtype=torch.float32, overlap=True, beside=True, invariant=self.invariant
        )
        inner: Tensor | RowCodes | None = None
        if self.down.takes_codes(rows, invariant=self.invariant):
            inner = swiglu_row_codes(gate_up, experts.limit)
        routed = experts.forward(given, routing, gate_up if inner is None else None)
        inner = routed.shared_inner if inner is None else inner
        assert inner is not None
        shared = self.down.forward(
            inner,
            overlap=True,
            beside=routed.is_inner_older and rows > BESIDE_ROWS,
            invariant=self.invariant,
        )
        if routed.place is not None:
            return sum_experts(routed.values, experts.num_selected, place=routed.place, shared=shared)
        return ExpertOutputs(routed.values.view(rows, -1, routed.values.shape[1]), shared, routing.experts)
