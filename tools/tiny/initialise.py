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
from torch import Tensor

from deepinfer.reference.rope import layer_frequencies
from tools.tiny.parameters import StackedParameters

_CONSTANT = 4.0
"""Channel 0 of the embedding; about its value in the normed input of attention too."""
_LATENT_GAIN = 2.0
_KEY_SIZE = 1.5
_PEAK = 10.0
"""Logit of one rotary pair at the peak."""
_DRAFT_PEAK = 3.0
_FEATURE_GAIN = 1.2
"""Channel 0 of the features is about 13 where the projected features have a root mean square of 4."""
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
    """Overwrite a part of the backbone's initial values of embedding and attention in place."""
    text = parameters.config.text
    parameters["embed.weight"][:, 0] = _CONSTANT
    for layer in text.layers:
        chosen = heads_and_distances(layer.layer_id, text.first_decoder_layer)
        if chosen:
            frequencies = layer_frequencies(text, layer.ratio)[:_NUM_PAIRS]
            _look_back(parameters, "layers.attn.", layer.layer_id, chosen, frequencies, _PEAK)


@torch.no_grad()
def add_draft_look_back_heads(parameters: StackedParameters) -> None:
    """The same for the draft of a trained backbone, softer: what a slot may need lies one to four tokens back.

    Channel 0 still holds about the same number in the features of a trained backbone; it is handed on as it is.
    """
    text = parameters.config.text
    proj = parameters["mtp.main_proj.weight"][0]
    proj[0] = 0
    proj[0, 0] = _FEATURE_GAIN
    frequencies = layer_frequencies(text, 0)[:_NUM_PAIRS]
    for stage in range(text.num_nextn_predict_layers):
        _look_back(
            parameters, "mtp.attn.", stage, {1: 1, 2: 2, 3: 4} if stage == 0 else {3: 1}, frequencies, _DRAFT_PEAK
        )


def _look_back(
    parameters: StackedParameters, part: str, owner: int, chosen: dict[int, int], frequencies: Tensor, peak: float
) -> None:
    """Give one layer or stage the heads ``chosen`` (head -> distance)."""
    text = parameters.config.text
    width, start = text.head_dim, text.head_dim - text.qk_rope_head_dim
    latent = _CONSTANT * _LATENT_GAIN / math.sqrt(1 + (_CONSTANT * _LATENT_GAIN) ** 2 / text.q_lora_rank)
    wq_a, wq_b, wkv = (parameters[f"{part}{name}.weight"][owner] for name in ("wq_a", "wq_b", "wkv"))
    wq_a[0] = 0
    wq_a[0, 0] = _LATENT_GAIN
    wkv[start:] *= _QUIET
    wkv[start::2, 0] = _KEY_SIZE / _CONSTANT
    size = peak * math.sqrt(width) / _KEY_SIZE / latent
    for head, distance in chosen.items():
        rows = slice(head * width + start, (head + 1) * width)
        wq_b[rows] *= _QUIET
        angle = -distance * frequencies
        wq_b[rows][0 : 2 * _NUM_PAIRS : 2, 0] = (size * angle.cos()).float()
        wq_b[rows][1 : 2 * _NUM_PAIRS : 2, 0] = (size * angle.sin()).float()
