"""Attention over a sliding window and selected compressed entries (spec 4.5, 4.7 and 4.8)."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from deepinfer.config.layer_plan import IndexMode, LayerPlan
from deepinfer.reference.building_blocks import linear
from deepinfer.reference.compressor import index_keys, latents, main_entries, visible_entries
from deepinfer.reference.indexer import (
    UNAVAILABLE,
    candidate_blocks,
    in_blocks,
    index_queries,
    index_scores,
    membership,
    random_scores,
    select_top,
)
from deepinfer.reference.number_formats import bf16, q8
from deepinfer.reference.parameters import Parameters
from deepinfer.reference.rope import layer_frequencies, rotate
from deepinfer.reference.setting import Setting
from deepinfer.reference.trace import Recorder


@dataclass(slots=True)
class Published:
    """What layers leave for later layers of the same forward pass, by the number of the layer that made it."""

    entries: dict[int, Tensor] = field(default_factory=dict)
    """Main entries ``[n, D]`` of each KV source."""
    index_keys: dict[int, Tensor] = field(default_factory=dict)
    """``[n, index_head_dim]`` of each index-key source."""
    selections: dict[int, Tensor] = field(default_factory=dict)
    """``[T, index_topk]`` of each index source, ascending, padded with -1."""
    blocks: Tensor | None = None
    """``[T, candidate_topk_blocks]`` of the candidate source, ascending, padded with -1."""


@dataclass(frozen=True, slots=True)
class Span:
    """Which positions the rows of a forward pass are. Without replay: all of them."""

    num_tokens: int
    start: int = 0
    """First row; later than 0 only after a prefix hit."""
    hit: int = 0
    """Tokens before this have their entries already: rows before it read them and write none (6.2). A multiple of
    every compress ratio."""
    prior: Published | None = None
    """Where the entries and index keys of the first ``hit`` tokens come from."""
    decoder_floor: int = 0
    """In decoder layers, tokens before it are in no window (6.1)."""

    @property
    def positions(self) -> Tensor:
        """``[rows]`` absolute positions."""
        return torch.arange(self.start, self.num_tokens)


def project_queries(
    x: Tensor, positions: Tensor, frequencies: Tensor, parameters: Parameters, setting: Setting
) -> tuple[Tensor, Tensor]:
    """Latent query ``q_r [T, q_lora_rank]`` and rotated queries ``[T, H, D]`` from ``x [T, d]``. No norm after wq_b.

    Args:
        parameters: the scope ``attn``.
    """
    text, roundings = setting.text, setting.roundings
    compressed = linear(q8(x, roundings.q8_attention_input), parameters["wq_a.weight"])
    latent = setting.norm(bf16(compressed, roundings.bf16_query_latent), parameters["q_norm.weight"])
    query = bf16(linear(q8(latent, roundings.q8_query_latent), parameters["wq_b.weight"]), roundings.bf16_query)
    query = query.unflatten(-1, (text.num_attention_heads, text.head_dim))
    return latent, bf16(rotate(query, positions, frequencies), roundings.bf16_rope)


def project_window_keys(
    x: Tensor, positions: Tensor, frequencies: Tensor, parameters: Parameters, setting: Setting
) -> Tensor:
    """What the sliding window stores, ``[T, D]``: one key, which is also the value, shared by all heads."""
    roundings = setting.roundings
    projected = bf16(linear(q8(x, roundings.q8_attention_input), parameters["wkv.weight"]), roundings.bf16_key)
    key = setting.norm(projected, parameters["kv_norm.weight"])
    return q8(bf16(rotate(key, positions, frequencies), roundings.bf16_rope), roundings.q8_window_key)


def window_mask(positions: Tensor, window: int, floor: int = 0) -> Tensor:
    """``[T, T]``: token t is seen by query p when ``max(p - window + 1, floor) <= t <= p``."""
    query, token = positions[:, None], positions
    return (token <= query) & (token > query - window) & (token >= floor)


def attend(queries: Tensor, keys: Tensor, visible: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """One softmax over everything that a row sees; the sink is one more logit without a value.

    Args:
        queries: ``[T, H, D]``.
        keys: ``[K, D]``, also the values.
        visible: ``[T, K]`` booleans.
        sink: ``[H]`` logits, not scaled.
    Returns:
        Context ``[T, H, D]`` and probabilities ``[T, H, K]``.
    """
    logits = torch.einsum("thd,kd->thk", queries, keys) * queries.shape[-1] ** -0.5
    logits = logits.masked_fill(~visible[:, None], UNAVAILABLE)
    with_sink = torch.cat((logits, sink[None, :, None].expand(len(queries), -1, 1)), -1)
    probabilities = torch.softmax(with_sink, -1)[..., :-1]
    return torch.einsum("thk,kd->thd", probabilities, keys), probabilities


def rotate_back(context: Tensor, positions: Tensor, frequencies: Tensor, setting: Setting) -> Tensor:
    """Values carry the rotation of their own position; turn the sum back by the query's. ``[T, H, D]``."""
    roundings = setting.roundings
    rounded = bf16(context, roundings.bf16_context)
    return bf16(rotate(rounded, positions, frequencies, inverse=True), roundings.bf16_context_rotated)


def project_output(context: Tensor, parameters: Parameters, setting: Setting) -> Tensor:
    """``[T, H, D]`` -> ``[T, d]``: wo_a mixes within each group of neighbouring heads, wo_b over all groups."""
    text, roundings = setting.text, setting.roundings
    groups = q8(context.flatten(1), roundings.q8_context).unflatten(1, (text.o_groups, -1))  # [T, G, heads of it * D]
    weight = parameters["wo_a.weight"].unflatten(0, (text.o_groups, text.o_lora_rank))  # [G, rank, heads of it * D]
    grouped = bf16(torch.einsum("tgi,gri->tgr", groups, weight), roundings.bf16_group_output).flatten(1)
    output = linear(q8(grouped, roundings.q8_group_output), parameters["wo_b.weight"])
    return bf16(output, roundings.bf16_attention_output)


def attention(
    x: Tensor,
    layer: LayerPlan,
    span: Span,
    parameters: Parameters,
    published: Published,
    setting: Setting,
    record: Recorder,
) -> Tensor:
    """Attention of one backbone layer over the whole sequence.

    Args:
        x: ``[T, d]``, normed read of the trunk, one row per position of ``span``.
        parameters: the scope ``layers.L.attn``.
        published: read and extended.
    Returns:
        ``[T, d]``.
    """
    text, positions = setting.text, span.positions
    floor = span.decoder_floor if layer.layer_id >= text.first_decoder_layer else 0
    frequencies = layer_frequencies(text, layer.ratio)
    record("input", x)
    latent, queries = project_queries(x, positions, frequencies, parameters, setting)
    keys = project_window_keys(x, positions, frequencies, parameters, setting)
    visible = window_mask(positions, text.sliding_window, floor)
    record("q_latent", latent)
    record("q", queries)
    record("window_key", keys)
    if layer.ratio and not setting.ablation.window_only:
        _publish_stream(x, layer, span, frequencies, parameters, published, setting, record)
        _publish_selection(x, latent, layer, positions, frequencies, parameters, published, setting, record)
        assert layer.kv_source is not None, f"{layer=} has no entries"
        assert layer.index_source is not None, f"{layer=} has no selection"
        entries, selected = published.entries[layer.kv_source], published.selections[layer.index_source]
        record("selected", selected)
        keys = torch.cat((keys, entries))  # a token may be here twice, in the window and in an entry: both count
        visible = torch.cat((visible, membership(selected, len(entries))), 1)
    context, probabilities = attend(queries, keys, visible, parameters["attn_sink"])
    record("probabilities", probabilities)
    context = rotate_back(context, positions, frequencies, setting)
    record("context", context)
    output = project_output(context, parameters, setting)
    record("output", output)
    return output


def _publish_stream(
    x: Tensor,
    layer: LayerPlan,
    span: Span,
    frequencies: Tensor,
    parameters: Parameters,
    published: Published,
    setting: Setting,
    record: Recorder,
) -> None:
    """Compress the sequence at a KV source; make index keys where the layer owns them."""
    if not layer.owns_kv:
        return
    number, ratio, first = layer.layer_id, layer.ratio, span.hit // layer.ratio
    latent = latents(x[span.hit - span.start :], ratio, parameters.scope("compressor"), setting)
    positions = ratio * torch.arange(first, first + len(latent))  # of the first token of every group
    entries = main_entries(latent, positions, frequencies, setting)
    if span.prior is not None:
        entries = torch.cat((span.prior.entries[number], entries))
    published.entries[number] = entries
    record("latent", latent)
    record("entry", entries)
    if layer.owns_index_keys:
        keys = index_keys(latent, positions, frequencies, parameters.scope("indexer"), setting)
        if span.prior is not None:
            keys = torch.cat((span.prior.index_keys[number], keys))
        published.index_keys[number] = keys
        record("index_key", keys)


def _publish_selection(
    x: Tensor,
    q_latent: Tensor,
    layer: LayerPlan,
    positions: Tensor,
    frequencies: Tensor,
    parameters: Parameters,
    published: Published,
    setting: Setting,
    record: Recorder,
) -> None:
    """Score and select at an index source; Reuse layers do nothing here."""
    if not layer.owns_indexer:
        return
    text = setting.text
    assert layer.index_k_source is not None, f"{layer=} has no index keys"
    keys = published.index_keys[layer.index_k_source]
    indexer = parameters.scope("indexer")
    queries = index_queries(q_latent, positions, frequencies, indexer, setting)
    scores = index_scores(x, queries, keys, indexer, setting)
    if setting.ablation.random_selection is not None:
        seed = setting.ablation.random_selection
        scores = random_scores(positions, len(keys), layer.ratio, layer.layer_id, seed).to(scores.dtype)
    visible = visible_entries(positions, len(keys), layer.ratio)
    record("index_query", queries)
    record("index_scores", scores.masked_fill(~visible, UNAVAILABLE))
    allowed = visible
    if layer.mode is IndexMode.REINDEX:
        assert published.blocks is not None, f"{layer=} comes before the candidate source"
        allowed = visible & in_blocks(published.blocks, text.candidate_block_size, len(keys))
    published.selections[layer.layer_id] = select_top(scores.masked_fill(~allowed, UNAVAILABLE), text.index_topk)
    if layer.is_candidate_source:
        size, count = text.candidate_block_size, text.candidate_topk_blocks
        published.blocks = candidate_blocks(scores, visible, size, count)
        record("blocks", published.blocks)
