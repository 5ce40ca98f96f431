"""One transformer layer with its hyper-connections: used by the backbone and by the draft's stages."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from deepinfer.config.layer_plan import LayerPlan
from deepinfer.config.model import TextConfig
from deepinfer.layers.attention import Attention
from deepinfer.layers.caches import LayerCaches
from deepinfer.layers.engram import Engram
from deepinfer.layers.hyper_connection import HyperConnection
from deepinfer.layers.moe import MoE
from deepinfer.layers.step_state import StepState
from deepinfer.layers.weights import WeightSource
from deepinfer.ops.numerics import Numerics
from deepinfer.ops.registry import Ops


class DecoderLayer:
    """Optional Engram, attention, experts, each inside its hyper-connection.

    Args:
        experts: (routed experts, experts per token).
        name: prefix of its trace entries, such as ``layers.3``.
    """

    def __init__(
        self,
        config: TextConfig,
        plan: LayerPlan,
        weights: WeightSource,
        ops: Ops,
        numerics: Numerics,
        experts: tuple[int, int],
        name: str,
        engram: Engram | None = None,
    ) -> None:
        self.plan = plan
        self.name = name
        self.engram = engram
        self.attention_hc = HyperConnection(config, "attn", weights, ops)
        self.ffn_hc = HyperConnection(config, "ffn", weights, ops)
        self.attention = Attention(config, plan, weights.child("attn"), ops, numerics)
        self.moe = MoE(
            *experts,
            config.routed_scaling_factor,
            config.swiglu_limit,
            weights.child("ffn"),
            ops,
            numerics,
        )

    def forward(
        self, trunk: Tensor, read_mix: Tensor, state: StepState, caches: Sequence[LayerCaches]
    ) -> tuple[Tensor, Tensor]:
        """``trunk`` ``[rows, M, hidden]`` and read mix ``[rows, M]`` to those of the next layer."""
        if self.engram is not None:
            trunk = self.engram.forward(trunk, state)

        def attend(x: Tensor) -> Tensor:
            state.record(f"{self.name}.attn.input", x)
            self.attention.publish(x, state, caches)
            return self.attention.forward(x, state, caches)

        trunk, read_mix = self.attention_hc.forward(trunk, read_mix, attend)
        return self._feed_forward(trunk, read_mix, state)

    def forward_cut(
        self, trunk: Tensor, read_mix: Tensor, state: StepState, caches: Sequence[LayerCaches]
    ) -> tuple[Tensor, Tensor]:
        """As :meth:`forward` at the first decoder layer of a step with ``state.decoder`` (spec 6.1).

        Entries and index keys are written for every row; attention and experts run on the kept rows.

        Returns:
            trunk ``[kept, M, hidden]`` and read mix ``[kept, M]``.
        """
        cut = state.decoder
        assert cut is not None
        assert self.engram is None, "n-gram layers lie before the cut"

        def publish(x: Tensor) -> None:
            state.record(f"{self.name}.attn.input", x)
            self.attention.publish(x, state, caches)

        def attend(x: Tensor) -> Tensor:
            return self.attention.forward(x, cut.state, caches)

        if cut.num_rows == 0:
            publish(self.attention_hc.input_of(trunk, read_mix))
            return trunk[:0], read_mix[:0]
        trunk, read_mix = self.attention_hc.forward_cut(trunk, read_mix, cut.rows, publish, attend)
        return self._feed_forward(trunk, read_mix, cut.state)

    def _feed_forward(self, trunk: Tensor, read_mix: Tensor, state: StepState) -> tuple[Tensor, Tensor]:
        name = self.name

        def feed_forward(x: Tensor) -> Tensor:
            state.record(f"{name}.ffn.input", x)
            return self.moe.forward(x, state, f"{name}.ffn")

        trunk, read_mix = self.ffn_hc.forward(trunk, read_mix, feed_forward)
        state.record(f"{name}.trunk", trunk)
        state.record(f"{name}.read_mix", read_mix)
        return trunk, read_mix
