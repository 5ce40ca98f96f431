"""Attention of one backbone layer: projections, window, compressed stream, output projection (spec 4.5 to 4.8)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from deepinfer.config.layer_plan import LayerPlan
from deepinfer.config.model import TextConfig
from deepinfer.layers.caches import LayerCaches
from deepinfer.layers.compressor import Compressor
from deepinfer.layers.indexer import Indexer
from deepinfer.layers.step_state import StepState
from deepinfer.layers.weights import WeightSource
from deepinfer.ops.numerics import Numerics
from deepinfer.ops.records import RecordStore
from deepinfer.ops.registry import Ops
from deepinfer.ops.step_views import StreamView


class Attention:
    """Queries of this layer over its own window and the entries that its selection source chose."""

    def __init__(
        self, config: TextConfig, plan: LayerPlan, weights: WeightSource, ops: Ops, numerics: Numerics
    ) -> None:
        self.plan = plan
        self.ops = ops
        self.quantize = numerics.quantize
        self.eps = config.rms_norm_eps
        self.heads, self.head_dim = config.num_attention_heads, config.head_dim
        self.groups, self.query_rank = config.o_groups, config.q_lora_rank
        self.query_and_key = weights.stacked("wq_a.weight", "wkv.weight")
        self.query_norm = weights.wide("q_norm.weight")
        self.query = weights.wide("wq_b.weight")
        self.key_norm = weights.wide("kv_norm.weight")
        self.output_a = weights.wide("wo_a.weight").unflatten(0, (self.groups, -1))
        self.output_b = weights.wide("wo_b.weight")
        self.sink = weights.wide("attn_sink")
        self.compressor = Compressor(config, plan, weights, ops) if plan.owns_kv else None
        self.indexer = Indexer(config, plan, weights, ops, numerics) if plan.owns_indexer else None

    def forward(self, x: Tensor, state: StepState, caches: Sequence[LayerCaches]) -> Tensor:
        """``x`` ``[rows, hidden]`` (normed) to the attention output ``[rows, hidden]``; entries are published before.

        Args:
            caches: of all layers, by layer number: streams are read from their source layers.
        """
        own = caches[self.plan.layer_id]
        angles = state.compressed_angles if self.plan.ratio else state.plain_angles
        query_latent, key = self.ops.linear(x, self.query_and_key, self.quantize).split(
            (self.query_rank, self.head_dim), dim=-1
        )
        query_latent = self.ops.rms_norm(query_latent, self.query_norm, self.eps)
        query = self.ops.linear(query_latent, self.query, self.quantize).view(-1, self.heads, self.head_dim)
        query = self.ops.rotate(query, *angles)
        key = self.ops.rotate(self.ops.rms_norm(key, self.key_norm, self.eps), *angles)
        keys = own.window.format.encode(key)
        selection = self._selection(x, query_latent, state, caches)
        context = self.ops.sparse_attention(query, keys, own.window, state.window, self.sink, selection)
        # Stored only now: the slots may still hold keys that this step's first rows had to see.
        own.window.write(state.window.store_slots, keys[state.window.store_rows])
        context = self.ops.rotate(context, *angles, inverse=True)
        latent = self.ops.grouped_linear(context.view(x.shape[0], self.groups, -1), self.output_a, self.quantize)
        output = self.ops.linear(latent, self.output_b, self.quantize)
        if state.trace is not None:
            name = f"layers.{self.plan.layer_id}.attn"
            state.record(f"{name}.q_latent", query_latent)
            state.record(f"{name}.q", query)
            state.record(f"{name}.window_key", own.window.format.decode(keys))
            state.record(f"{name}.context", context)
            state.record(f"{name}.output", output)
        return output

    def publish(self, x: Tensor, state: StepState, caches: Sequence[LayerCaches]) -> None:
        """Write the entries and index keys that the rows ``x`` ``[rows, hidden]`` complete, at a KV source."""
        if self.compressor is not None:
            self.compressor.publish(x, state, caches[self.plan.layer_id])

    def _selection(
        self, x: Tensor, query_latent: Tensor, state: StepState, caches: Sequence[LayerCaches]
    ) -> tuple[Tensor, RecordStore, StreamView] | None:
        """Selected entries, the store they lie in and its stream, or None when there are none."""
        plan = self.plan
        if plan.ratio == 0:
            return None
        assert plan.kv_source is not None
        assert plan.index_k_source is not None
        assert plan.index_source is not None
        if self.indexer is not None:
            keys = caches[plan.index_k_source].index_keys
            assert keys is not None
            self.indexer.select(x, query_latent, state, keys)
        selected = state.selections[plan.index_source]
        if selected.shape[1] == 0:
            return None
        store = caches[plan.kv_source].entries
        assert store is not None
        return selected, store, state.streams[plan.ratio]
