"""DSpark, the speculative draft: context from the backbone's features, one block at a time, sequential heads (spec 7).

The draft is written for many blocks at once, each behind its own anchor: drafting uses one, training many.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.errors import ConfigError
from deepinfer.reference.attention import (
    attend,
    project_output,
    project_queries,
    project_window_keys,
    rotate_back,
)
from deepinfer.reference.building_blocks import linear
from deepinfer.reference.hyper_connection import collapse, sublayer
from deepinfer.reference.moe import mixture_of_experts
from deepinfer.reference.number_formats import bf16, q8
from deepinfer.reference.parameters import Parameters
from deepinfer.reference.rope import layer_frequencies
from deepinfer.reference.setting import Setting
from deepinfer.reference.trace import Recorder


@dataclass(frozen=True, slots=True)
class Draft:
    """Proposed continuation of one sequence."""

    token_ids: list[int]
    """``n`` tokens; slot s stands s + 1 positions behind the newest token."""
    logits: Tensor
    """``[n, vocab]``, Markov term included."""
    confidence: Tensor
    """``[n]``: estimated probability that a slot is accepted, given that those before it were."""


class DraftModel:
    """The ``mtp.*`` part of a model. ``parameters`` has no prefix: embedding and head are the backbone's."""

    def __init__(self, parameters: Parameters, setting: Setting) -> None:
        text = setting.text
        if text.num_nextn_predict_layers == 0:
            raise ConfigError("num_nextn_predict_layers is 0", why="there is no draft", fix="use a checkpoint with one")
        if not text.hc_shifted:
            raise ConfigError(
                "hc_shifted is False", why="the draft is defined for shifted reads only", fix="do not draft"
            )
        self._parameters = parameters
        self._setting = setting
        self._stages = [parameters.scope(f"mtp.{stage}") for stage in range(text.num_nextn_predict_layers)]
        self._frequencies = layer_frequencies(text, 0)

    def context(self, features: Tensor) -> Tensor:
        """Features of every token, concatenated over target layers ``[T, F * d]`` -> context vectors ``[T, d]``."""
        roundings, first = self._setting.roundings, self._stages[0]
        projected = linear(q8(features, roundings.q8_draft_features), first["main_proj.weight"])
        return self._setting.norm(bf16(projected, roundings.bf16_draft_context), first["main_norm.weight"])

    def hidden(self, context: Tensor, anchors: Tensor, newest: Tensor, record: Recorder | None = None) -> Tensor:
        """One pass over a block behind every anchor.

        Args:
            context: ``[T, d]`` of :meth:`context`.
            anchors: ``[B]`` position ``a`` of the last token whose features count for the block.
            newest: ``[B]`` id of the token at ``a + 1``; the other rows of the block hold the noise token.
        Returns:
            ``[B, n, d]``, before the draft's last norm.
        """
        text, setting = self._setting.text, self._setting
        record = record or Recorder(None)
        size = text.dspark_block_size
        noise = torch.full((len(anchors), size - 1), text.dspark_noise_token_id)
        token_ids = torch.cat((newest[:, None], noise), 1).flatten()
        positions = (anchors[:, None] + 1 + torch.arange(size)).flatten()  # [rows]
        embedded = bf16(self._parameters["embed.weight"][token_ids], setting.roundings.bf16_embedding)
        trunk = embedded[:, None].expand(-1, text.hc_mult, -1)
        read_mix = torch.eye(text.hc_mult, dtype=trunk.dtype)[0].expand(len(trunk), -1)
        visible = self._visible(len(context), anchors)

        for number, stage in enumerate(self._stages):

            def attend_block(x: Tensor, stage: Parameters = stage) -> Tensor:
                return self._attention(x, context, positions, visible, stage.scope("attn"))

            scope = record.scope(f"mtp.{number}")

            def mix_experts(x: Tensor, stage: Parameters = stage, scope: Recorder = scope) -> Tensor:
                chosen = text.dspark_num_experts_per_tok
                return mixture_of_experts(x, None, chosen, stage.scope("ffn"), setting, scope.scope("ffn"))

            trunk, read_mix = sublayer(trunk, read_mix, stage, "attn", attend_block, setting)
            trunk, read_mix = sublayer(trunk, read_mix, stage, "ffn", mix_experts, setting)
            scope("trunk", trunk)
            scope("read_mix", read_mix)
        hidden = bf16(collapse(trunk, read_mix), setting.roundings.bf16_hidden)
        return hidden.unflatten(0, (len(anchors), size))

    def _visible(self, num_context: int, anchors: Tensor) -> Tensor:
        """``[rows, context + rows]``: a window of context up to the anchor, and all of the row's own block."""
        size, window = self._setting.text.dspark_block_size, self._setting.text.sliding_window
        anchor = anchors.repeat_interleave(size)[:, None]
        block = torch.arange(len(anchors)).repeat_interleave(size)
        token = torch.arange(num_context)
        return torch.cat(((token <= anchor) & (token > anchor - window), block[:, None] == block), 1)

    def _attention(
        self, x: Tensor, context: Tensor, positions: Tensor, visible: Tensor, parameters: Parameters
    ) -> Tensor:
        """``[rows, d]``: queries and block keys from the rows, context keys from the backbone's features."""
        setting, frequencies = self._setting, self._frequencies
        _, queries = project_queries(x, positions, frequencies, parameters, setting)
        context_positions = torch.arange(len(context))
        context_keys = project_window_keys(context, context_positions, frequencies, parameters, setting)
        block_keys = project_window_keys(x, positions, frequencies, parameters, setting)
        attended, _ = attend(queries, torch.cat((context_keys, block_keys)), visible, parameters["attn_sink"])
        return project_output(rotate_back(attended, positions, frequencies, setting), parameters, setting)

    def base_logits(self, hidden: Tensor) -> Tensor:
        """``[..., d]`` -> ``[..., vocab]``, without the Markov term."""
        return linear(self._setting.norm(hidden, self._stages[-1]["norm.weight"]), self._parameters["head.weight"])

    def markov_logits(self, previous: Tensor) -> Tensor:
        """What the previous token ``[...]`` adds to the logits: ``[..., vocab]``."""
        last = self._stages[-1]
        return linear(last["markov_head.embed.weight"][previous], last["markov_head.head.weight"])

    def confidence(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """``[..., d]`` before the last norm, and previous tokens ``[...]`` -> probability of acceptance ``[...]``."""
        last = self._stages[-1]
        joined = torch.cat((hidden, last["markov_head.embed.weight"][previous]), -1)
        return torch.sigmoid(linear(joined, last["confidence_head.proj.weight"])[..., 0].clamp(-60, 60))

    def propose(self, hidden: Tensor, newest: int, noise: Tensor | None = None, temperature: float = 1.0) -> Draft:
        """Choose the tokens of one block one after the other, each knowing the one before it.

        Args:
            hidden: ``[n, d]`` of one block.
            newest: the token in front of slot 0.
            noise: ``[n, vocab]`` added to the log-probabilities before the argmax; None: greedy.
            temperature: divides the logits when there is noise.
        """
        base = self.base_logits(hidden)
        previous, token_ids, logits, confidence = newest, [], [], []
        for slot in range(len(hidden)):
            before = torch.tensor(previous)
            slot_logits = base[slot] + self.markov_logits(before)
            confidence.append(self.confidence(hidden[slot], before))
            scores = slot_logits
            if noise is not None:
                scores = torch.log_softmax(slot_logits / temperature, -1) + noise[slot]
            previous = int(scores.argmax())
            token_ids.append(previous)
            logits.append(slot_logits)
        return Draft(token_ids, torch.stack(logits), torch.stack(confidence))
