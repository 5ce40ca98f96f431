"""Engram sublayer: n-gram memory added to the streams at a layer's entrance (spec 4.10)."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from deepinfer.config.engram_hashing import engram_multipliers, engram_primes
from deepinfer.config.model import TextConfig
from deepinfer.kernels.dense.linear import Fp8Linear
from deepinfer.kernels.engram.gate import engram_gate
from deepinfer.kernels.engram.gather import NgramHash
from deepinfer.kernels.engram.placement import EngramPlacement
from deepinfer.layers.fused.residual import Residual
from deepinfer.layers.fused.weights import PackedSource


class Engram:
    """Looks up every n-gram that ends at a row and adds a gated projection of what it finds.

    Args:
        placement: fetches table rows; started when the token ids of a step are known.
    """

    def __init__(self, config: TextConfig, weights: PackedSource, placement: EngramPlacement) -> None:
        self.eps, self.placement, self.invariant = config.rms_norm_eps, placement, weights.invariant
        source = weights.child("engram")
        self.projection = Fp8Linear(*source.fp8("wkv.weight"), is_fast=source.is_fast)
        self.gate_weight = source.fp32("q_weight") * source.fp32("k_weight")

    def begin(self, ngram_ids: Tensor) -> None:
        """Start fetching the table rows of a step, ahead of the layers before this one."""
        self.placement.begin(ngram_ids)

    def forward(self, residual: Residual) -> None:
        """Add what was found to the streams. Nothing may be pending."""
        assert residual.update is None
        # Table rows are stored in the format of a quantised activation, so they enter the product as they are.
        keys_value = self.projection.forward(self.placement.rows(), invariant=self.invariant)
        residual.trunk = engram_gate(residual.trunk, keys_value, self.gate_weight, self.eps)


def ngram_hash(config: TextConfig, layer_id: int, token_map: Tensor, num_compressed: int) -> NgramHash:
    """The constants of a layer's hash on the device of ``token_map`` (int64 ``[vocab]``)."""
    ngram, heads = config.engram_max_ngram_size, config.engram_n_heads
    layers = engram_primes(len(config.engram_layer_ids), ngram, heads, config.engram_vocab_size)
    primes = layers[config.engram_layer_ids.index(layer_id)]
    offsets = list(itertools.accumulate(primes, initial=0))[:-1]
    device = token_map.device
    return NgramHash(
        token_map=token_map.to(torch.int32),
        pad=int(token_map[config.engram_pad_token_id]),
        multipliers=torch.tensor(engram_multipliers(layer_id, ngram, num_compressed), device=device),
        primes=torch.tensor(primes, device=device).view(ngram - 1, heads),
        offsets=torch.tensor(offsets, device=device).view(ngram - 1, heads),
    )
