"""The whole model on one sequence: start reading here (spec 4.1)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepinfer.config.layer_plan import LayerPlan
from deepinfer.config.model import ModelConfig
from deepinfer.config.model_file import load_model_config
from deepinfer.errors import CheckpointFileError, ConfigError, RequestError
from deepinfer.reference.ablation import Ablation
from deepinfer.reference.attention import Published, Span, attention
from deepinfer.reference.building_blocks import linear
from deepinfer.reference.draft import Draft, DraftModel
from deepinfer.reference.engram import engram, engram_rows, ngram_contexts
from deepinfer.reference.hyper_connection import collapse, head_mix, sublayer
from deepinfer.reference.moe import mixture_of_experts
from deepinfer.reference.number_formats import bf16
from deepinfer.reference.parameters import Parameters, WeightMap
from deepinfer.reference.roundings import Roundings
from deepinfer.reference.setting import Setting
from deepinfer.reference.tensor_shapes import check_shapes
from deepinfer.reference.token_sequence import TokenSequence
from deepinfer.reference.trace import Recorder
from deepinfer.reference.vision import VisionTower
from deepinfer.reference.weights import load_weights


class ReferenceModel:
    """Logits of a sequence, recomputed from scratch at every call.

    Args:
        config: what ``config.json`` says.
        weights: float tensors by checkpoint name (no ``model.`` prefix, no scales). A trainer may pass parameters.
            Engram tables may be a :class:`~deepinfer.reference.parameters.RowTable`.
        token_map: compressed id of every token id, ``[vocab]`` integers (spec 4.10 a); None: the identity, for models
            without compression or without Engram.
        roundings: which values are rounded.
        dtype: of all arithmetic, float32 or float64.
        ablation: mechanisms to leave out.
    Raises:
        CheckpointError: a tensor is missing or has another shape than the configuration says.
        ConfigError: ``token_map`` does not fit the configuration.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightMap,
        token_map: Sequence[int] | Tensor | None,
        *,
        roundings: Roundings | None = None,
        dtype: torch.dtype = torch.float32,
        ablation: Ablation | None = None,
    ) -> None:
        check_shapes(config, weights)
        self.config = config
        self._weights = weights
        self.token_map = _checked_token_map(config, token_map)
        self._setting = Setting(config.text, roundings or Roundings.none(), ablation or Ablation())
        self._dtype = dtype
        self._parameters = Parameters(weights, dtype)

    @classmethod
    def from_checkpoint(
        cls,
        path: str | Path,
        *,
        roundings: Roundings | None = None,
        dtype: torch.dtype = torch.float32,
        token_map: Sequence[int] | Tensor | None = None,
        ablation: Ablation | None = None,
    ) -> ReferenceModel:
        """Read a checkpoint directory. Without ``token_map`` it is computed from the directory's tokenizer."""
        config = load_model_config(path)
        if token_map is None and config.text.engram_layer_ids and config.text.engram_compressed_vocab_size:
            token_map = _token_map_of(Path(path))
        return cls(config, load_weights(path), token_map, roundings=roundings, dtype=dtype, ablation=ablation)

    def replace(
        self,
        *,
        roundings: Roundings | None = None,
        dtype: torch.dtype | None = None,
        ablation: Ablation | None = None,
    ) -> ReferenceModel:
        """The same weights under another setting; what is not given stays."""
        return ReferenceModel(
            self.config,
            self._weights,
            self.token_map,
            roundings=roundings or self._setting.roundings,
            dtype=dtype or self._dtype,
            ablation=ablation or self._setting.ablation,
        )

    def forward(
        self,
        token_ids: Sequence[int] | Tensor,
        *,
        image_mask: Sequence[bool] | Tensor | None = None,
        image_embeddings: Tensor | None = None,
        decoder_keep: int | None = None,
        prefix_hit: int | None = None,
        trace: dict[str, Any] | None = None,
    ) -> Tensor:
        """Logits ``[T, vocab]``; row p is the distribution of the token at p + 1.

        Args:
            token_ids: ``[T]``, the whole sequence. Image positions may hold any id when ``image_embeddings`` is given.
            image_mask: ``[T]``, true on every position of an image span, delimiters included.
            image_embeddings: ``[image positions, d]``, in order; None: the embeddings of the ids.
            decoder_keep: decoder replay (6.1, mode mask): in decoder layers the windows of the last ``decoder_keep``
                rows reach no further back than these rows. Logits of earlier rows mean nothing then.
            prefix_hit: encoder replay (6.2) after a hit of so many tokens: rows begin at the first replayed token, a
                window before the hit, and entries of the hit are those of a run over the hit alone.
            trace: filled with intermediates under the names listed in ``docs/executable_specification.md``.
        Raises:
            RequestError: an argument that does not fit the others or the model.
        """
        tokens = TokenSequence.checked(self.config.text, token_ids, image_mask, image_embeddings)
        if decoder_keep is not None and decoder_keep < 1:
            raise RequestError("decoder_keep", decoder_keep, why="a row sees itself at least", fix="keep some tokens")
        floor = 0 if decoder_keep is None else max(len(tokens) - decoder_keep, 0)
        span = Span(len(tokens), decoder_floor=floor)
        if prefix_hit is not None:
            span = self._span_after_hit(tokens, prefix_hit, floor)
        logits, _ = self._run(tokens, span, Recorder(trace))
        return logits

    __call__ = forward

    def _span_after_hit(self, tokens: TokenSequence, hit: int, floor: int) -> Span:
        """Compute the entries of the first ``hit`` tokens, and say which rows run afterwards."""
        if not 0 < hit < len(tokens) or hit % 2:
            why = f"a hit is even and shorter than the {len(tokens)} tokens"
            raise RequestError("prefix_hit", hit, why=why, fix="choose another")
        _, prior = self._run(tokens.prefix(hit), Span(hit), Recorder(None))
        start = hit - min(hit, self.config.text.sliding_window)
        return Span(len(tokens), start=start, hit=hit, prior=prior, decoder_floor=floor)

    def _run(self, tokens: TokenSequence, span: Span, record: Recorder) -> tuple[Tensor, Published]:
        """The rows of ``span`` through all layers. ``tokens`` begin at position 0: n-grams reach back that far."""
        text, setting, weights = self.config.text, self._setting, self._parameters
        published = Published()
        embedded = bf16(tokens.embed(weights["embed.weight"]), setting.roundings.bf16_embedding)
        trunk = embedded[span.start :, None].expand(-1, text.hc_mult, -1)  # [T, M, d]: all streams start equal
        read_mix = torch.eye(text.hc_mult, dtype=self._dtype)[0].expand(len(trunk), -1)  # read stream 0 only
        for layer in text.layers:
            scope, recorder = weights.scope(f"layers.{layer.layer_id}"), record.scope(f"layers.{layer.layer_id}")
            if layer.has_engram and not setting.ablation.no_engram:
                trunk = self._engram(trunk, layer, tokens, span, scope, recorder)
            if layer.is_feature_target:
                record(f"features.{layer.layer_id}", bf16(trunk.mean(1), setting.roundings.bf16_feature))
            trunk, read_mix = self._layer(trunk, read_mix, layer, tokens, span, scope, published, recorder)
            recorder("trunk", trunk)
            recorder("read_mix", read_mix)
        if not text.hc_shifted:
            read_mix = head_mix(trunk, weights, setting)
        hidden = bf16(collapse(trunk, read_mix), setting.roundings.bf16_hidden)
        logits = linear(setting.norm(hidden, weights["norm.weight"]), weights["head.weight"])
        record("final.hidden", hidden)
        record("logits", logits)
        return logits, published

    def _layer(
        self,
        trunk: Tensor,
        read_mix: Tensor,
        layer: LayerPlan,
        tokens: TokenSequence,
        span: Span,
        scope: Parameters,
        published: Published,
        record: Recorder,
    ) -> tuple[Tensor, Tensor]:
        """Attention and mixture of experts of one layer, each wrapped in its hyper-connection."""
        setting = self._setting
        image_rows = tokens.image_mask[span.start :] if tokens.image_mask.any() else None

        def attend(x: Tensor) -> Tensor:
            return attention(x, layer, span, scope.scope("attn"), published, setting, record.scope("attn"))

        def mix_experts(x: Tensor) -> Tensor:
            chosen = setting.text.num_experts_per_tok
            return mixture_of_experts(x, image_rows, chosen, scope.scope("ffn"), setting, record.scope("ffn"))

        trunk, read_mix = sublayer(trunk, read_mix, scope, "attn", attend, setting)
        return sublayer(trunk, read_mix, scope, "ffn", mix_experts, setting)

    def _engram(
        self,
        trunk: Tensor,
        layer: LayerPlan,
        tokens: TokenSequence,
        span: Span,
        scope: Parameters,
        record: Recorder,
    ) -> Tensor:
        """The n-gram memory at the entrance of a layer."""
        text, image_mask = self.config.text, tokens.image_mask
        padding = int(self.token_map[text.engram_pad_token_id])
        inside = tokens.ids.clamp(
            0, text.vocab_size - 1
        )  # image positions may hold any id: they stop the history anyway
        contexts = ngram_contexts(self.token_map[inside], image_mask, text.engram_max_ngram_size, padding)
        rows = engram_rows(contexts[span.start :], layer.layer_id, text)
        updated = engram(trunk, rows, image_mask[span.start :], scope.scope("engram"), self._setting)
        record("engram.rows", rows)
        record("engram.trunk", updated)
        return updated

    def greedy(self, prompt_ids: Sequence[int] | Tensor, num_tokens: int) -> list[int]:
        """Continue a text prompt by ``num_tokens`` tokens, each time the one with the largest logit."""
        ids = list(map(int, prompt_ids))
        with torch.no_grad():
            for _ in range(num_tokens):
                ids.append(int(self.forward(ids)[-1].argmax()))
        return ids[len(ids) - num_tokens :]

    @property
    def draft_model(self) -> DraftModel:
        """The draft on its own: training runs it on many blocks at once."""
        return DraftModel(self._parameters, self._setting)

    @property
    def vision_tower(self) -> VisionTower:
        """Images to vectors; see :meth:`VisionTower.span`."""
        if self.config.vision is None:
            raise ConfigError("vision_config is absent", why="the model has no vision tower", fix="send text only")
        return VisionTower(self.config.vision, self._parameters, self._setting.roundings)

    def features(self, trace: dict[str, Any]) -> Tensor:
        """The draft's input from a trace of :meth:`forward`: ``[T, targets * d]``."""
        return torch.cat([trace[f"features.{layer}"] for layer in self.config.text.dspark_target_layer_ids], -1)

    def draft(
        self,
        token_ids: Sequence[int] | Tensor,
        newest: int,
        *,
        image_mask: Sequence[bool] | Tensor | None = None,
        image_embeddings: Tensor | None = None,
        noise: Tensor | None = None,
        temperature: float = 1.0,
        trace: dict[str, Any] | None = None,
    ) -> Draft:
        """Propose tokens behind ``newest``, which follows ``token_ids``. Other arguments: forward and propose."""
        trace = {} if trace is None else trace
        self.forward(token_ids, image_mask=image_mask, image_embeddings=image_embeddings, trace=trace)
        draft = self.draft_model
        anchors, newest_ids = torch.tensor([len(token_ids) - 1]), torch.tensor([newest])
        hidden = draft.hidden(draft.context(self.features(trace)), anchors, newest_ids, Recorder(trace))
        return draft.propose(hidden[0], newest, noise, temperature)


def _checked_token_map(config: ModelConfig, token_map: Sequence[int] | Tensor | None) -> Tensor:
    """The map as ``[vocab]`` int64, with as many distinct values as the configuration says."""
    vocab, compressed = config.text.vocab_size, config.text.engram_compressed_vocab_size or config.text.vocab_size
    table = torch.arange(vocab) if token_map is None else torch.as_tensor(token_map).to(torch.int64)
    distinct = len(table.unique())
    if table.shape != (vocab,) or (config.text.engram_layer_ids and distinct != compressed):
        raise ConfigError(
            f"token_map has {tuple(table.shape)} entries and {distinct} distinct ids",
            why=f"the configuration says {vocab} tokens and {compressed} compressed ids",
            fix="compute it from the tokenizer.json that belongs to the checkpoint",
        )
    return table


def _token_map_of(folder: Path) -> Tensor:
    """Compressed ids from ``tokenizer.json``, with the raw backend and no token added."""
    from tokenizers import Tokenizer  # here, so that a model with a given map needs no tokenizer

    from deepinfer.tokenizer.compressed_vocab import build_compressed_vocab

    file = folder / "tokenizer.json"
    if not file.is_file():
        raise CheckpointFileError(f"{file} is missing", why="the n-gram memory needs it", fix="pass token_map")
    return torch.tensor(build_compressed_vocab(Tokenizer.from_file(str(file))).token_map)
