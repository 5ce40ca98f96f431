"""Root-mean-square norm with weight (spec 0.2 and 4.3)."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.ops.registry import op


@op
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale each row to unit root mean square, then by ``weight``: one rounding, at the end.

    Args:
        x: ``[..., width]``, an activation.
        weight: ``[width]``, float64.
        eps: added to the mean square.
    Returns:
        ``[..., width]``, dtype of ``x``.
    """
    wide = x.double()
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * inverse * weight).to(x.dtype)
