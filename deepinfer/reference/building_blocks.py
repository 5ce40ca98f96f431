"""The two operations that every part of the model uses: a linear map and an RMS norm (spec 0 and 0.2)."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.reference.number_formats import bf16


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``y = W x`` for rows: ``[..., in]`` and ``[out, in]`` -> ``[..., out]``, nothing rounded.

    The callers state what is rounded before (quantised input) and after (bf16 output).
    """
    product = x @ weight.T
    return product if bias is None else product + bias


def rms_norm(x: Tensor, weight: Tensor, epsilon: float, round_output: bool) -> Tensor:
    """``RMS(x; w)``: ``[..., width]``, scaled to unit root mean square and by ``weight``, one rounding at the end."""
    inverse = torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon)
    return bf16(x * inverse * weight, round_output)
