"""Attention of the training forward: banded window, masked entries, one softmax with the sink (spec 4.5 to 4.8)."""

from __future__ import annotations

import torch
from torch import Tensor

from tools.tiny.blocks import rms, rotate
from tools.tiny.fake_quant import q4e, q4u, q8
from tools.tiny.fused import fused

HIDDEN = -1e30
"""Logit of what a query does not see; finite, so that a row without entries stays free of NaN."""


@fused
def project(
    x: Tensor,
    weights: tuple[Tensor, Tensor, Tensor],
    norms: tuple[Tensor, Tensor],
    cos: Tensor,
    sin: Tensor,
    num_heads: int,
    eps: float,
    quantise: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries ``[N, H, D]``, window keys ``[N, D]`` and the latent query ``[N, rank]`` as the next product reads it.

    Args:
        weights: wq_a, wq_b, wkv.
        norms: q_norm, kv_norm.
    """
    wq_a, wq_b, wkv = weights
    rounded = q8(x) if quantise else x
    latent = rms(rounded @ wq_a.T, norms[0], eps)
    latent = q8(latent) if quantise else latent
    queries = rotate((latent @ wq_b.T).unflatten(-1, (num_heads, -1)), cos, sin)
    keys = rotate(rms(rounded @ wkv.T, norms[1], eps), cos, sin)
    return queries, q8(keys) if quantise else keys, latent


@fused
def window_key(x: Tensor, wkv: Tensor, norm: Tensor, cos: Tensor, sin: Tensor, eps: float, quantise: bool) -> Tensor:
    """Window keys alone, as the draft makes them from context vectors. ``[N, d]`` -> ``[N, D]``."""
    keys = rotate(rms((q8(x) if quantise else x) @ wkv.T, norm, eps), cos, sin)
    return q8(keys) if quantise else keys


@fused
def compress(x: Tensor, wkv: Tensor, wgate: Tensor | None, norm: Tensor, eps: float) -> Tensor:
    """Latents of a stream, not rotated: ``[N, d]`` -> ``[N / ratio, D]``. Sequences have even lengths."""
    value = x.float() @ wkv.float().T
    if wgate is not None:
        share = torch.softmax((x.float() @ wgate.float().T).unflatten(0, (-1, 2)), 1)
        value = (share * value.unflatten(0, (-1, 2))).sum(1)
    return rms(value.to(x.dtype), norm, eps)


@fused
def make_entries(latent: Tensor, cos: Tensor, sin: Tensor, quantise: bool) -> Tensor:
    """Main entries ``[n, D]``."""
    rotated = rotate(latent, cos, sin)
    return q4e(rotated) if quantise else rotated


@fused
def make_index_keys(
    latent: Tensor, wk: Tensor, norm: Tensor, cos: Tensor, sin: Tensor, eps: float, quantise: bool
) -> Tensor:
    """Index keys ``[n, w]``."""
    rotated = rotate(rms(latent @ wk.T, norm, eps), cos, sin)
    return q4u(rotated) if quantise else rotated


@fused
def make_index_queries(
    latent: Tensor, x: Tensor, wq_b: Tensor, proj: Tensor, cos: Tensor, sin: Tensor, num_heads: int, quantise: bool
) -> tuple[Tensor, Tensor]:
    """Index queries ``[N, heads, w]`` and head weights ``[N, heads]``."""
    queries = rotate((latent @ wq_b.T).unflatten(-1, (num_heads, -1)), cos, sin)
    return q4u(queries) if quantise else queries, x @ proj.T


@fused
def index_scores(queries: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """``z [B, T, n]`` float32 from ``[B, T, h, w]``, ``[B, T, h]`` and ``[B, n, w]`` (spec 4.7)."""
    products = queries.flatten(1, 2) @ keys.transpose(1, 2)  # [B, T * h, n]
    products = products.unflatten(1, (-1, queries.shape[2])).float().clamp(min=0)
    return (products * weights.float()[..., None]).sum(2)


def banded_mask(num_chunks: int, window: int, device: torch.device) -> Tensor:
    """``[C, W, 2W]``: query r of a chunk sees column c of (previous chunk, own chunk) when ``r < c <= r + W``."""
    row = torch.arange(window, device=device)[:, None]
    column = torch.arange(2 * window, device=device)
    seen = (column > row) & (column <= row + window)
    first = torch.arange(num_chunks, device=device)[:, None, None] == 0
    return seen & ~(first & (column < window))


@fused
def attend(
    queries: Tensor, keys: Tensor, entries: Tensor | None, mask: Tensor | None, sink: Tensor, band: Tensor
) -> tuple[Tensor, Tensor]:
    """One softmax over the window, the masked entries and the sink.

    Args:
        queries: ``[B, T, H, D]``; T is a multiple of the window W.
        keys: ``[B, T, D]`` window keys.
        entries: ``[B, n, D]``, mask ``[B, T, n]``.
        sink: ``[H]``.
        band: ``[T / W, W, 2W]`` of :func:`banded_mask`.
    Returns:
        Context ``[B, T, H, D]`` and the log-sum-exp over window and sink ``[B, T, H]``.
    """
    batch, length, heads, width = queries.shape
    window = band.shape[1]
    scale = width**-0.5
    chunks = keys.unflatten(1, (-1, window))
    before = torch.cat((torch.zeros_like(chunks[:, :1]), chunks[:, :-1]), 1)
    pairs = torch.cat((before, chunks), 2).flatten(0, 1)  # [B * C, 2W, D]
    local = queries.reshape(-1, window * heads, width) @ pairs.transpose(1, 2)  # [B * C, W * H, 2W]
    local = local.view(batch, -1, window, heads, 2 * window).float() * scale
    local = local.masked_fill(~band[:, :, None], HIDDEN).view(batch, length, heads, 2 * window)
    sinks = sink.float().expand(batch, length, heads)[..., None]
    local_sum = torch.logsumexp(torch.cat((local, sinks), -1), -1, keepdim=True)
    total = local_sum
    if entries is not None and mask is not None:
        far = (queries.flatten(1, 2) @ entries.transpose(1, 2)).view(batch, length, heads, -1).float() * scale
        far = far.masked_fill(~mask[:, :, None], HIDDEN)
        total = torch.logaddexp(local_sum, torch.logsumexp(far, -1, keepdim=True))
    weights = torch.exp(local - total).to(keys.dtype).view(-1, window * heads, 2 * window)
    context = (weights @ pairs).view(batch, length, heads, width)
    if entries is not None and mask is not None:
        weights = torch.exp(far - total).to(keys.dtype).flatten(1, 2)
        context = context + (weights @ entries).view(batch, length, heads, width)
    return context, local_sum[..., 0].detach()


@fused
def project_output(
    context: Tensor, wo_a: Tensor, wo_b: Tensor, cos: Tensor, sin: Tensor, num_groups: int, quantise: bool
) -> Tensor:
    """``[N, H, D]`` -> ``[N, d]``: rotate back, mix within groups of heads, then over groups."""
    turned = rotate(context, cos, sin, inverse=True).flatten(1)
    turned = (q8(turned) if quantise else turned).unflatten(1, (num_groups, -1))
    weight = wo_a.unflatten(0, (num_groups, -1))
    grouped = torch.einsum("ngi,gri->ngr", turned, weight).flatten(1)
    return (q8(grouped) if quantise else grouped) @ wo_b.T
