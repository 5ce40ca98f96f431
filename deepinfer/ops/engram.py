"""Engram: n-gram hashing into table rows, and the gate that adds the looked-up value to the streams (spec 4.10)."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.ops.registry import op


def ngram_context(token_map: Tensor, ids: Tensor, pad: int) -> Tensor:
    """Compressed ids of each row's context, newest first.

    Args:
        token_map: ``[vocab]`` int64, compressed id of each token id.
        ids: ``[rows, n]`` int64: the row's token and the ``n - 1`` before it; a negative id is a barrier (before the
            start of the sequence, an image position, an unknown id): it and everything older read as padding.
        pad: compressed id of the padding token.
    Returns:
        ``[rows, n]`` int64.
    """
    known = (ids >= 0) & (ids < token_map.shape[0])
    reachable = known.to(torch.int8).cummin(dim=-1).values.bool()
    return torch.where(reachable, token_map[torch.where(known, ids, 0)], pad)


@op
def engram_rows(context: Tensor, multipliers: Tensor, primes: Tensor, offsets: Tensor) -> Tensor:
    """Table rows of every n-gram ending at each row.

    Args:
        context: ``[rows, n]`` compressed ids, newest first.
        multipliers: ``[n]`` int64. primes, offsets: ``[n - 1, heads]`` int64, size-major.
    Returns:
        ``[rows, (n - 1) * heads]`` int64. Products stay below 2**63.
    """
    products = context * multipliers
    hashes = [products[:, 0]]
    for older in products[:, 1:].unbind(1):
        hashes.append(hashes[-1] ^ older)
    stacked = torch.stack(hashes[1:], dim=1).unsqueeze(-1)  # [rows, n - 1, 1]
    return (stacked % primes + offsets).flatten(1)


@op
def engram_gate(trunk: Tensor, keys_value: Tensor, gate_weight: Tensor, eps: float) -> Tensor:
    """Add the looked-up value to every stream, gated by how well its key agrees with that stream.

    Args:
        trunk: ``[rows, M, hidden]``; keys_value: ``[rows, M + 1, hidden]``, keys then the value; both activations.
        gate_weight: ``[M, hidden]`` float64, the product of query and key weights.
        eps: ``rms_norm_eps``.
    Returns:
        the new trunk.
    """
    streams, hidden = trunk.shape[1:]
    wide, keys, value = trunk.double(), keys_value[:, :streams].double(), keys_value[:, streams:].double()
    agreement = (wide * gate_weight * keys).sum(-1)
    agreement = agreement * torch.rsqrt(wide.square().mean(-1) + eps) * torch.rsqrt(keys.square().mean(-1) + eps)
    agreement = agreement * hidden**-0.5
    gate = torch.sigmoid(torch.sign(agreement) * agreement.abs().clamp_min(1e-6).sqrt())
    return torch.addcmul(wide, gate.unsqueeze(-1), value).to(trunk.dtype)
