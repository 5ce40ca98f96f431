"""The training forward of the backbone: the model of spec section 4 on a batch of equally long sequences.

The same model as :mod:`deepinfer.reference` (a test compares their logits), arranged for a GPU: all sequences start at
position 0, there are no images, and every expert runs on every row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from deepinfer.config.engram_hashing import engram_multipliers, engram_primes
from deepinfer.config.layer_plan import IndexMode, LayerPlan
from deepinfer.config.model import ModelConfig
from deepinfer.reference.rope import layer_frequencies
from tools.tiny import attention as attn
from tools.tiny import blocks
from tools.tiny.parameters import StackedParameters
from tools.tiny.selection import IndexLesson, IndexLessons, attention_mass, block_mask, top_mask, visible_mask
from tools.tiny.sinkhorn import sinkhorn

Weights = Mapping[str, list[Tensor] | Tensor]

CANDIDATE_SHARE = 0.5
"""Weight of later layers' attention mass in the lesson of the candidate source, whose blocks have to serve them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """What a forward pass does beside the plain model."""

    dense: bool = False
    """Attend every visible entry instead of the selected ones: the warm-up of training."""
    quantise: bool = True
    """Round activations and cache records."""
    window_only: bool = False
    random_selection: bool = False
    no_engram: bool = False


@dataclass(slots=True)
class Result:
    """What comes out of a forward pass."""

    hidden: Tensor
    """``[B * T, d]`` before the last norm."""
    loads: Tensor
    """``[layers, E]``: rows that chose each expert."""
    features: list[Tensor]
    """Draft features ``[B * T, d]`` of each target layer."""
    lessons: IndexLessons | None


@dataclass(slots=True)
class _Streams:
    """Entries, index keys and masks by source layer."""

    entries: dict[int, Tensor] = field(default_factory=dict)
    latents: dict[int, Tensor] = field(default_factory=dict)
    index_keys: dict[int, Tensor] = field(default_factory=dict)
    masks: dict[int, Tensor] = field(default_factory=dict)
    blocks: Tensor | None = None


class Backbone:
    """Holds what depends on the configuration and the device; the weights come with every call."""

    def __init__(self, config: ModelConfig, stacks: StackedParameters, token_map: Sequence[int], device: str) -> None:
        self.config, self.text = config, config.text
        self.device = torch.device(device)
        self._owners = {key: stack.owners for key, stack in stacks.stacks.items()}
        self._token_map = torch.as_tensor(token_map, dtype=torch.int64, device=device)
        self._tables: dict[tuple[int, int, int, int], tuple[Tensor, Tensor]] = {}
        self._hashes = {layer: self._hash_constants(layer) for layer in self.text.engram_layer_ids}

    def _hash_constants(self, layer: int) -> tuple[Tensor, Tensor]:
        text = self.text
        num_compressed = text.engram_compressed_vocab_size or text.vocab_size
        multipliers = engram_multipliers(layer, text.engram_max_ngram_size, num_compressed)
        primes = engram_primes(
            len(text.engram_layer_ids), text.engram_max_ngram_size, text.engram_n_heads, text.engram_vocab_size
        )[text.engram_layer_ids.index(layer)]
        return torch.tensor(multipliers, device=self.device), torch.tensor(primes, device=self.device)

    def weight(self, weights: Weights, key: str, layer: int) -> Tensor:
        """The tensor that ``layer`` owns of a stack."""
        stack = weights[key]
        assert isinstance(stack, list), f"{key} exists once"
        return stack[self._owners[key].index(layer)]

    def rope(self, ratio: int, step: int, length: int, batch: int) -> tuple[Tensor, Tensor]:
        """cos and sin ``[batch * length, pairs]`` of positions ``0, step, 2 step, ...``, table of ``ratio``."""
        key = (ratio, step, length, batch)
        if key not in self._tables:
            angles = (torch.arange(length).double() * step)[:, None] * layer_frequencies(self.text, ratio)
            tables = (angles.cos().float(), angles.sin().float())
            cos, sin = (table.to(self.device).repeat(batch, 1) for table in tables)
            self._tables[key] = (cos, sin)
        return self._tables[key]

    def forward(self, weights: Weights, ids: Tensor, mode: Mode, rows: Tensor | None = None) -> Result:
        """Run all layers.

        Args:
            weights: of :meth:`StackedParameters.rounded`.
            ids: ``[B, T]``; T is a multiple of the sliding window.
            rows: positions whose attention teaches the indexer; None: no lesson.
        """
        text = self.text
        embed = weights["embed.weight"]
        assert isinstance(embed, Tensor)
        trunk = torch.nn.functional.embedding(ids.flatten(), embed)[:, None].expand(-1, text.hc_mult, -1)
        read_mix = torch.eye(text.hc_mult, device=self.device)[0].expand(len(trunk), -1)
        streams, loads, features = _Streams(), [], []
        lessons = IndexLessons(rows) if rows is not None else None
        for layer in text.layers:
            number = layer.layer_id
            if layer.has_engram and not mode.no_engram:
                trunk = self._engram(weights, trunk, ids, number, mode)
            if layer.is_feature_target:
                features.append(trunk.float().mean(1).to(trunk.dtype))

            def attend(x: Tensor, layer: LayerPlan = layer) -> Tensor:
                return self._attention(weights, x, ids.shape, layer, streams, mode, lessons)

            def mix(x: Tensor, number: int = number) -> Tensor:
                output, load = self.experts(weights, "layers.", x, number, text.num_experts_per_tok, mode.quantise)
                loads.append(load)
                return output

            trunk, read_mix = self.sublayer(weights, "layers.", trunk, read_mix, number, "attn", attend)
            trunk, read_mix = self.sublayer(weights, "layers.", trunk, read_mix, number, "ffn", mix)
        return Result(blocks.collapse(trunk, read_mix), torch.stack(loads), features, lessons)

    def sublayer(self, weights, part, trunk, read_mix, number, kind, compute):  # type: ignore[no-untyped-def]
        """One hyper-connection around ``compute``; ``part`` is ``layers.`` or ``mtp.``."""
        text = self.text
        mixes = [self.weight(weights, f"{part}hc_{kind}_{name}", number) for name in ("fn", "scale", "base")]
        norm = self.weight(weights, f"{part}{kind}_norm.weight", number)
        x, next_mix, write_mix, logits = blocks.read_trunk(
            trunk, read_mix, *mixes, norm, text.rms_norm_eps, text.hc_eps
        )
        carry = sinkhorn(logits, text.hc_sinkhorn_iters, text.hc_eps)
        return blocks.write_trunk(trunk, compute(x), write_mix, carry), next_mix

    def experts(
        self, weights: Weights, part: str, x: Tensor, number: int, chosen: int, quantise: bool
    ) -> tuple[Tensor, Tensor]:
        """The mixture of one layer or draft stage."""
        text = self.text
        names = ("w1.weight", "w3.weight", "w2.weight")
        routed = tuple(self.weight(weights, f"{part}ffn.experts.{name}", number) for name in names)
        shared = tuple(self.weight(weights, f"{part}ffn.shared_experts.{name}", number) for name in names)
        gate = self.weight(weights, f"{part}ffn.gate.weight", number)
        bias = self.weight(weights, f"{part}ffn.gate.bias", number)
        factor, limit = text.routed_scaling_factor, text.swiglu_limit
        result: tuple[Tensor, Tensor] = blocks.experts(x, gate, bias, routed, shared, chosen, factor, limit, quantise)
        return result

    def _engram(self, weights: Weights, trunk: Tensor, ids: Tensor, number: int, mode: Mode) -> Tensor:
        text = self.text
        table = weights[f"layers.{number}.engram.embed.weight"]
        assert isinstance(table, Tensor)
        padding = int(self._token_map[text.engram_pad_token_id])
        rows = blocks.ngram_rows(self._token_map[ids], padding, *self._hashes[number], text.engram_n_heads)
        names = ("wkv.weight", "q_weight", "k_weight")
        parts = [self.weight(weights, f"layers.engram.{name}", number) for name in names]
        fetched = torch.nn.functional.embedding(rows, table)
        result: Tensor = blocks.engram(trunk, fetched, *parts, text.rms_norm_eps, mode.quantise)
        return result

    def _attention(
        self,
        weights: Weights,
        x: Tensor,
        shape: tuple[int, ...],
        layer: LayerPlan,
        streams: _Streams,
        mode: Mode,
        lessons: IndexLessons | None,
    ) -> Tensor:
        text, number = self.text, layer.layer_id
        batch, length = shape
        cos, sin = self.rope(layer.ratio, 1, length, batch)

        def own(name: str) -> Tensor:
            return self.weight(weights, f"layers.attn.{name}", number)

        projections = (own("wq_a.weight"), own("wq_b.weight"), own("wkv.weight"))
        norms = (own("q_norm.weight"), own("kv_norm.weight"))
        queries, keys, latent = attn.project(
            x, projections, norms, cos, sin, text.num_attention_heads, text.rms_norm_eps, mode.quantise
        )
        queries, keys = queries.unflatten(0, shape), keys.unflatten(0, shape)
        entries = mask = None
        if layer.ratio and not mode.window_only:
            assert layer.kv_source is not None
            assert layer.index_source is not None
            self._publish(weights, x, shape, layer, streams, mode)
            if layer.owns_indexer:
                self._select(weights, x, latent, shape, layer, streams, mode, lessons)
            entries, mask = streams.entries[layer.kv_source], streams.masks[layer.index_source]
        band = attn.banded_mask(length // text.sliding_window, text.sliding_window, self.device)
        context, local_sum = attn.attend(queries, keys, entries, mask, own("attn_sink"), band)
        if lessons is not None and entries is not None:
            self._teach(queries, entries, local_sum, layer, lessons)
        output: Tensor = attn.project_output(
            context.flatten(0, 1), own("wo_a.weight"), own("wo_b.weight"), cos, sin, text.o_groups, mode.quantise
        )
        return output

    def _publish(
        self, weights: Weights, x: Tensor, shape: tuple[int, ...], layer: LayerPlan, streams: _Streams, mode: Mode
    ) -> None:
        """Entries of a KV source, ``[B, n, D]``."""
        if not layer.owns_kv:
            return
        number, ratio, (batch, length) = layer.layer_id, layer.ratio, shape
        name = "layers.attn.compressor."
        gate = self.weight(weights, f"{name}wgate.weight", number) if ratio == 2 else None
        wkv, norm = (self.weight(weights, f"{name}{part}.weight", number) for part in ("wkv", "norm"))
        latent = attn.compress(x, wkv, gate, norm, self.text.rms_norm_eps)
        cos, sin = self.rope(ratio, ratio, length // ratio, batch)
        streams.entries[number] = attn.make_entries(latent, cos, sin, mode.quantise).unflatten(0, (batch, -1))
        streams.latents[number] = latent.detach()

    def _select(
        self,
        weights: Weights,
        x: Tensor,
        latent: Tensor,
        shape: tuple[int, ...],
        layer: LayerPlan,
        streams: _Streams,
        mode: Mode,
        lessons: IndexLessons | None,
    ) -> None:
        """Mask of an index source, and the scores that its lesson needs. The indexer's inputs carry no gradient."""
        text, number, (batch, length) = self.text, layer.layer_id, shape
        source = layer.index_k_source
        assert source is not None

        def own(name: str, owner: int = number) -> Tensor:
            return self.weight(weights, f"layers.attn.indexer.{name}", owner)

        if layer.owns_index_keys:
            cos, sin = self.rope(layer.ratio, layer.ratio, length // layer.ratio, batch)
            streams.index_keys[number] = attn.make_index_keys(
                streams.latents[number], own("wk.weight"), own("k_norm.weight"), cos, sin, text.rms_norm_eps,
                mode.quantise,
            ).unflatten(0, (batch, -1))  # fmt: skip
        keys = streams.index_keys[source]
        cos, sin = self.rope(layer.ratio, 1, length, batch)
        queries, head_weights = attn.make_index_queries(
            latent.detach(), x.detach(), own("wq_b.weight"), own("weights_proj.weight"), cos, sin, text.index_n_heads,
            mode.quantise,
        )  # fmt: skip
        queries, head_weights = queries.unflatten(0, shape), head_weights.unflatten(0, shape)
        visible = visible_mask(length, keys.shape[1], layer.ratio, self.device)
        with torch.no_grad():
            streams.masks[number] = self._mask(queries, head_weights, keys, visible, layer, streams, mode)
        if lessons is not None:
            rows = lessons.rows
            scores = attn.index_scores(queries[:, rows], head_weights[:, rows], keys)
            lessons.by_source[number] = IndexLesson(scores, visible[rows], torch.zeros_like(scores))

    def _mask(
        self,
        queries: Tensor,
        head_weights: Tensor,
        keys: Tensor,
        visible: Tensor,
        layer: LayerPlan,
        streams: _Streams,
        mode: Mode,
    ) -> Tensor:
        text = self.text
        if mode.dense:
            return visible.expand(len(queries), -1, -1).contiguous()  # one layout: nothing is recompiled
        scores = attn.index_scores(queries, head_weights, keys)
        if mode.random_selection:
            scores = torch.rand_like(scores)
        allowed = visible
        if layer.mode is IndexMode.REINDEX:
            assert streams.blocks is not None
            allowed = visible & streams.blocks
        if layer.is_candidate_source:
            streams.blocks = block_mask(scores, visible, text.candidate_block_size, text.candidate_topk_blocks)
        return top_mask(scores, allowed.expand_as(scores), text.index_topk)

    def _teach(
        self, queries: Tensor, entries: Tensor, local_sum: Tensor, layer: LayerPlan, lessons: IndexLessons
    ) -> None:
        """Add this layer's attention mass to the lessons of its selection source and of the candidate source."""
        text, rows = self.text, lessons.rows
        assert layer.index_source is not None
        visible = visible_mask(queries.shape[1], entries.shape[1], layer.ratio, self.device)[rows]
        with torch.no_grad():
            mass = attention_mass(queries[:, rows].detach(), entries.detach(), local_sum[:, rows], visible)
        lessons.add_mass(layer.index_source, mass)
        candidate = text.candidate_source_layer_id
        if candidate is not None and layer.index_source > candidate:
            lessons.add_mass(candidate, mass, CANDIDATE_SHARE)
