"""DeepSeek-V4.1-Flash on an NVIDIA GPU: the layers wired together, without host work in between (spec 4.1).

Same inputs, caches and results as :mod:`deepinfer.models.deepseek_v41`, which says what is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from deepinfer.config.layer_plan import LayerPlan
from deepinfer.config.model import TextConfig
from deepinfer.kernels.dense.linear import Bf16Linear
from deepinfer.kernels.engram.placement import EngramPlacement
from deepinfer.kernels.first_streams import first_streams
from deepinfer.kernels.hyper_connection.finish import collapse_head
from deepinfer.kernels.hyper_connection.parts import DEFAULT_TILE
from deepinfer.kernels.moe.experts import RoutedExperts
from deepinfer.layers.caches import LayerCaches, ModelCaches
from deepinfer.layers.fused.attention import Attention
from deepinfer.layers.fused.engram import Engram
from deepinfer.layers.fused.feed_forward import FeedForward
from deepinfer.layers.fused.residual import HyperConnection, Residual, flush, keep_rows
from deepinfer.layers.fused.step import FusedStep
from deepinfer.layers.fused.weights import PackedSource
from deepinfer.layers.weights import TensorSource
from deepinfer.ops.numerics import Numerics
from deepinfer.ops.registry import Ops

HEAD_ROWS = 64
"""Rows of a batch-invariant product by the vocabulary; memory plans count with it."""

MakeExperts = Callable[[PackedSource, int], RoutedExperts]
"""(weights below ``ffn.``, number of experts) -> the routed experts of a layer."""


class FusedLayer:
    """Optional n-gram memory, attention, experts: a backbone layer or a stage of the draft.

    Args:
        experts: (routed experts, experts per token).
    """

    def __init__(
        self,
        config: TextConfig,
        plan: LayerPlan,
        weights: PackedSource,
        experts: tuple[int, int],
        make_experts: MakeExperts,
        engram: Engram | None = None,
    ) -> None:
        self.plan, self.engram = plan, engram
        self.attention = Attention(config, plan, weights.child("attn"))
        self.attention_hc = HyperConnection(config, "attn", weights, self.attention.input_forms)
        below = weights.child("ffn")
        num_experts, num_selected = experts
        self.feed_forward = FeedForward(
            num_selected,
            config.routed_scaling_factor,
            below,
            lambda source: make_experts(source, num_experts),
        )
        self.ffn_hc = HyperConnection(config, "ffn", weights, self.feed_forward.input_forms)

    def forward(self, residual: Residual, step: FusedStep, caches: Sequence[LayerCaches]) -> bool:
        """Run the layer. At the cut of a step the rows that do not go on are dropped.

        Returns:
            False if no row goes on.
        """
        features = step.features if self.plan.is_feature_target else None
        if self.engram is not None:
            flush(residual, features)
            features = None
            self.engram.forward(residual)
        inputs = self.attention_hc.enter(residual, features)
        self.attention.publish(inputs, step, caches)
        if step.cut is not None and step.cut.layer_id == self.plan.layer_id:
            cut = step.cut
            if cut.rows is None:
                keep_rows(residual, cut.kept)
                return False
            keep_rows(residual, cut.kept)
            inputs = inputs.of_rows(cut.kept, self.attention.input_forms(len(cut.kept)))
            step.narrow()
        residual.update = self.attention.forward(inputs, step, caches)
        inputs = self.ffn_hc.enter(residual)
        residual.update = self.feed_forward.forward(inputs, step)
        return True


def row_limits(layers: Sequence[FusedLayer], hidden: int) -> tuple[int, ...]:
    """Numbers of rows up to which experts and hyper-connections of these layers take one set of kernels."""
    of_experts = {limit for layer in layers for limit in layer.feed_forward.experts.row_limits()}
    return tuple(sorted(of_experts.union(DEFAULT_TILE.row_limits(hidden))))


class FusedV41:
    """The backbone with embedding, final collapse and head.

    Args:
        source: checkpoint, real or dummy.
        make_experts: how routed experts are stored and multiplied.
        place_engram: layer number -> where its n-gram table lies and how its rows are fetched.
        invariant: a row's result does not depend on the rest of the batch.
        is_fast: some products may round coarser than the model.
        on_layer: called after each layer is loaded, with the number of layers done.
    """

    def __init__(
        self,
        config: TextConfig,
        source: TensorSource,
        numerics: Numerics,
        device: torch.device,
        make_experts: MakeExperts,
        place_engram: Callable[[int], EngramPlacement],
        on_layer: Callable[[int], None] = lambda done: None,
        invariant: bool = False,
        is_fast: bool = False,
    ) -> None:
        self.invariant, self.is_fast = invariant, is_fast
        self.config, self.numerics, self.device = config, numerics, device
        self.ops = Ops({})  # which kernels run is not chosen operator by operator
        weights = PackedSource(source, device, invariant=invariant, is_fast=is_fast)
        self.embedding = weights.bf16("embed.weight")
        self.head = Bf16Linear(weights.bf16("head.weight"))
        self.norm = weights.bf16("norm.weight")
        self.layers: list[FusedLayer] = []
        experts = (config.n_routed_experts, config.num_experts_per_tok)
        for plan in config.layers:
            child = weights.child(f"layers.{plan.layer_id}")
            engram = None
            if plan.has_engram:
                engram = Engram(config, child, place_engram(plan.layer_id))
            self.layers.append(FusedLayer(config, plan, child, experts, make_experts, engram))
            on_layer(plan.layer_id + 1)

    def forward(self, step: FusedStep, caches: ModelCaches) -> tuple[Tensor, Tensor]:
        """Run all layers over the rows of a step.

        Returns:
            trunk ``[rows, M, hidden]`` and read mix ``[rows, M]`` behind the last layer, of the rows that reach it.
        """
        if step.ngram_ids is not None:
            for layer in self.layers:
                if layer.engram is not None:
                    layer.engram.begin(step.ngram_ids)
        residual = self.embed(step.ids)
        for layer in self.layers:
            if not layer.forward(residual, step, caches.layers):
                return residual.trunk, residual.read_mix
        flush(residual)
        return residual.trunk, residual.read_mix

    def embed(self, ids: Tensor) -> Residual:
        """First streams of token ids ``[rows]``: equal, of which the first is read."""
        return Residual(*first_streams(ids, self.embedding, self.config.hc_mult))

    def logits(self, trunk: Tensor, read_mix: Tensor) -> Tensor:
        """Logits ``[rows, vocab]`` in float32 for the given rows of :meth:`forward`'s result."""
        return self.vocabulary_product(self.head, collapse_head(trunk, read_mix, self.norm, self.config.rms_norm_eps))

    def vocabulary_product(self, weight: Bf16Linear, hidden: Tensor) -> Tensor:
        """Float32 ``[rows, vocab]`` of ``[rows, width]`` bf16 by a matrix that is as large as the vocabulary."""
        if not self.invariant:
            return weight.forward(hidden, dtype=torch.float32)
        # The library chooses its order of summation by the number of rows, so it always gets the same number.
        padded = functional.pad(hidden, (0, 0, 0, -len(hidden) % HEAD_ROWS))
        logits = torch.empty(len(padded), weight.num_outputs, device=hidden.device)
        for begin in range(0, len(padded), HEAD_ROWS):
            part = slice(begin, begin + HEAD_ROWS)
            weight.forward(padded[part], out=logits[part])
        return logits[: len(hidden)]
