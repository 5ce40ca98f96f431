"""What each backbone layer owns and where it reads: the layer map of spec 1.2, derived from the source lists."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from deepinfer.errors import ConfigError


class IndexMode(enum.Enum):
    """How a layer gets its list of selected compressed entries."""

    NONE = "none"  # ratio 0: sliding window only
    FULL = "full"  # scores every visible entry
    REINDEX = "reindex"  # scores the entries of the candidate blocks
    REUSE = "reuse"  # takes the list of its selection source


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlan:
    """Role of one layer. ``*_source`` are layer numbers, None for ratio-0 layers."""

    layer_id: int
    ratio: int
    mode: IndexMode
    kv_source: int | None = None
    index_k_source: int | None = None
    index_source: int | None = None
    owns_index_keys: bool = False
    is_candidate_source: bool = False
    has_engram: bool = False
    is_feature_target: bool = False
    """The draft takes its features at the entrance of this layer."""

    @property
    def owns_kv(self) -> bool:
        return self.ratio != 0 and self.kv_source == self.layer_id

    @property
    def owns_indexer(self) -> bool:
        return self.ratio != 0 and self.index_source == self.layer_id


def _inconsistent(key: str, value: object, why: str, fix: str) -> ConfigError:
    return ConfigError(f"config key text_config.{key} is {value!r}", why=why, fix=fix)


def _source_of(layer: int, sources: Sequence[int]) -> int | None:
    """Largest source that is <= ``layer``."""
    return max((source for source in sources if source <= layer), default=None)


def _check_list(key: str, ids: Sequence[int], ratios: Sequence[int]) -> None:
    if list(ids) != sorted(set(ids)):
        raise _inconsistent(key, list(ids), "sources have to be distinct and ascending", "sort the list")
    for layer in ids:
        if not 0 <= layer < len(ratios):
            raise _inconsistent(key, list(ids), f"there is no layer {layer}", f"use layers 0 to {len(ratios) - 1}")
        if ratios[layer] == 0:
            why = f"layer {layer} has compress ratio 0 and owns no stream"
            raise _inconsistent(key, list(ids), why, "name layers with ratio 1 or 2")


def plan_layers(
    *,
    compress_ratios: Sequence[int],
    kv_sources: Sequence[int],
    index_sources: Sequence[int],
    index_k_sources: Sequence[int] | None,
    candidate_source: int | None,
    engram_layers: Sequence[int],
    feature_layers: Sequence[int],
) -> tuple[LayerPlan, ...]:
    """Derive every layer's role and refuse source lists that contradict one another (spec 1.2 and 2.4, item 7).

    Raises:
        ConfigError: names the key, its value and the rule.
    """
    if index_k_sources is None:
        index_k_sources = kv_sources
    _check_list("kv_source_layer_ids", kv_sources, compress_ratios)
    _check_list("index_source_layer_ids", index_sources, compress_ratios)
    _check_list("index_k_source_layer_ids", index_k_sources, compress_ratios)
    for layer in index_k_sources:
        if layer not in kv_sources:
            raise _inconsistent(
                "index_k_source_layer_ids",
                list(index_k_sources),
                f"layer {layer} is no KV source, and index keys are made from the latent that only KV sources compute",
                f"choose from kv_source_layer_ids {list(kv_sources)}",
            )
        if layer not in index_sources:
            raise _inconsistent(
                "index_source_layer_ids",
                list(index_sources),
                f"layer {layer} starts new index keys, so a new selection has to start there",
                f"add layer {layer}",
            )
    if candidate_source is not None and candidate_source not in index_sources:
        raise _inconsistent(
            "candidate_source_layer_id",
            candidate_source,
            "candidate blocks are made from an indexer's scores",
            f"choose from index_source_layer_ids {list(index_sources)}, or null",
        )
    lists = {
        "kv_source_layer_ids": kv_sources,
        "index_k_source_layer_ids": index_k_sources,
        "index_source_layer_ids": index_sources,
    }
    plans = []
    for layer, ratio in enumerate(compress_ratios):
        has_engram = layer in engram_layers
        is_target = layer in feature_layers
        if ratio == 0:
            plan = LayerPlan(
                layer_id=layer, ratio=0, mode=IndexMode.NONE, has_engram=has_engram, is_feature_target=is_target
            )
        else:
            kv, index_k, index = (_checked_source(layer, key, ids, compress_ratios) for key, ids in lists.items())
            plan = LayerPlan(
                layer_id=layer,
                ratio=ratio,
                mode=_index_mode(layer, index, index_k, candidate_source, index_k_sources),
                kv_source=kv,
                index_k_source=index_k,
                index_source=index,
                owns_index_keys=index_k == layer,
                is_candidate_source=layer == candidate_source,
                has_engram=has_engram,
                is_feature_target=is_target,
            )
        plans.append(plan)
    return tuple(plans)


def _checked_source(layer: int, key: str, sources: Sequence[int], ratios: Sequence[int]) -> int:
    """The source of a compressing layer in one list, of the same ratio as the layer."""
    source = _source_of(layer, sources)
    if source is None:
        why = f"layer {layer} (ratio {ratios[layer]}) has no source at or before it"
        raise _inconsistent(key, list(sources), why, f"add layer {layer}")
    if ratios[source] != ratios[layer]:
        why = f"layer {layer} has ratio {ratios[layer]} but its source {source} has ratio {ratios[source]}"
        raise _inconsistent(key, list(sources), why, f"start a segment at the first layer of ratio {ratios[layer]}")
    return source


def _index_mode(
    layer: int, index_source: int, index_k_source: int, candidate_source: int | None, index_k_sources: Sequence[int]
) -> IndexMode:
    """How a compressing layer selects; a layer behind the candidate source has to read the same index keys."""
    if index_source != layer:
        return IndexMode.REUSE
    if candidate_source is None or layer <= candidate_source:
        return IndexMode.FULL
    shared = _source_of(candidate_source, index_k_sources)
    if index_k_source != shared:
        raise _inconsistent(
            "candidate_source_layer_id",
            candidate_source,
            f"layer {layer} selects inside its candidate blocks but reads the index keys of layer {index_k_source}, "
            f"not of {shared}",
            "keep one index-key source from the candidate source on",
        )
    return IndexMode.REINDEX
