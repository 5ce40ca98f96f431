"""The compressor: tokens to latents (spec 4.6)."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.ops.registry import op


@op
def pool_pairs(first: Tensor, second: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Softmax-weighted mean of two tokens, independently per channel.

    Args:
        first, second: ``[entries, 2, width]`` (score, value) of the even and the odd token, float32.
        out_dtype: activation dtype; the mean is rounded once.
    Returns:
        ``[entries, width]``.
    """
    scores = torch.stack((first[:, 0], second[:, 0])).double()
    values = torch.stack((first[:, 1], second[:, 1])).double()
    return (torch.softmax(scores, dim=0) * values).sum(0).to(out_dtype)
