"""DSpark on an NVIDIA GPU, with fused layers; :mod:`deepinfer.models.dspark` says what is computed (spec 7)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from deepinfer.config.layer_plan import IndexMode, LayerPlan
from deepinfer.kernels.attention.query_key import key_records, norm_rounded
from deepinfer.kernels.dense.linear import Fp8Linear
from deepinfer.kernels.dense.linear_triton import q8_round_
from deepinfer.kernels.hyper_connection.finish import collapse_head
from deepinfer.kernels.markov import markov_logits
from deepinfer.layers.caches import ModelCaches
from deepinfer.layers.fused.device_rows import DeviceRows
from deepinfer.layers.fused.draft_rows import draft_rows
from deepinfer.layers.fused.residual import flush
from deepinfer.layers.fused.step import FusedStep
from deepinfer.layers.fused.weights import PackedSource
from deepinfer.layers.step_state import Angles
from deepinfer.layers.weights import TensorSource
from deepinfer.models.dspark import ChooseToken, Proposal
from deepinfer.models.fused_v41 import FusedLayer, FusedV41, MakeExperts
from deepinfer.ops.step_views import RingView


class FusedDSpark:
    """The ``mtp.*`` stages. Embedding and head are the backbone's."""

    def __init__(self, backbone: FusedV41, source: TensorSource, make_experts: MakeExperts) -> None:
        config = backbone.config
        self.config, self.backbone = config, backbone
        weights = PackedSource(source, backbone.device, invariant=backbone.invariant, is_fast=backbone.is_fast)
        stages = [weights.child(f"mtp.{stage}") for stage in range(config.num_nextn_predict_layers)]
        experts = (config.dspark_n_routed_experts, config.dspark_num_experts_per_tok)
        self.layers = [
            FusedLayer(config, LayerPlan(layer_id=stage, ratio=0, mode=IndexMode.NONE), child, experts, make_experts)
            for stage, child in enumerate(stages)
        ]
        self.feature_projection = Fp8Linear(*stages[0].fp8("main_proj.weight"), is_fast=weights.is_fast)
        self.feature_norm = stages[0].bf16("main_norm.weight")
        self.context_keys = [Fp8Linear(*child.fp8("attn.wkv.weight"), is_fast=child.is_fast) for child in stages]
        last = stages[-1]
        self.norm = last.bf16("norm.weight")
        self.markov_embedding = last.bf16("markov_head.embed.weight")
        self.markov_head = last.bf16("markov_head.head.weight")
        self.confidence_head = last.fp32("confidence_head.proj.weight").flatten()

    def remember(self, features: list[Tensor], rows: DeviceRows, caches: ModelCaches) -> None:
        """Write the context keys of the rows of a backbone step into the draft's rings.

        Args:
            features: per target layer ``[rows, hidden]`` bf16.
        """
        joined, invariant = torch.cat(features, dim=-1), self.backbone.invariant
        rounds = self.feature_projection.can_quantize_input(len(joined), invariant=invariant)
        if not rounds:
            q8_round_(joined)
        projected = self.feature_projection.forward(joined, quantize_input=rounds, invariant=invariant)
        _, context = norm_rounded(projected, self.feature_norm, self.config.rms_norm_eps)
        cos, sin = rows.plain_angles
        for layer, product, cache in zip(self.layers, self.context_keys, caches.draft, strict=True):
            norm = layer.attention.key_norm
            key_records(
                product.forward(context, invariant=invariant),
                norm,
                self.config.rms_norm_eps,
                cos,
                sin,
                cache.window.data,
                rows.ring_slot,
            )

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
        """Draft ``block`` tokens for every request; arguments as for :meth:`deepinfer.models.dspark.DSpark.propose`."""
        return self.draft(newest, block, _rows_of(window, angles), caches, choose, keep_logits)

    def draft(
        self,
        newest: Tensor,
        block: int,
        rows: DeviceRows,
        caches: ModelCaches,
        choose: ChooseToken,
        keep_logits: bool = False,
    ) -> Proposal:
        """As :meth:`propose`, with rows that are laid out in fixed shapes. Launches only, as far as ``choose`` is.

        Args:
            newest: ``[requests]`` int64, in the vocabulary also where the rows are padding.
            rows: ``[requests * block]``, of :class:`~deepinfer.layers.fused.draft_rows.DraftExpander`.
        """
        requests = newest.shape[0]
        ids = torch.full((requests, block), self.config.dspark_noise_token_id, device=newest.device)
        ids[:, 0] = newest
        residual = self.backbone.embed(ids.flatten())
        step = FusedStep(rows, ids.flatten())
        for layer in self.layers:
            layer.forward(residual, step, caches.draft)
        flush(residual)
        hidden = residual.trunk.new_empty(len(ids.flatten()), residual.trunk.shape[-1])
        normed = collapse_head(residual.trunk, residual.read_mix, self.norm, self.config.rms_norm_eps, h=hidden)
        base = self.backbone.vocabulary_product(self.backbone.head, normed).unflatten(0, (requests, block))
        return self._choose_tokens(newest, hidden.unflatten(0, (requests, block)), base, choose, keep_logits)

    def _choose_tokens(
        self, newest: Tensor, hidden: Tensor, base: Tensor, choose: ChooseToken, keep_logits: bool
    ) -> Proposal:
        """The heads, slot after slot (spec 7.4): each slot's logits and confidence know the token before it."""
        previous, logits = [newest], []
        for slot in range(base.shape[1]):
            slot_logits = markov_logits(base[:, slot], previous[-1], self.markov_embedding, self.markov_head)
            previous.append(choose(slot_logits, slot))
            if keep_logits:
                logits.append(slot_logits)
        tokens = torch.stack(previous, dim=1)
        markov = functional.embedding(tokens[:, :-1], self.markov_embedding)
        features = torch.cat((hidden, markov), dim=-1)
        confidence = (features * self.confidence_head).sum(dim=-1)
        return Proposal(tokens[:, 1:], confidence, torch.stack(logits, dim=1) if keep_logits else None)


def _rows_of(window: RingView, angles: Angles) -> DeviceRows:
    """The rows of a layout that the host made."""
    count = window.index.shape[0]
    place = torch.cat((torch.arange(count, device=window.index.device), -2 - window.previous))
    index = torch.where(window.index < 0, -1, place[window.index.clamp_min(0)]).to(torch.int32)
    return draft_rows(torch.zeros(count, dtype=torch.int32, device=index.device), index, angles)
