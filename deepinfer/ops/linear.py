"""Matrix products with stored weights (spec 0.2: ``FP8LIN`` and ``BF16LIN``).

The reference multiplies exact values in float64. A product of two quantised numbers has at most 9 significant bits, so
the float64 sum is exact for any spread of scales that occurs, and with it independent of the order of summation: the
same row gives the same bits in every batch.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from deepinfer.ops.number_formats import q8_round
from deepinfer.ops.registry import op


def as_wide(x: Tensor, quantize: bool) -> Tensor:
    """The operand that enters a product: ``x``, or ``deq(Q8(x))``, in float64."""
    return (q8_round(x) if quantize else x).double()


@op
def linear(x: Tensor, weight: Tensor, quantize: bool, out_dtype: torch.dtype | None = None) -> Tensor:
    """``weight @ x`` per row.

    Args:
        x: ``[rows, in]``, an activation.
        weight: ``[out, in]``, float64 with the exact stored values.
        quantize: round ``x`` to FP8 in groups of 32 first (dense FP8 weights in ``faithful`` numerics).
        out_dtype: dtype of the result, default that of ``x``.
    Returns:
        ``[rows, out]``.
    """
    return functional.linear(as_wide(x, quantize), weight).to(out_dtype or x.dtype)


@op
def grouped_linear(x: Tensor, weight: Tensor, quantize: bool) -> Tensor:
    """One product per output group: the first half of the output projection (spec 4.8).

    Args:
        x: ``[rows, groups, in]``.
        weight: ``[groups, out, in]``, float64.
        quantize: as in :func:`linear`.
    Returns:
        ``[rows, groups * out]``, dtype of ``x``.
    """
    product = torch.bmm(as_wide(x, quantize).transpose(0, 1), weight.transpose(1, 2))  # [groups, rows, out]
    return product.transpose(0, 1).flatten(1).to(x.dtype)
