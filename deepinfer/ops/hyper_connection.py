"""Hyper-connections: mixing of the residual streams around a sublayer (spec 4.2)."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from deepinfer.ops.registry import op


def sinkhorn(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """Near doubly-stochastic matrices from ``logits`` ``[rows, M, M]``: softmax, then columns and rows in turn.

    The loop ends on a column pass: with ``iterations`` = 20 there are 20 column passes and 19 explicit row passes.
    """
    size = logits.shape[-1]
    same_row, same_column = _line_sums(size, logits.device)
    mix = (torch.softmax(logits, dim=-1) + eps).flatten(1)  # [rows, M * M]
    divide_by = torch.full((), eps, dtype=mix.dtype, device=mix.device)
    mix = mix.div_(torch.addmm(divide_by, mix, same_column))
    for _ in range(iterations - 1):
        mix = mix.div_(torch.addmm(divide_by, mix, same_row))
        mix = mix.div_(torch.addmm(divide_by, mix, same_column))
    return mix.view_as(logits)


@cache
def _line_sums(size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """0/1 matrices whose product with a flattened ``[M, M]`` gives each element the sum of its row, or of its column.

    One small product per pass instead of a reduction and a broadcast: these passes are most of the launches of a
    decode step on a CPU.
    """
    index = torch.arange(size * size, device=device)
    row, column = index // size, index % size
    same_row = (row.unsqueeze(0) == row.unsqueeze(1)).double()
    same_column = (column.unsqueeze(0) == column.unsqueeze(1)).double()
    return same_row, same_column


@op
def hc_mixes(
    trunk: Tensor, fn: Tensor, scale: Tensor, base: Tensor, norm_eps: float, hc_eps: float, iterations: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The three mixes of one sublayer, all from the trunk that enters it.

    Args:
        trunk: ``[rows, M, hidden]``, activation.
        fn: ``[(2 + M) * M, M * hidden]``, float64; rows are read, write and stream mix (row-major).
        scale: ``[3]``; base: ``[(2 + M) * M]``, float64.
        norm_eps: ``rms_norm_eps``; hc_eps: added to the read mix and inside Sinkhorn; iterations: Sinkhorn passes.
    Returns:
        read mix for the *next* sublayer ``[rows, M]``, write mix ``[rows, M]``, stream mix ``[rows, M, M]``; float64.
    """
    rows, streams, _ = trunk.shape
    flat = trunk.double().flatten(1)
    inverse = torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)
    mixes = inverse * (flat @ fn.T)
    read = torch.sigmoid(scale[0] * mixes[:, :streams] + base[:streams]) + hc_eps
    write = 2 * torch.sigmoid(scale[1] * mixes[:, streams : 2 * streams] + base[streams : 2 * streams])
    logits = scale[2] * mixes[:, 2 * streams :] + base[2 * streams :]
    return read, write, sinkhorn(logits.view(rows, streams, streams), iterations, hc_eps)


@op
def hc_read(trunk: Tensor, read_mix: Tensor) -> Tensor:
    """Collapse the streams ``[rows, M, hidden]`` with ``read_mix`` ``[rows, M]`` into ``[rows, hidden]``."""
    return (read_mix.unsqueeze(1) @ trunk.double()).squeeze(1).to(trunk.dtype)


@op
def hc_write(trunk: Tensor, update: Tensor, write_mix: Tensor, stream_mix: Tensor) -> Tensor:
    """Add a sublayer's output to the streams while mixing them.

    Args:
        trunk: ``[rows, M, hidden]``; update: ``[rows, hidden]``.
        write_mix: ``[rows, M]``; stream_mix: ``[rows, M, M]``; float64.
    Returns:
        the new trunk. Target stream ``j`` sums over the *first* index of the stream mix.
    """
    mixed = stream_mix.transpose(1, 2) @ trunk.double()
    return torch.addcmul(mixed, write_mix.unsqueeze(-1), update.double().unsqueeze(1)).to(trunk.dtype)
