"""The indexer of a selection source layer: which compressed entries its segment attends (spec 4.7)."""

from __future__ import annotations

from torch import Tensor

from deepinfer.config.layer_plan import IndexMode, LayerPlan
from deepinfer.config.model import TextConfig
from deepinfer.kernels.dense.linear import BESIDE_ROWS, Bf16Linear
from deepinfer.kernels.indexer.query import index_query
from deepinfer.kernels.indexer.selection import IndexView, index_candidates, index_full, long_rows
from deepinfer.layers.fused.device_rows import DeviceRows, DeviceStream
from deepinfer.layers.fused.step import FusedStep
from deepinfer.layers.fused.weights import PackedSource


class Indexer:
    """Scores entries for every row and keeps the best ``index_topk``. Its query product is the attention's business."""

    def __init__(self, config: TextConfig, plan: LayerPlan, weights: PackedSource) -> None:
        self.plan, self.topk, self.invariant = plan, config.index_topk, weights.invariant
        self.heads, self.dim = config.index_n_heads, config.index_head_dim
        self.candidates = (config.candidate_block_size, config.candidate_topk_blocks)
        self.head_weights = Bf16Linear(weights.child("indexer").bf16("weights_proj.weight"))

    def select(self, x: Tensor, queries: Tensor, step: FusedStep, keys: Tensor) -> None:
        """Leave this layer's selection (and candidate blocks, at their source) in ``step``.

        Args:
            x: ``[rows, hidden]`` bf16 attention input. queries: ``[rows, heads * dim]`` bf16, not rotated.
            keys: uint8 records of the stream, this step's included.
        """
        rows, stream = step.rows, step.rows.streams[self.plan.ratio]
        cos, sin = rows.compressed_angles
        # `x` is older than the kernel that made the queries: this product runs beside it.
        head_weights = self.head_weights.forward(
            x, invariant=self.invariant, overlap=True, beside=rows.num_rows > BESIDE_ROWS
        )
        query = index_query(queries.unflatten(1, (self.heads, self.dim)), cos, sin)
        view = _view(rows, stream)
        if self.plan.mode is IndexMode.REINDEX and step.candidate_blocks is not None:
            blocks, size = step.candidate_blocks, self.candidates[0]
            found = index_candidates(query, head_weights, keys, view, blocks, size, self.topk, invariant=self.invariant)
        else:
            wanted = self.candidates if self.plan.is_candidate_source else None
            found = index_full(query, head_weights, keys, view, self.topk, wanted, invariant=self.invariant)
            if self.plan.is_candidate_source:
                step.candidate_blocks = found.blocks
        step.selections[self.plan.layer_id] = found.slots


def _view(rows: DeviceRows, stream: DeviceStream) -> IndexView:
    shared, max_visible = (0, 0), None
    if rows.spans is not None:
        shared = long_rows(rows.spans)
        max_visible = max((span.last_position + 1) // stream.ratio for span in rows.spans)
    return IndexView(
        rows.block_tables, rows.sequence, stream.num_visible, stream.entries_per_block, max_visible, shared
    )
