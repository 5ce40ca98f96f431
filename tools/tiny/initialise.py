"""Initial values that let some heads look at the tokens just before their own from the first step on.

Looking up "the token behind the last place where this happened" takes a head that moves information by one token and,
in a later layer, a head that compares it. With one key head, no biases and a norm on every key, the first of the two
did not form in 130 million tokens of training (``docs/tiny_model.md``). Given at the start, it is kept and used.

How: channel 0 of every embedding holds the same number. Window keys read it into their rotary channels, so that a key
is the same vector turned by its position; the queries of the chosen heads read it too, turned back by the wanted
distance. Their product peaks at that distance.
"""

from __future__ import annotations

import math

import torch

from deepinfer.reference.rope import layer_frequencies
from tools.tiny.parameters import StackedParameters

_CONSTANT = 4.0
"""Channel 0 of the embedding; about its value in the normed input of attention too."""
_LATENT_GAIN = 2.0
_KEY_SIZE = 1.5
_PEAK = 10.0
"""Logit of one rotary pair at the peak."""
_NUM_PAIRS = 6
"""Fast pairs that take part: slow ones cannot tell neighbours apart."""
_QUIET = 0.3
"""Factor on the random part of what a chosen head reads into its rotary channels."""


def heads_and_distances(layer: int, first_decoder_layer: int) -> dict[int, int]:
    """Head -> distance in tokens of the heads that start as look-backs."""
    if layer < 2:
        return {1: 1, 2: 2, 3: 3}
    return {3: 1} if layer < first_decoder_layer else {}


@torch.no_grad()
def add_look_back_heads(parameters: StackedParameters) -> None:
    """Overwrite a part of the initial values of embedding and attention in place."""
    text = parameters.config.text
    width, start = text.head_dim, text.head_dim - text.qk_rope_head_dim
    parameters["embed.weight"][:, 0] = _CONSTANT
    latent = _CONSTANT * _LATENT_GAIN / math.sqrt(1 + (_CONSTANT * _LATENT_GAIN) ** 2 / text.q_lora_rank)
    for layer in text.layers:
        chosen = heads_and_distances(layer.layer_id, text.first_decoder_layer)
        if not chosen:
            continue
        wq_a, wq_b, wkv = (parameters[f"layers.attn.{name}.weight"][layer.layer_id] for name in ("wq_a", "wq_b", "wkv"))
        wq_a[0] = 0
        wq_a[0, 0] = _LATENT_GAIN
        wkv[start:] *= _QUIET
        wkv[start::2, 0] = _KEY_SIZE / _CONSTANT
        frequencies = layer_frequencies(text, layer.ratio)[:_NUM_PAIRS]
        size = _PEAK * math.sqrt(width) / _KEY_SIZE / latent
        for head, distance in chosen.items():
            rows = slice(head * width + start, (head + 1) * width)
            wq_b[rows] *= _QUIET
            angle = -distance * frequencies
            wq_b[rows][0 : 2 * _NUM_PAIRS : 2, 0] = (size * angle.cos()).float()
            wq_b[rows][1 : 2 * _NUM_PAIRS : 2, 0] = (size * angle.sin()).float()
