"""The compressor of a KV source layer: writes main entries and index keys of completed groups (spec 4.6)."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.config.layer_plan import LayerPlan
from deepinfer.config.model import TextConfig
from deepinfer.layers.caches import LayerCaches
from deepinfer.layers.step_state import StepState
from deepinfer.layers.weights import WeightSource
from deepinfer.ops.registry import Ops
from deepinfer.ops.step_views import StreamView


class Compressor:
    """Turns attention inputs into one latent per ``ratio`` tokens and publishes what later layers read.

    Projections are not quantised. For ratio 2 the (score, value) pairs stay fp32 and survive between steps in a ring by
    absolute position, because a pair can straddle any chunk or step boundary.
    """

    def __init__(self, config: TextConfig, plan: LayerPlan, weights: WeightSource, ops: Ops) -> None:
        self.plan = plan
        self.eps = config.rms_norm_eps
        self.head_dim = config.head_dim
        self.ops = ops
        source = weights.child("compressor")
        names = ("wgate.weight", "wkv.weight") if plan.ratio == 2 else ("wkv.weight",)
        self.projection = source.stacked(*names)
        self.norm = source.wide("norm.weight")
        if plan.owns_index_keys:
            indexer = weights.child("indexer")
            self.index_key = indexer.wide("wk.weight")
            self.index_key_norm = indexer.wide("k_norm.weight")

    def publish(self, x: Tensor, state: StepState, caches: LayerCaches) -> None:
        """Write the entries that the rows ``x`` ``[rows, hidden]`` complete. A step may complete none."""
        stream = state.streams[self.plan.ratio]
        latent = self._pool_pairs(x, stream, caches) if self.plan.ratio == 2 else self._per_token(x, stream)
        latent = self.ops.rms_norm(latent, self.norm, self.eps)
        name = f"layers.{self.plan.layer_id}.attn"
        state.record(f"{name}.latent", latent)
        angles = state.entry_angles[self.plan.ratio]
        assert caches.entries is not None
        entries = caches.entries.format.encode(self.ops.rotate(latent, *angles))
        caches.entries.write(stream.emit_slots, entries)
        if state.trace is not None:
            state.record(f"{name}.entry", caches.entries.format.decode(entries))
        if caches.index_keys is not None:
            key = self.ops.linear(latent, self.index_key, False)
            key = self.ops.rms_norm(key, self.index_key_norm, self.eps)
            keys = caches.index_keys.format.encode(self.ops.rotate(key, *angles))
            caches.index_keys.write(stream.emit_slots, keys)
            if state.trace is not None:
                state.record(f"{name}.index_key", caches.index_keys.format.decode(keys))

    def _per_token(self, x: Tensor, stream: StreamView) -> Tensor:
        return self.ops.linear(x[stream.emit_rows], self.projection, False)

    def _pool_pairs(self, x: Tensor, stream: StreamView, caches: LayerCaches) -> Tensor:
        pairs, ring = stream.pairs, caches.pairs
        assert pairs is not None
        assert ring is not None
        projected = self.ops.linear(x, self.projection, False, torch.float32).unflatten(-1, (2, self.head_dim))
        pool = torch.cat((projected, ring.index_select(0, pairs.previous)))
        latent = self.ops.pool_pairs(pool[pairs.partner_index], projected[stream.emit_rows], x.dtype)
        ring.index_copy_(0, pairs.store_slots, projected[pairs.store_rows])
        return latent
