"""Engram sublayer: n-gram memory added to the streams at a layer's entrance (spec 4.10)."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from deepinfer.config.engram_hashing import engram_multipliers, engram_primes
from deepinfer.config.model import TextConfig
from deepinfer.layers.step_state import StepState
from deepinfer.layers.weights import WeightSource
from deepinfer.ops.engram import ngram_context
from deepinfer.ops.registry import Ops


class Engram:
    """Looks up every n-gram that ends at a row and adds a gated projection of what it finds.

    Args:
        token_map: ``[vocab]`` int64, the compressed vocabulary.
        num_compressed: its size; it enters the hash multipliers.
    """

    def __init__(
        self,
        config: TextConfig,
        layer_id: int,
        weights: WeightSource,
        ops: Ops,
        token_map: Tensor,
        num_compressed: int,
    ) -> None:
        self.layer_id = layer_id
        self.ops = ops
        self.eps = config.rms_norm_eps
        self.streams, self.hidden = config.hc_mult, config.hidden_size
        self.token_map = token_map
        self.pad = int(token_map[config.engram_pad_token_id])
        ngram, heads = config.engram_max_ngram_size, config.engram_n_heads
        layers = engram_primes(len(config.engram_layer_ids), ngram, heads, config.engram_vocab_size)
        primes = layers[config.engram_layer_ids.index(layer_id)]
        offsets = list(itertools.accumulate(primes, initial=0))[:-1]
        device = token_map.device
        self.primes = torch.tensor(primes, device=device).view(ngram - 1, heads)
        self.offsets = torch.tensor(offsets, device=device).view(ngram - 1, heads)
        self.multipliers = torch.tensor(engram_multipliers(layer_id, ngram, num_compressed), device=device)
        source = weights.child("engram")
        self.table = weights.engram_table(layer_id)
        self.projection = source.wide("wkv.weight")
        self.gate_weight = source.wide("q_weight") * source.wide("k_weight")

    def forward(self, trunk: Tensor, state: StepState) -> Tensor:
        """``trunk`` ``[rows, M, hidden]`` with the memory added; rows of an image pass unchanged."""
        context = ngram_context(self.token_map, state.ngram_ids, self.pad)
        rows = self.ops.engram_rows(context, self.multipliers, self.primes, self.offsets)
        found = self.table.gather_dequantized(rows.flatten().cpu()).view(rows.shape[0], -1).to(trunk.device)
        # Table rows are stored in the format of a quantised activation, so they enter the product as they are.
        projected = self.ops.linear(found, self.projection, False, trunk.dtype)
        keys_value = projected.view(-1, self.streams + 1, self.hidden)
        updated = self.ops.engram_gate(trunk, keys_value, self.gate_weight, self.eps)
        if state.is_image is not None:
            updated = torch.where(state.is_image[:, None, None], trunk, updated)
        state.record(f"layers.{self.layer_id}.engram.rows", rows)
        state.record(f"layers.{self.layer_id}.engram.trunk", updated)
        return updated
