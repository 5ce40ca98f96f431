"""Compressed key/value streams: latents, main entries and index keys (spec 4.6)."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.reference.building_blocks import linear
from deepinfer.reference.number_formats import bf16, fp32, q4e, q4u, q8
from deepinfer.reference.parameters import Parameters
from deepinfer.reference.rope import rotate
from deepinfer.reference.setting import Setting


def latents(x: Tensor, ratio: int, parameters: Parameters, setting: Setting) -> Tensor:
    """One latent per ``ratio`` tokens.

    Args:
        x: ``[T, d]`` attention input, not quantised.
        ratio: 1, or 2: a softmax over the two tokens of each aligned pair, separately in every channel. A last token
            without its partner gives nothing yet.
        parameters: the scope ``attn.compressor``.
    Returns:
        ``[T // ratio, D]``, not rotated.
    """
    value = linear(x, parameters["wkv.weight"])
    if ratio == 2:
        value = fp32(value, setting.roundings.fp32_pair)
        score = fp32(linear(x, parameters["wgate.weight"]), setting.roundings.fp32_pair)
        paired = 2 * (len(x) // 2)
        share = torch.softmax(score[:paired].unflatten(0, (-1, 2)), 1)  # [n, 2, D]
        value = (share * value[:paired].unflatten(0, (-1, 2))).sum(1)
    pooled = bf16(value, setting.roundings.bf16_pooled)
    return setting.norm(pooled, parameters["norm.weight"])


def main_entries(latent: Tensor, positions: Tensor, frequencies: Tensor, setting: Setting) -> Tensor:
    """What attention reads for every entry, ``[n, D]``.

    Args:
        latent: ``[n, D]``.
        positions: ``[n]``; entry j of a stream turns as the first token of its group, at ``j * ratio``.
    """
    rotated = bf16(rotate(latent, positions, frequencies), setting.roundings.bf16_rope)
    quantise = q4e if setting.text.use_fp4_sparse_kv else q8
    return quantise(rotated, setting.roundings.q4_entry)


def index_keys(
    latent: Tensor, positions: Tensor, frequencies: Tensor, parameters: Parameters, setting: Setting
) -> Tensor:
    """Keys that the indexer scores, ``[n, index_head_dim]``, from the unrotated and unquantised latents.

    Args:
        latent, positions: as :func:`main_entries`.
        parameters: the scope ``attn.indexer``.
    """
    roundings = setting.roundings
    projected = bf16(linear(latent, parameters["wk.weight"]), roundings.bf16_index_key)
    key = setting.norm(projected, parameters["k_norm.weight"])
    rotated = bf16(rotate(key, positions, frequencies), roundings.bf16_rope)
    return q4u(rotated, roundings.q4_index_key)


def visible_entries(positions: Tensor, num_entries: int, ratio: int) -> Tensor:
    """``[T, n]``: a query at p sees the entries whose group is complete, ``j < (p + 1) // ratio``."""
    return torch.arange(num_entries) < ((positions + 1) // ratio)[:, None]
