"""Sinkhorn normalisation of many 4 x 4 matrices (spec 4.2), forward and backward in one kernel each on a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU-only installation has no Triton and uses the plain version below
    triton = None

_BLOCK = 128
_BACKWARD_PASSES = 20


def sinkhorn(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """Near doubly stochastic ``[N, 4, 4]`` float32 from ``logits`` of that shape."""
    if triton is not None and logits.is_cuda:
        return _Sinkhorn.apply(logits.contiguous(), iterations, eps)
    matrix = torch.softmax(logits, -1) + eps
    matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        matrix = matrix / (matrix.sum(-1, keepdim=True) + eps)
        matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
    return matrix


if triton is not None:

    @triton.jit
    def _forward_kernel(logits_ptr, matrix_ptr, count, iterations, eps, BLOCK: tl.constexpr):  # noqa: N803
        row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        four = tl.arange(0, 4)
        offsets = row[:, None, None] * 16 + four[None, :, None] * 4 + four[None, None, :]
        inside = (row < count)[:, None, None]
        logits = tl.load(logits_ptr + offsets, mask=inside, other=0.0)
        weight = tl.exp(logits - tl.max(logits, 2)[:, :, None])
        matrix = weight / tl.sum(weight, 2)[:, :, None] + eps
        matrix = matrix / (tl.sum(matrix, 1)[:, None, :] + eps)
        for _ in range(iterations - 1):
            matrix = matrix / (tl.sum(matrix, 2)[:, :, None] + eps)
            matrix = matrix / (tl.sum(matrix, 1)[:, None, :] + eps)
        tl.store(matrix_ptr + offsets, matrix, mask=inside)

    @triton.jit
    def _backward_kernel(matrix_ptr, grad_ptr, out_ptr, count, passes, BLOCK: tl.constexpr):  # noqa: N803
        # With M = diag(u) exp(B) diag(v) the gradient is M * (G - a_i - b_j), where the row and column multipliers
        # a and b solve a linear system; the alternating solution is the transpose of the forward iteration.
        row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        four = tl.arange(0, 4)
        offsets = row[:, None, None] * 16 + four[None, :, None] * 4 + four[None, None, :]
        inside = (row < count)[:, None, None]
        matrix = tl.load(matrix_ptr + offsets, mask=inside, other=0.0)
        grad = tl.load(grad_ptr + offsets, mask=inside, other=0.0)
        wanted_rows = tl.sum(matrix * grad, 2)
        wanted_columns = tl.sum(matrix * grad, 1)
        columns = wanted_columns
        rows = wanted_rows - tl.sum(matrix * columns[:, None, :], 2)
        for _ in range(passes):
            columns = wanted_columns - tl.sum(matrix * rows[:, :, None], 1)
            rows = wanted_rows - tl.sum(matrix * columns[:, None, :], 2)
        result = matrix * (grad - rows[:, :, None] - columns[:, None, :])
        tl.store(out_ptr + offsets, result, mask=inside)


class _Sinkhorn(torch.autograd.Function):
    """The kernels as one differentiable operation."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, iterations: int, eps: float) -> Tensor:
        matrix = torch.empty_like(logits)
        grid = (triton.cdiv(len(logits), _BLOCK),)
        _forward_kernel[grid](logits, matrix, len(logits), iterations, eps, BLOCK=_BLOCK)
        ctx.save_for_backward(matrix)
        return matrix

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (matrix,) = ctx.saved_tensors
        grad = grads[0].contiguous()
        result = torch.empty_like(matrix)
        grid = (triton.cdiv(len(matrix), _BLOCK),)
        _backward_kernel[grid](matrix, grad, result, len(matrix), _BACKWARD_PASSES, BLOCK=_BLOCK)
        return result, None, None
