"""Engram: a hashed n-gram memory that is added to the trunk (spec 4.10 d to f)."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from deepinfer.config.engram_hashing import engram_multipliers, engram_primes
from deepinfer.config.model import TextConfig
from deepinfer.reference.building_blocks import linear
from deepinfer.reference.number_formats import bf16
from deepinfer.reference.parameters import Parameters
from deepinfer.reference.setting import Setting

SMALLEST_GATE = 1e-6
"""Lower bound of the gate's magnitude before the square root."""


def ngram_contexts(compressed: Tensor, image_mask: Tensor, length: int, padding: int) -> Tensor:
    """The last ``length`` compressed ids of every position, newest first: ``[T, length]`` int64.

    Positions before the start are padding. So is an image position, and everything older than it: walking backwards
    stops there. The first column of an image position itself is padding too (its update is skipped anyway).
    """
    num_tokens = len(compressed)
    columns = []
    stopped = torch.zeros(num_tokens, dtype=torch.bool)
    for distance in range(length):
        position = torch.arange(num_tokens) - distance
        inside = position.clamp(min=0)
        stopped = stopped | (position < 0) | image_mask[inside]
        columns.append(torch.where(stopped, padding, compressed[inside]))
    return torch.stack(columns, 1)


def engram_rows(contexts: Tensor, layer_id: int, text: TextConfig) -> Tensor:
    """Table rows of every position: ``[T, (ngram sizes) * (heads)]`` int64, size-major, offsets included.

    All arithmetic is exact in int64: the multipliers are drawn so that no product overflows.
    """
    sizes = range(2, text.engram_max_ngram_size + 1)
    num_compressed = text.engram_compressed_vocab_size or text.vocab_size
    multipliers = engram_multipliers(layer_id, text.engram_max_ngram_size, num_compressed)
    all_primes = engram_primes(
        len(text.engram_layer_ids), text.engram_max_ngram_size, text.engram_n_heads, text.engram_vocab_size
    )
    primes = all_primes[text.engram_layer_ids.index(layer_id)]
    offsets = [0, *accumulate(primes)]
    rows = []
    hashed = contexts[:, 0] * multipliers[0]
    for size in sizes:
        hashed = hashed ^ (contexts[:, size - 1] * multipliers[size - 1])
        for head in range(text.engram_n_heads):
            column = (size - 2) * text.engram_n_heads + head
            rows.append(hashed % primes[column] + offsets[column])
    return torch.stack(rows, 1)


def engram(trunk: Tensor, rows: Tensor, image_mask: Tensor, parameters: Parameters, setting: Setting) -> Tensor:
    """The trunk ``[T, M, d]`` with the memory added to every stream; rows of an image span stay as they are.

    Args:
        rows: ``[T, columns]`` of :func:`engram_rows`.
        image_mask: ``[T]`` booleans.
        parameters: the scope ``layers.L.engram``.
    """
    text, roundings = setting.text, setting.roundings
    streams, width, epsilon = text.hc_mult, text.hidden_size, text.rms_norm_eps
    memory = parameters.rows("embed.weight", rows).flatten(1)  # stored in e4m3: no quantisation before the product
    projected = bf16(linear(memory, parameters["wkv.weight"]), roundings.bf16_engram_projection)
    projected = projected.unflatten(1, (streams + 1, width))
    key, value = projected[:, :streams], projected[:, streams:]  # [T, M, d], [T, 1, d]

    weight = parameters["q_weight"] * parameters["k_weight"]
    match = (trunk * weight * key).sum(-1)
    match = match * torch.rsqrt(trunk.square().mean(-1) + epsilon) * torch.rsqrt(key.square().mean(-1) + epsilon)
    match = match * width**-0.5
    gate = torch.sigmoid(match.sign() * match.abs().clamp(min=SMALLEST_GATE).sqrt())  # [T, M]
    updated = bf16(trunk + gate[..., None] * value, roundings.bf16_engram_trunk)
    return torch.where(image_mask[:, None, None], trunk, updated)
