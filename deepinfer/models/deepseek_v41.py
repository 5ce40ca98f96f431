"""DeepSeek-V4.1-Flash, text side: the layers wired together (spec 4.1)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from deepinfer.config.model import TextConfig
from deepinfer.layers.caches import ModelCaches
from deepinfer.layers.engram import Engram
from deepinfer.layers.step_state import StepState
from deepinfer.layers.weights import TensorSource, WeightSource
from deepinfer.models.decoder_layer import DecoderLayer
from deepinfer.ops.numerics import Numerics
from deepinfer.ops.registry import Ops


class DeepseekV41:
    """The backbone with embedding, final collapse and head.

    Args:
        source: checkpoint, real or dummy.
        token_map: ``[vocab]`` int64 compressed vocabulary, its size in ``num_compressed``.
        on_layer: called after each layer is loaded, with the number of layers done.
    """

    def __init__(
        self,
        config: TextConfig,
        source: TensorSource,
        ops: Ops,
        numerics: Numerics,
        token_map: Tensor,
        num_compressed: int,
        device: torch.device,
        on_layer: Callable[[int], None] = lambda done: None,
    ) -> None:
        self.config = config
        self.ops = ops
        self.numerics = numerics
        self.device = device
        weights = WeightSource(source, device)
        self.embedding = weights.stored("embed.weight")
        self.head = weights.wide("head.weight")
        self.norm = weights.wide("norm.weight")
        self.head_mix = None
        if not config.hc_shifted:
            self.head_mix = tuple(weights.wide(f"hc_head_{part}") for part in ("fn", "scale", "base"))
        self.layers: list[DecoderLayer] = []
        for plan in config.layers:
            child = weights.child(f"layers.{plan.layer_id}")
            engram = None
            if plan.has_engram:
                engram = Engram(config, plan.layer_id, child, ops, token_map.to(device), num_compressed)
            experts = (config.n_routed_experts, config.num_experts_per_tok)
            name = f"layers.{plan.layer_id}"
            self.layers.append(DecoderLayer(config, plan, child, ops, numerics, experts, name, engram))
            on_layer(plan.layer_id + 1)

    def forward(self, state: StepState, caches: ModelCaches) -> tuple[Tensor, Tensor]:
        """Run all layers over the rows of a step.

        Returns:
            trunk ``[rows, M, hidden]`` and read mix ``[rows, M]`` after the last layer, of the rows of ``state.tail``;
            see :meth:`logits`.
        """
        trunk, read_mix = self.embed(state.ids)
        for layer in self.layers:
            cut = state.decoder
            if cut is not None and cut.layer_id == layer.plan.layer_id:
                trunk, read_mix = layer.forward_cut(trunk, read_mix, state, caches.layers)
                cut.state.features, state = state.features, cut.state
                if cut.num_rows == 0:
                    break
                continue
            if layer.plan.is_feature_target and state.features is not None:
                state.features.append(trunk.double().mean(1).to(trunk.dtype))
            trunk, read_mix = layer.forward(trunk, read_mix, state, caches.layers)
        return trunk, read_mix

    def embed(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """First trunk ``[rows, M, hidden]`` of token ids ``[rows]``: equal streams, of which the first is read."""
        streams = self.config.hc_mult
        embedded = functional.embedding(ids, self.embedding).to(self.numerics.activation_dtype)
        trunk = embedded.unsqueeze(1).expand(-1, streams, -1).contiguous()
        read_mix = torch.zeros(trunk.shape[0], streams, dtype=torch.float64, device=self.device)
        read_mix[:, 0] = 1
        return trunk, read_mix

    def logits(self, trunk: Tensor, read_mix: Tensor) -> Tensor:
        """Logits ``[rows, vocab]`` in float32 for the given rows of :meth:`forward`'s result."""
        if self.head_mix is not None:
            read_mix = self._collapse_mix(trunk)
        hidden = self.ops.hc_read(trunk, read_mix)
        hidden = self.ops.rms_norm(hidden, self.norm, self.config.rms_norm_eps)
        return self.ops.linear(hidden, self.head, False, torch.float32)

    def _collapse_mix(self, trunk: Tensor) -> Tensor:
        """Read mix of the head in models without the shifted read (spec 4.2, last paragraph)."""
        assert self.head_mix is not None
        fn, scale, base = self.head_mix
        flat = trunk.double().flatten(1)
        inverse = torch.rsqrt(flat.square().mean(-1, keepdim=True) + self.config.rms_norm_eps)
        return torch.sigmoid(scale * (inverse * (flat @ fn.T)) + base) + self.config.hc_eps
