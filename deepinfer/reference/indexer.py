"""Which compressed entries a query attends: index scores, top-k and candidate blocks (spec 4.7)."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.reference.building_blocks import linear
from deepinfer.reference.number_formats import bf16, q4u, q8
from deepinfer.reference.parameters import Parameters
from deepinfer.reference.rope import rotate
from deepinfer.reference.setting import Setting

UNAVAILABLE = float("-inf")
"""Score of an entry that may not be selected."""


def index_queries(
    q_latent: Tensor, positions: Tensor, frequencies: Tensor, parameters: Parameters, setting: Setting
) -> Tensor:
    """``[T, index heads, index_head_dim]`` from the latent query ``[T, q_lora_rank]``."""
    text, roundings = setting.text, setting.roundings
    query = bf16(linear(q8(q_latent, roundings.q8_query_latent), parameters["wq_b.weight"]), roundings.bf16_index_query)
    query = query.unflatten(-1, (text.index_n_heads, text.index_head_dim))
    rotated = bf16(rotate(query, positions, frequencies), roundings.bf16_rope)
    return q4u(rotated, roundings.q4_index_query)


def index_scores(x: Tensor, queries: Tensor, keys: Tensor, parameters: Parameters, setting: Setting) -> Tensor:
    """``z``: ``[T, n]`` of attention input ``[T, d]``, queries ``[T, heads, w]`` and keys ``[n, w]``.

    The ReLU comes before the weighting by ``g``, which may be negative. The common factor of the published formula is
    a power of two, changes no ordering and is left out.
    """
    roundings = setting.roundings
    weight = bf16(linear(x, parameters["weights_proj.weight"]), roundings.bf16_index_weight)  # [T, heads]
    products = torch.einsum("thw,nw->thn", queries, keys).clamp(min=0)
    return bf16((weight[..., None] * products).sum(1), roundings.bf16_index_score)


def random_scores(positions: Tensor, num_entries: int, ratio: int, layer_id: int, seed: int) -> Tensor:
    """Scores for the ablation: a row depends on (seed, layer, position) only, not on how long the sequence is."""
    scores = torch.zeros(len(positions), num_entries)
    for row, position in enumerate(positions.tolist()):
        generator = torch.Generator().manual_seed((seed * 1_000_003 + layer_id) * 2_097_169 + position)
        num_visible = (position + 1) // ratio
        scores[row, :num_visible] = torch.rand(num_visible, generator=generator)
    return scores


def select_top(scores: Tensor, count: int) -> Tensor:
    """Indices of the ``count`` largest scores of each row; among equal scores the lowest index wins.

    Args:
        scores: ``[T, n]``; :data:`UNAVAILABLE` marks what may not be chosen.
    Returns:
        ``[T, count]`` int64, ascending, padded with -1 behind.
    """
    num_rows, num_entries = scores.shape
    order = torch.sort(scores.detach(), dim=1, descending=True, stable=True)  # -0 and +0 are equal to it
    kept = order.indices[:, :count]
    kept = torch.where(order.values[:, :count] == UNAVAILABLE, num_entries, kept).sort(1).values
    kept = torch.where(kept == num_entries, -1, kept)
    padding = torch.full((num_rows, count - kept.shape[1]), -1)
    return torch.cat((kept, padding), 1)


def membership(indices: Tensor, num_entries: int) -> Tensor:
    """``[T, k]`` lists padded with -1 -> ``[T, num_entries]`` booleans."""
    spare = torch.where(indices < 0, num_entries, indices)  # one extra column swallows the padding
    return torch.zeros(len(indices), num_entries + 1, dtype=torch.bool).scatter(1, spare, True)[:, :num_entries]


def candidate_blocks(scores: Tensor, visible: Tensor, block_size: int, count: int) -> Tensor:
    """The blocks inside which later layers select, ``[T, count]`` ascending, padded with -1.

    Args:
        scores: ``[T, n]`` of the candidate source layer.
        visible: ``[T, n]``, true for the entries before the row's visible length.
    A block scores as its best visible entry; the block of the last visible entry is always kept.
    """
    num_rows, num_entries = scores.shape
    num_blocks = -(-num_entries // block_size)
    masked = scores.detach().masked_fill(~visible, UNAVAILABLE).clamp(max=torch.finfo(torch.bfloat16).max)
    padding = torch.full((num_rows, num_blocks * block_size - num_entries), UNAVAILABLE, dtype=scores.dtype)
    best = torch.cat((masked, padding), 1).unflatten(1, (num_blocks, block_size)).amax(2)
    num_visible = visible.sum(1, keepdim=True)
    is_last = torch.arange(num_blocks) == (num_visible - 1).div(block_size, rounding_mode="floor")
    return select_top(best.masked_fill(is_last, float("inf")), count)


def in_blocks(blocks: Tensor, block_size: int, num_entries: int) -> Tensor:
    """``[T, n]``: which entries lie in one of the row's ``blocks [T, k]``."""
    num_blocks = -(-num_entries // block_size)
    return membership(blocks, num_blocks).repeat_interleave(block_size, 1)[:, :num_entries]
