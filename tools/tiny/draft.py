"""The training forward of the DSpark draft: blocks behind many anchors at once (spec 7)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tools.tiny import attention as attn
from tools.tiny import blocks
from tools.tiny.backbone import Backbone, Weights
from tools.tiny.fake_quant import q8
from tools.tiny.fused import fused
from tools.tiny.loss import logits_of


@fused
def context_vectors(features: Tensor, proj: Tensor, norm: Tensor, eps: float, quantise: bool) -> Tensor:
    """Concatenated features ``[N, F * d]`` -> ``[N, d]`` (spec 7.2)."""
    return blocks.rms((q8(features) if quantise else features) @ proj.T, norm, eps)


@fused
def attend_block(queries: Tensor, context: Tensor, own: Tensor, present: Tensor, sink: Tensor) -> Tensor:
    """Every row of a block sees its context window and the whole block.

    Args:
        queries: ``[B, A, S, H, D]``; context ``[B, A, W, D]``; own ``[B, A, S, D]``.
        present: ``[B, A, W]``: context positions before the start of the sequence are absent.
    """
    batch, anchors, size, heads, width = queries.shape
    keys = torch.cat((context, own), 2).flatten(0, 1)
    logits = (queries.reshape(batch * anchors, size * heads, width) @ keys.transpose(1, 2)).float() * width**-0.5
    seen = torch.cat((present, present.new_ones(batch, anchors, size)), 2)
    logits = logits.view(batch, anchors, size, heads, -1).masked_fill(~seen[:, :, None, None], attn.HIDDEN)
    sinks = sink.float().expand(batch, anchors, size, heads)[..., None]
    weights = torch.softmax(torch.cat((logits, sinks), -1), -1)[..., :-1].to(keys.dtype)
    return (weights.view(batch * anchors, size * heads, -1) @ keys).view(queries.shape)


@dataclass(frozen=True, slots=True)
class Slots:
    """Everything that the heads say about the slots of all blocks, ``[B, A, S, ...]``."""

    logits: Tensor
    confidence_logits: Tensor


class DraftTrainer:
    """The draft's forward. Shares embedding, head and constants with the backbone."""

    def __init__(self, backbone: Backbone) -> None:
        self.backbone, self.text = backbone, backbone.text
        self._last = self.text.num_nextn_predict_layers - 1

    def hidden(
        self, weights: Weights, features: list[Tensor], ids: Tensor, anchors: Tensor, quantise: bool
    ) -> tuple[Tensor, Tensor]:
        """``[B, A, S, d]`` before the draft's last norm, and how many rows chose each expert ``[stages, E]``.

        Args:
            features: per target layer ``[B * T, d]``.
            ids: ``[B, T]``; the newest token of the block behind anchor ``a`` is the one at ``a + 1``.
            anchors: ``[B, A]`` positions.
        """
        text, backbone = self.text, self.backbone
        size, (batch, length) = text.dspark_block_size, ids.shape
        proj, norm = (backbone.weight(weights, f"mtp.main_{name}.weight", 0) for name in ("proj", "norm"))
        context = context_vectors(torch.cat(features, -1), proj, norm, text.rms_norm_eps, quantise)
        token_ids = ids.new_full((*anchors.shape, size), text.dspark_noise_token_id)
        token_ids[..., 0] = ids.gather(1, anchors + 1)
        embed = weights["embed.weight"]
        assert isinstance(embed, Tensor)
        trunk = F.embedding(token_ids.flatten(), embed)[:, None].expand(-1, text.hc_mult, -1)
        read_mix = torch.eye(text.hc_mult, device=trunk.device)[0].expand(len(trunk), -1)
        shape, loads = (batch, anchors.shape[1], size), []
        for stage in range(text.num_nextn_predict_layers):

            def attend(x: Tensor, stage: int = stage) -> Tensor:
                return self._attention(
                    weights, x, context.unflatten(0, (batch, length)), anchors, shape, stage, quantise
                )

            def mix(x: Tensor, stage: int = stage) -> Tensor:
                chosen = text.dspark_num_experts_per_tok
                output, load = backbone.experts(weights, "mtp.", x, stage, chosen, quantise)
                loads.append(load)
                return output

            trunk, read_mix = backbone.sublayer(weights, "mtp.", trunk, read_mix, stage, "attn", attend)
            trunk, read_mix = backbone.sublayer(weights, "mtp.", trunk, read_mix, stage, "ffn", mix)
        collapsed: Tensor = blocks.collapse(trunk, read_mix)
        return collapsed.unflatten(0, shape), torch.stack(loads)

    def _attention(
        self,
        weights: Weights,
        x: Tensor,
        context: Tensor,
        anchors: Tensor,
        shape: tuple[int, int, int],
        stage: int,
        quantise: bool,
    ) -> Tensor:
        text, backbone = self.text, self.backbone
        (batch, _, size), length = shape, context.shape[1]
        eps, window = text.rms_norm_eps, text.sliding_window

        def own(name: str) -> Tensor:
            return backbone.weight(weights, f"mtp.attn.{name}", stage)

        cos_all, sin_all = backbone.rope(0, 1, length + size + 1, 1)
        positions = anchors[..., None] + 1 + torch.arange(size, device=anchors.device)
        cos, sin = (table[positions.flatten()] for table in (cos_all, sin_all))
        projections = (own("wq_a.weight"), own("wq_b.weight"), own("wkv.weight"))
        norms = (own("q_norm.weight"), own("kv_norm.weight"))
        queries, keys, _ = attn.project(x, projections, norms, cos, sin, text.num_attention_heads, eps, quantise)
        context_cos, context_sin = (table[:length].repeat(batch, 1) for table in (cos_all, sin_all))
        past = attn.window_key(
            context.flatten(0, 1), own("wkv.weight"), own("kv_norm.weight"), context_cos, context_sin, eps, quantise
        ).unflatten(0, (batch, length))
        reach = anchors[..., None] - torch.arange(window - 1, -1, -1, device=anchors.device)  # [B, A, W]
        sequence = torch.arange(batch, device=anchors.device)[:, None, None]
        gathered = past[sequence, reach.clamp(min=0)]
        attended = attend_block(
            queries.unflatten(0, shape), gathered, keys.unflatten(0, shape), reach >= 0, own("attn_sink")
        ).flatten(0, 2)
        output: Tensor = attn.project_output(
            attended, own("wo_a.weight"), own("wo_b.weight"), cos, sin, text.o_groups, quantise
        )
        return output

    def base_logits(self, weights: Weights, hidden: Tensor) -> Tensor:
        """``[..., d]`` -> float32 ``[..., vocab]`` without the Markov term."""
        norm = self.backbone.weight(weights, "mtp.norm.weight", self._last)
        logits: Tensor = logits_of(hidden.flatten(0, -2), norm, weights["head.weight"], self.text.rms_norm_eps)
        return logits.unflatten(0, hidden.shape[:-1])

    def markov(self, weights: Weights, previous: Tensor) -> tuple[Tensor, Tensor]:
        """Embedding of the previous token ``[..., rank]`` and what it adds to the logits ``[..., vocab]``."""
        embed = self.backbone.weight(weights, "mtp.markov_head.embed.weight", self._last)
        head = self.backbone.weight(weights, "mtp.markov_head.head.weight", self._last)
        vector = F.embedding(previous, embed)
        return vector, vector.float() @ head.float().T

    def confidence(self, weights: Weights, hidden: Tensor, vector: Tensor) -> Tensor:
        """Logit of the probability that a slot is accepted, ``[...]``."""
        proj = self.backbone.weight(weights, "mtp.confidence_head.proj.weight", self._last)
        return (torch.cat((hidden, vector), -1).float() @ proj.float().T)[..., 0]

    def slots(self, weights: Weights, hidden: Tensor, previous: Tensor) -> Slots:
        """Heads with given previous tokens ``[B, A, S]``: those in the text, for training."""
        vector, added = self.markov(weights, previous)
        return Slots(self.base_logits(weights, hidden) + added, self.confidence(weights, hidden, vector))

    def propose(self, weights: Weights, hidden: Tensor, newest: Tensor) -> tuple[Tensor, Tensor]:
        """Greedy drafts ``[B, A, S]`` and confidence logits, each slot knowing the draft before it."""
        base = self.base_logits(weights, hidden)
        previous, drafts, confidence = newest, [], []
        for slot in range(hidden.shape[2]):
            vector, added = self.markov(weights, previous)
            confidence.append(self.confidence(weights, hidden[:, :, slot], vector))
            previous = (base[:, :, slot] + added).argmax(-1)
            drafts.append(previous)
        return torch.stack(drafts, -1), torch.stack(confidence, -1)
