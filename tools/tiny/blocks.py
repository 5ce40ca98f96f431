"""Parts of the training forward that work on single tokens: norms, rotation, hyper-connections, experts, n-grams.

All take flattened rows ``[N, ...]``, so one compiled kernel serves every sequence length.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tools.tiny.fake_quant import q8, table_rows
from tools.tiny.fused import fused


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last axis; statistics in float32, result in the dtype of ``x``."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool = False) -> Tensor:
    """Turn adjacent pairs of the last ``2 * cos.shape[-1]`` channels; ``x [N, (heads,) D]``, ``cos [N, pairs]``."""
    width = 2 * cos.shape[-1]
    if x.dim() == 3:
        cos, sin = cos[:, None], sin[:, None]
    if inverse:
        sin = -sin
    first, second = x[..., -width::2].float(), x[..., x.shape[-1] - width + 1 :: 2].float()
    turned = torch.stack((first * cos - second * sin, first * sin + second * cos), -1).flatten(-2)
    return torch.cat((x[..., :-width], turned.to(x.dtype)), -1)


@fused
def read_trunk(
    trunk: Tensor, read_mix: Tensor, fn: Tensor, scale: Tensor, base: Tensor, norm: Tensor, eps: float, hc_eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """First half of a hyper-connection sublayer (spec 4.2).

    Returns:
        Normed read ``[N, d]``, next read mix ``[N, M]``, write mix ``[N, M]`` and carry logits ``[N, M, M]``.
    """
    streams = trunk.shape[1]
    wide = trunk.float()
    flat = wide.flatten(1)
    product = torch.rsqrt(flat.square().mean(-1, keepdim=True) + eps) * (flat @ fn.T)
    read, write, carry = product.split((streams, streams, streams * streams), -1)
    read_base, write_base, carry_base = base.split((streams, streams, streams * streams))
    next_mix = torch.sigmoid(scale[0] * read + read_base) + hc_eps
    write_mix = 2 * torch.sigmoid(scale[1] * write + write_base)
    logits = (scale[2] * carry + carry_base).unflatten(-1, (streams, streams))
    hidden = (read_mix[..., None] * wide).sum(1).to(trunk.dtype)
    return rms(hidden, norm, eps), next_mix, write_mix, logits


@fused
def write_trunk(trunk: Tensor, output: Tensor, write_mix: Tensor, carry: Tensor) -> Tensor:
    """Second half: ``X'_j = w_j y + sum_i C_ij X_i``."""
    wide = trunk.float()
    carried = sum(carry[:, i, :, None] * wide[:, i, None] for i in range(trunk.shape[1]))
    return (write_mix[..., None] * output.float()[:, None] + carried).to(trunk.dtype)


@fused
def collapse(trunk: Tensor, read_mix: Tensor) -> Tensor:
    """``[N, M, d]`` -> ``[N, d]``."""
    return (read_mix[..., None] * trunk.float()).sum(1).to(trunk.dtype)


@fused
def experts(
    x: Tensor,
    gate: Tensor,
    bias: Tensor,
    routed: tuple[Tensor, Tensor, Tensor],
    shared: tuple[Tensor, Tensor, Tensor],
    chosen: int,
    factor: float,
    limit: float,
    quantise: bool,
) -> tuple[Tensor, Tensor]:
    """Mixture of experts (spec 4.9), every expert on every row with weight zero where it is not chosen.

    Args:
        routed: w1, w3 ``[E, I, d]`` and w2 ``[E, d, I]``.
        shared: w1, w3 ``[I, d]`` and w2 ``[d, I]``.
    Returns:
        ``[N, d]``, and how many rows chose each expert ``[E]``.
    """
    score = F.softplus(x.float() @ gate.float().T).sqrt()
    indices = (score + bias).topk(chosen, -1).indices
    picked = torch.zeros_like(score).scatter(1, indices, 1.0)
    weight = factor * picked * score / ((picked * score).sum(-1, keepdim=True) + 1e-20)  # [N, E]

    rounded = q8(x) if quantise else x
    w1, w3, w2 = routed
    num_experts, inner, _ = w1.shape
    g = (rounded @ w1.flatten(0, 1).T).float().clamp(max=limit)
    u = (rounded @ w3.flatten(0, 1).T).float().clamp(-limit, limit)
    active = (F.silu(g) * u).unflatten(-1, (num_experts, inner)) * weight[..., None]
    active = (q8(active) if quantise else active).flatten(1).to(x.dtype)
    output = (active @ w2.permute(1, 0, 2).flatten(1).T).float()

    s1, s3, s2 = shared
    g = (rounded @ s1.T).float().clamp(max=limit)
    u = (rounded @ s3.T).float().clamp(-limit, limit)
    active = F.silu(g) * u
    active = (q8(active) if quantise else active).to(x.dtype)
    return (output + (active @ s2.T).float()).to(x.dtype), picked.sum(0)


def ngram_rows(compressed: Tensor, padding: int, multipliers: Tensor, primes: Tensor, num_heads: int) -> Tensor:
    """Table rows ``[B * T, sizes * heads]`` of sequences of compressed ids ``[B, T]`` (spec 4.10 d, e)."""
    batch = len(compressed)
    contexts = [compressed]
    for distance in range(1, len(multipliers)):
        history = compressed.new_full((batch, distance), padding)
        contexts.append(torch.cat((history, compressed[:, :-distance]), 1))
    offsets = primes.cumsum(0) - primes
    rows = []
    hashed = contexts[0] * multipliers[0]
    for size in range(1, len(multipliers)):
        hashed = hashed ^ (contexts[size] * multipliers[size])
        columns = slice((size - 1) * num_heads, size * num_heads)
        rows.append(hashed[..., None] % primes[columns] + offsets[columns])
    return torch.cat(rows, -1).flatten(0, 1)


@fused
def engram(
    trunk: Tensor, rows: Tensor, wkv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, quantise: bool
) -> Tensor:
    """The trunk with the memory added (spec 4.10 f). ``rows``: fetched table rows ``[N, columns, width]``."""
    streams, width = trunk.shape[1:]
    memory = (table_rows(rows) if quantise else rows).flatten(1).to(trunk.dtype)
    projected = (memory @ wkv.T).float().unflatten(-1, (streams + 1, width))
    key, value = projected[:, :streams], projected[:, streams:]
    wide = trunk.float()
    match = (wide * (q_weight.float() * k_weight.float()) * key).sum(-1)
    match = match * torch.rsqrt(wide.square().mean(-1) + eps) * torch.rsqrt(key.square().mean(-1) + eps) * width**-0.5
    gate = torch.sigmoid(match.sign() * match.abs().clamp(min=1e-6).sqrt())
    return (wide + gate[..., None] * value).to(trunk.dtype)
