"""The compressor of a KV source layer: entries and index keys of completed groups (spec 4.6)."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.config.layer_plan import LayerPlan
from deepinfer.config.model import TextConfig
from deepinfer.kernels.compressor import publish_entries, publish_index_keys
from deepinfer.kernels.dense.linear import Bf16Linear
from deepinfer.layers.caches import LayerCaches
from deepinfer.layers.fused.device_rows import DeviceRows
from deepinfer.layers.fused.weights import PackedSource


class Compressor:
    """Turns attention inputs into one latent per ``ratio`` tokens and publishes what later layers read."""

    def __init__(self, config: TextConfig, plan: LayerPlan, weights: PackedSource) -> None:
        self.plan, self.eps, self.invariant = plan, config.rms_norm_eps, weights.invariant
        source = weights.child("compressor")
        names = ("wgate.weight", "wkv.weight") if plan.ratio == 2 else ("wkv.weight",)
        self.projection = Bf16Linear(source.bf16(*names))
        self.norm = source.bf16("norm.weight")
        if plan.owns_index_keys:
            indexer = weights.child("indexer")
            self.index_key = Bf16Linear(indexer.bf16("wk.weight"))
            self.index_key_norm = indexer.bf16("k_norm.weight")

    def publish(self, x: Tensor, rows: DeviceRows, caches: LayerCaches) -> None:
        """Write the entries that the rows ``x`` ``[rows, hidden]`` bf16 complete. A step may complete none."""
        stream, entries = rows.streams[self.plan.ratio], caches.entries
        assert entries is not None
        dtype = torch.float32 if self.plan.ratio == 2 else torch.bfloat16
        projected = self.projection.forward(x, dtype=dtype, invariant=self.invariant, overlap=True)
        cos, sin = stream.entry_angles
        latent = publish_entries(
            projected,
            self.plan.ratio,
            self.norm,
            self.eps,
            cos,
            sin,
            stream.emit_slot,
            entries.data,
            caches.pairs,
            stream.partner,
            stream.pair_store_slot,
            stores_in_place=rows.keys_first,  # no chunk is longer than the spare room of the rings
        )
        if caches.index_keys is not None:
            key = self.index_key.forward(latent, invariant=self.invariant, overlap=True)
            publish_index_keys(key, self.index_key_norm, self.eps, cos, sin, stream.emit_slot, caches.index_keys.data)
