"""Mixture of experts: router, routed experts, shared expert (spec 4.9)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer.reference.building_blocks import linear
from deepinfer.reference.number_formats import bf16, q8
from deepinfer.reference.parameters import Parameters
from deepinfer.reference.setting import Setting
from deepinfer.reference.trace import Recorder


def route(
    x: Tensor, image_mask: Tensor | None, num_chosen: int, parameters: Parameters, setting: Setting
) -> tuple[Tensor, Tensor]:
    """Experts of each row and their weights.

    Args:
        x: ``[T, d]``.
        image_mask: ``[T]`` booleans, rows of an image span choose with ``bias_vl``; None: no such rows.
        num_chosen: experts per row.
        parameters: the scope ``ffn.gate``.
    Returns:
        Expert ids ``[T, k]``, best first (equal scores: lower id first), and weights ``[T, k]``. The bias takes part in
        the choice and not in the weight.
    """
    score = torch.sqrt(F.softplus(linear(x, parameters["weight"]), threshold=20.0))  # [T, experts]
    bias = parameters["bias"]
    if image_mask is not None:
        bias = torch.where(image_mask[:, None], parameters["bias_vl"], bias)
    order = torch.sort((score + bias).detach(), dim=1, descending=True, stable=True)
    experts = order.indices[:, :num_chosen]
    chosen = score.gather(1, experts)
    weights = setting.text.routed_scaling_factor * chosen / (chosen.sum(1, keepdim=True) + 1e-20)
    return experts, weights


def swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """``silu(min(gate, limit)) * clamp(up, -limit, limit)``: one-sided on the gate, before the nonlinearity."""
    return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def expert(x: Tensor, weight: Tensor | None, parameters: Parameters, setting: Setting) -> Tensor:
    """One expert on its rows ``[n, d]``, already quantised. ``weight [n]`` is applied before the down projection."""
    roundings = setting.roundings
    gate, up = linear(x, parameters["w1.weight"]), linear(x, parameters["w3.weight"])
    product = swiglu(gate, up, setting.text.swiglu_limit)
    if weight is not None:
        product = product * weight[:, None]
    output = linear(q8(product, roundings.q8_swiglu), parameters["w2.weight"])
    return bf16(output, roundings.bf16_expert_output)


def mixture_of_experts(
    x: Tensor,
    image_mask: Tensor | None,
    num_chosen: int,
    parameters: Parameters,
    setting: Setting,
    record: Recorder,
) -> Tensor:
    """Sum of the chosen experts and the shared one, ``[T, d]`` -> ``[T, d]``.

    Args:
        parameters: the scope ``ffn``. Other arguments as :func:`route`.
    """
    roundings = setting.roundings
    record("input", x)
    experts, weights = route(x, image_mask, num_chosen, parameters.scope("gate"), setting)
    record("experts", experts)
    record("weights", weights)
    quantised = q8(x, roundings.q8_ffn_input)
    total = expert(quantised, None, parameters.scope("shared_experts"), setting)
    for number in experts.unique().tolist():
        rows, ranks = (experts == number).nonzero(as_tuple=True)
        output = expert(quantised[rows], weights[rows, ranks], parameters.scope(f"experts.{number}"), setting)
        total = total.index_add(0, rows, output)
    total = bf16(total, roundings.bf16_ffn_output)
    record("output", total)
    return total
