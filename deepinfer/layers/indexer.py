"""The indexer of a selection source layer: which compressed entries its segment attends (spec 4.7)."""

from __future__ import annotations

from torch import Tensor

from deepinfer.config.layer_plan import IndexMode, LayerPlan
from deepinfer.config.model import TextConfig
from deepinfer.layers.step_state import StepState
from deepinfer.layers.weights import WeightSource
from deepinfer.ops.number_formats import q4u_round
from deepinfer.ops.numerics import Numerics
from deepinfer.ops.records import RecordStore
from deepinfer.ops.registry import Ops


class Indexer:
    """Scores entries for every row and keeps the best ``index_topk``."""

    def __init__(
        self, config: TextConfig, plan: LayerPlan, weights: WeightSource, ops: Ops, numerics: Numerics
    ) -> None:
        self.plan = plan
        self.topk = config.index_topk
        self.heads, self.dim = config.index_n_heads, config.index_head_dim
        self.block_size, self.num_blocks = config.candidate_block_size, config.candidate_topk_blocks
        self.ops, self.numerics = ops, numerics
        source = weights.child("indexer")
        self.query = source.wide("wq_b.weight")
        self.head_weights = source.wide("weights_proj.weight")

    def select(self, x: Tensor, query_latent: Tensor, state: StepState, keys: RecordStore) -> None:
        """Leave this layer's selection (and candidate blocks, at their source) in ``state``.

        Args:
            x: ``[rows, hidden]`` attention input. query_latent: ``[rows, q_lora_rank]``.
            keys: index keys of the stream, this step's included.
        """
        quantize = self.numerics.quantize
        stream = state.streams[self.plan.ratio]
        query = self.ops.linear(query_latent, self.query, quantize).view(-1, self.heads, self.dim)
        query = self.ops.rotate(query, *state.compressed_angles)
        if quantize:
            query = q4u_round(query)
        head_weights = self.ops.linear(x, self.head_weights, False)
        if self.plan.mode is IndexMode.REINDEX and state.candidate_blocks is not None:
            selected = self.ops.index_candidates(
                query, head_weights, keys, stream, state.candidate_blocks, self.block_size, self.topk, quantize
            )
        else:
            wanted = (self.block_size, self.num_blocks) if self.plan.is_candidate_source else None
            selected, blocks = self.ops.index_full(query, head_weights, keys, stream, self.topk, quantize, wanted)
            if self.plan.is_candidate_source:
                state.candidate_blocks = blocks
        state.selections[self.plan.layer_id] = selected
        name = f"layers.{self.plan.layer_id}.attn"
        state.record(f"{name}.index_query", query)
        state.record(f"{name}.selected", selected)
        if self.plan.is_candidate_source:
            state.record(f"{name}.blocks", state.candidate_blocks)
