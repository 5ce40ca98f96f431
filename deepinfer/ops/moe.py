"""Mixture of experts: routing and the expert products (spec 4.9)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from deepinfer.ops.linear import as_wide
from deepinfer.ops.registry import op


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """One expert: ``gate_up`` ``[2 * width, hidden]`` (gate rows first), ``down`` ``[hidden, width]``; float64."""

    gate_up: Tensor
    down: Tensor


@op
def route(
    x: Tensor, weight: Tensor, bias: Tensor, num_selected: int, scale: float, num_live: int | None = None
) -> tuple[Tensor, Tensor]:
    """Choose experts by biased score and weight them by unbiased score.

    Args:
        x: ``[rows, hidden]`` activation.
        weight: ``[experts, hidden]`` float64.
        bias: ``[experts]``, or ``[rows, experts]`` where rows of an image span take another bias; float64.
        num_selected: experts per row.
        scale: ``routed_scaling_factor``.
        num_live: rows from this one on are padding: they get expert -1 and weight 0.
    Returns:
        experts ``[rows, num_selected]`` int64 (best first, ties to the lower id), weights likewise in float64.
    """
    logits = functional.linear(x.double(), weight)
    softplus = torch.where(logits > 20, logits, torch.log1p(torch.exp(logits.clamp_max(20))))
    scores = softplus.sqrt()
    order = torch.sort(scores + bias, dim=-1, descending=True, stable=True).indices
    experts = order[:, :num_selected]
    chosen = scores.gather(1, experts)
    weights = scale * chosen / (chosen.sum(-1, keepdim=True) + 1e-20)
    if num_live is not None:
        experts[num_live:] = -1
        weights[num_live:] = 0
    return experts, weights


def _expert(wide_x: Tensor, expert: ExpertWeights, limit: float, route_weight: Tensor | None, quantize: bool) -> Tensor:
    """One expert on its rows, before the rounding of its output: float64 ``[rows, hidden]``."""
    gate, up = functional.linear(wide_x, expert.gate_up).chunk(2, dim=-1)
    product = functional.silu(gate.clamp_max(limit)) * up.clamp(-limit, limit)
    if route_weight is not None:
        product = product * route_weight.unsqueeze(-1)
    return functional.linear(as_wide(product, quantize), expert.down)


@op
def moe(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    routed: list[ExpertWeights],
    shared: ExpertWeights,
    limit: float,
    quantize: bool,
) -> Tensor:
    """Routed experts plus the shared expert.

    Args:
        x: ``[rows, hidden]`` activation.
        experts, weights: from :func:`route`.
        routed: all routed experts; shared: the shared one.
        limit: SwiGLU clamp, one-sided on the gate and two-sided on the up branch, before the activation.
        quantize: FP8 rounding of both products' inputs; the second quantises the unrounded SwiGLU product.
    Returns:
        ``[rows, hidden]``, dtype of ``x``: each expert's output is rounded, the sum is rounded once.
    """
    wide_x = as_wide(x, quantize)
    total = _expert(wide_x, shared, limit, None, quantize).to(x.dtype).double()
    flat = experts.flatten()
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat + 1, minlength=len(routed) + 1).tolist()  # slot 0 counts the padding's -1
    begin = counts[0]
    for index, count in enumerate(counts[1:]):
        if count == 0:
            continue
        picked = order[begin : begin + count]
        begin += count
        rows = picked // experts.shape[1]
        output = _expert(wide_x[rows], routed[index], limit, weights.view(-1)[picked], quantize)
        total.index_add_(0, rows, output.to(x.dtype).double())
    return total.to(x.dtype)
