"""Attention of one layer in few launches: projections, records, selection, attention, output (spec 4.5 to 4.8)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from deepinfer.config.layer_plan import LayerPlan
from deepinfer.config.model import TextConfig
from deepinfer.kernels.attention.query_key import query_key, query_key_codes, store_ring
from deepinfer.kernels.attention.sparse_attention import EntryFormat, sparse_attention, sparse_attention_codes
from deepinfer.kernels.dense.linear import Fp8Linear, GroupedFp8Linear
from deepinfer.kernels.dense.row_scaled import RowCodes
from deepinfer.kernels.hyper_connection.parts import SplitSums, Update
from deepinfer.layers.caches import LayerCaches
from deepinfer.layers.fused.compressor import Compressor
from deepinfer.layers.fused.indexer import Indexer
from deepinfer.layers.fused.residual import InputForms, SublayerInput
from deepinfer.layers.fused.step import FusedStep
from deepinfer.layers.fused.weights import PackedSource
from deepinfer.ops.records import Fp8Record, RecordStore


class Attention:
    """Queries of this layer over its window and the entries that its selection source chose."""

    def __init__(self, config: TextConfig, plan: LayerPlan, weights: PackedSource) -> None:
        self.plan, self.eps, self.invariant = plan, config.rms_norm_eps, weights.invariant
        self.split_weights = not weights.is_fast
        """Softmax weights enter the product with 16 bits instead of 8: their rounding then flips no later one."""
        self.heads, self.head_dim = config.num_attention_heads, config.head_dim
        self.groups = config.o_groups
        is_fast = weights.is_fast
        self.query_and_key = Fp8Linear(*weights.fp8("wq_a.weight", "wkv.weight"), is_fast=is_fast)
        self.query_norm, self.key_norm = weights.bf16("q_norm.weight"), weights.bf16("kv_norm.weight")
        # The indexer's queries come from the same latent: one product makes both.
        names = ("wq_b.weight", "indexer.wq_b.weight") if plan.owns_indexer else ("wq_b.weight",)
        self.query = Fp8Linear(*weights.fp8(*names), is_fast=is_fast)
        self.output_a = GroupedFp8Linear(*weights.fp8("wo_a.weight"), groups=self.groups, is_fast=is_fast)
        self.output_b = Fp8Linear(*weights.fp8("wo_b.weight"), is_fast=is_fast)
        self.sink = weights.fp32("attn_sink")
        self.compressor = Compressor(config, plan, weights) if plan.owns_kv else None
        self.indexer = Indexer(config, plan, weights) if plan.owns_indexer else None

    def input_forms(self, rows: int) -> InputForms:
        """What :meth:`forward` reads of an input of ``rows`` rows."""
        takes_codes = self.query_and_key.takes_codes(rows, invariant=self.invariant)
        return InputForms(rounded=not takes_codes, row_codes=takes_codes)

    def forward(self, inputs: SublayerInput, step: FusedStep, caches: Sequence[LayerCaches]) -> Update:
        """The sublayer's output ``[rows, hidden]``, maybe in parts; entries of these rows are published before."""
        rows, own = step.rows, caches[self.plan.layer_id]
        cos, sin = rows.angles(self.plan.ratio)
        projected = self.query_and_key.forward(inputs.operand, overlap=True, invariant=self.invariant)
        records = None
        if not rows.keys_first:
            records = own.window.data.new_empty(rows.num_rows, own.window.data.shape[1])
        stores: dict[str, Any] = {
            "step_records": records,
            "ring": own.window.data if rows.keys_first else None,
            "ring_slot": rows.ring_slot if rows.keys_first else None,
        }
        given = (projected, self.query_norm, self.key_norm, self.eps, cos, sin)
        latent: Tensor | RowCodes
        if self.query.takes_codes(rows.num_rows, invariant=self.invariant):
            latent = query_key_codes(*given, **stores)
        else:
            _, latent = query_key(*given, **stores)
        queries = self.query.forward(latent, overlap=True, invariant=self.invariant)
        width = self.heads * self.head_dim
        entries, entry_slots = self._selection(inputs.x, queries[:, width:], step, caches)
        entry_format: EntryFormat = "fp4"
        if entries is not None and isinstance(entries.format, Fp8Record):
            entry_format = "fp8"
        attended = (
            queries[:, :width].view(-1, self.heads, self.head_dim),
            own.window.data if records is None else records,
            own.window.data,
            rows.window_index,
            None if entries is None else entries.data,
            entry_format,
            entry_slots,
            self.sink,
            cos,
            sin,
        )
        context: Tensor | RowCodes
        if self.output_a.takes_codes(rows.num_rows, invariant=self.invariant):
            context = sparse_attention_codes(*attended, self.groups, split_weights=self.split_weights)
        else:
            context = sparse_attention(
                *attended, quantize_output=True, split_weights=self.split_weights, invariant=self.invariant
            )
        if records is not None:
            store_ring(records, rows.ring_slot, own.window.data)
        # Either product can round what is between them; where the second converts it anyway, that is the cheaper place.
        second = self.output_b.can_quantize_input(len(context), invariant=self.invariant)
        low = self.output_a.forward(context, quantize_output=not second, overlap=True, invariant=self.invariant)
        sums = None if self.invariant or second else self.output_b.partial_sums(low, overlap=True)
        if sums is not None:
            return SplitSums(sums)
        return self.output_b.forward(low, quantize_input=second, overlap=True, invariant=self.invariant)

    def publish(self, inputs: SublayerInput, step: FusedStep, caches: Sequence[LayerCaches]) -> None:
        """Write the entries and index keys that the rows complete, at a KV source."""
        if self.compressor is not None:
            self.compressor.publish(inputs.x, step.rows, caches[self.plan.layer_id])

    def _selection(
        self, x: Tensor, index_queries: Tensor, step: FusedStep, caches: Sequence[LayerCaches]
    ) -> tuple[RecordStore | None, Tensor | None]:
        """The store of the compressed entries and the slots ``[rows, k]`` that each row attends."""
        plan = self.plan
        if plan.ratio == 0:
            return None, None
        assert plan.kv_source is not None
        assert plan.index_source is not None
        if self.indexer is not None:
            assert plan.index_k_source is not None
            keys = caches[plan.index_k_source].index_keys
            assert keys is not None
            self.indexer.select(x, index_queries, step, keys.data)
        return caches[plan.kv_source].entries, step.selections[plan.index_source]
