"""DSpark, the speculative draft: a block of tokens in one pass over the backbone's features (spec 7)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from deepinfer.config.layer_plan import IndexMode, LayerPlan
from deepinfer.layers.caches import ModelCaches
from deepinfer.layers.step_state import Angles, StepState
from deepinfer.layers.weights import TensorSource, WeightSource
from deepinfer.models.decoder_layer import DecoderLayer
from deepinfer.models.deepseek_v41 import DeepseekV41
from deepinfer.ops.step_views import RingView

ChooseToken = Callable[[Tensor, int], Tensor]
"""(logits ``[requests, vocab]`` float32, slot) -> token ids ``[requests]``."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """Drafts of a step, one row per request."""

    token_ids: Tensor
    """``[requests, block]`` int64; slot ``s`` stands ``s + 1`` positions behind the newest token."""
    confidence_logits: Tensor
    """``[requests, block]`` float32, before calibration: the sigmoid estimates that a slot is accepted, given that all
    before it were."""
    logits: Tensor | None
    """``[requests, block, vocab]`` float32, for samplers that need the draft's distribution."""


class DraftModel(Protocol):
    """What the drafter asks of a draft."""

    def propose(
        self,
        newest: Tensor,
        block: int,
        window: RingView,
        angles: Angles,
        caches: ModelCaches,
        choose: ChooseToken,
        keep_logits: bool = False,
    ) -> Proposal:
        """Draft ``block`` tokens for every request; see :meth:`DSpark.propose`."""
        ...


class DSpark:
    """The ``mtp.*`` stages. Embedding and head are the backbone's.

    Keys of the context come from the backbone's features, not from running the stages over the context; the rows of a
    block see all of it and one another, in both directions.
    """

    def __init__(self, backbone: DeepseekV41, source: TensorSource) -> None:
        config, ops = backbone.config, backbone.ops
        self.config, self.ops, self.backbone = config, ops, backbone
        self.quantize = backbone.numerics.quantize
        weights = WeightSource(source, backbone.device)
        stages = [weights.child(f"mtp.{stage}") for stage in range(config.num_nextn_predict_layers)]
        experts = (config.dspark_n_routed_experts, config.dspark_num_experts_per_tok)
        self.layers = [
            DecoderLayer(
                config,
                LayerPlan(layer_id=stage, ratio=0, mode=IndexMode.NONE),
                child,
                ops,
                backbone.numerics,
                experts,
                f"mtp.{stage}",
            )
            for stage, child in enumerate(stages)
        ]
        self.feature_projection = stages[0].wide("main_proj.weight")
        self.feature_norm = stages[0].wide("main_norm.weight")
        self.context_keys = [child.wide("attn.wkv.weight") for child in stages]
        last = stages[-1]
        self.norm = last.wide("norm.weight")
        self.markov_embedding = last.stored("markov_head.embed.weight")
        self.markov_head = last.wide("markov_head.head.weight")
        self.confidence_head = last.wide("confidence_head.proj.weight").flatten()

    def remember(self, state: StepState, caches: ModelCaches) -> None:
        """Write the context keys of every row of a backbone step into the draft's rings.

        Rows that verification rejects later are written too: their positions are written again before they are read.
        """
        state = state.tail
        rows = state.window.store_rows
        if rows.shape[0] == 0:
            return  # no row of the step went as far as the target layers
        assert state.features is not None
        features = torch.cat([feature[rows] for feature in state.features], dim=-1)
        context = self.ops.linear(features, self.feature_projection, self.quantize)
        context = self.ops.rms_norm(context, self.feature_norm, self.config.rms_norm_eps)
        cosines, sines = state.plain_angles
        for layer, weight, cache in zip(self.layers, self.context_keys, caches.draft, strict=True):
            key = self.ops.linear(context, weight, self.quantize)
            key = self.ops.rms_norm(key, layer.attention.key_norm, self.config.rms_norm_eps)
            key = self.ops.rotate(key, cosines[rows], sines[rows])
            cache.window.write(state.window.store_slots, cache.window.format.encode(key))

    def propose(
        self,
        newest: Tensor,
        block: int,
        window: RingView,
        angles: Angles,
        caches: ModelCaches,
        choose: ChooseToken,
        keep_logits: bool = False,
    ) -> Proposal:
        """Draft ``block`` tokens for every request.

        Args:
            newest: ``[requests]``, sampled but not yet computed by the backbone.
            window: keys that each row of the blocks ``[requests * block]`` sees; nothing is stored.
            angles: rotation at the rows' positions.
            choose: samples one slot; called slot after slot, because each token depends on the one before it.
            keep_logits: return the processed-from logits too.
        """
        requests = newest.shape[0]
        ids = torch.full((requests, block), self.config.dspark_noise_token_id, device=newest.device)
        ids[:, 0] = newest
        state = StepState(
            ids=ids.flatten(),
            ngram_ids=ids.new_empty((0, 0)),
            window=window,
            streams={},
            plain_angles=angles,
            compressed_angles=angles,
            entry_angles={},
        )
        trunk, read_mix = self.backbone.embed(state.ids)
        for layer in self.layers:
            trunk, read_mix = layer.forward(trunk, read_mix, state, caches.draft)
        hidden = self.ops.hc_read(trunk, read_mix)
        base = self.ops.rms_norm(hidden, self.norm, self.config.rms_norm_eps)
        base = self.ops.linear(base, self.backbone.head, False, torch.float32).unflatten(0, (requests, block))
        return self._choose_tokens(newest, hidden.unflatten(0, (requests, block)), base, choose, keep_logits)

    def _choose_tokens(
        self, newest: Tensor, hidden: Tensor, base: Tensor, choose: ChooseToken, keep_logits: bool
    ) -> Proposal:
        """The heads, slot after slot (spec 7.4): each slot's logits and confidence know the token before it."""
        width = hidden.shape[-1]
        by_hidden = hidden.double() @ self.confidence_head[:width]  # [requests, block]
        previous, tokens, confidences, logits = newest, [], [], []
        for slot in range(base.shape[1]):
            markov = functional.embedding(previous, self.markov_embedding)
            slot_logits = base[:, slot] + self.ops.linear(markov, self.markov_head, False, torch.float32)
            confidences.append(by_hidden[:, slot] + markov.double() @ self.confidence_head[width:])
            previous = choose(slot_logits, slot)
            tokens.append(previous)
            if keep_logits:
                logits.append(slot_logits)
        return Proposal(
            torch.stack(tokens, dim=1),
            torch.stack(confidences, dim=1).float(),
            torch.stack(logits, dim=1) if keep_logits else None,
        )
