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
            raise _inconsistent(
                key, list(ids), f"layer {layer} has compress ratio 0 and owns no stream", "name layers with ratio 1 or 2"
            )


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
    plans = []
    for layer, ratio in enumerate(compress_ratios):
        common = {
            "layer_id": layer,
            "ratio": ratio,
            "has_engram": layer in engram_layers,
            "is_feature_target": layer in feature_layers,
        }
        if ratio == 0:
            plans.append(LayerPlan(mode=IndexMode.NONE, **common))
            continue
        found = {}
        for name, key, sources in (
            ("kv_source", "kv_source_layer_ids", kv_sources),
            ("index_k_source", "index_k_source_layer_ids", index_k_sources),
            ("index_source", "index_source_layer_ids", index_sources),
        ):
            source = _source_of(layer, sources)
            if source is None:
                raise _inconsistent(
                    key, list(sources), f"layer {layer} (ratio {ratio}) has no source at or before it", f"add layer {layer}"
                )
            if compress_ratios[source] != ratio:
                raise _inconsistent(
                    key,
                    list(sources),
                    f"layer {layer} has ratio {ratio} but its source {source} has ratio {compress_ratios[source]}",
                    f"start a segment at the first layer of ratio {ratio}",
                )
            found[name] = source
        if found["index_source"] != layer:
            mode = IndexMode.REUSE
        elif candidate_source is not None and layer > candidate_source:
            mode = IndexMode.REINDEX
            shared = _source_of(candidate_source, index_k_sources)
            if found["index_k_source"] != shared:
                raise _inconsistent(
                    "candidate_source_layer_id",
                    candidate_source,
                    f"layer {layer} selects inside its candidate blocks but reads the index keys of layer "
                    f"{found['index_k_source']}, not of {shared}",
                    "keep one index-key source from the candidate source on",
                )
        else:
            mode = IndexMode.FULL
        plans.append(
            LayerPlan(
                mode=mode,
                owns_index_keys=found["index_k_source"] == layer,
                is_candidate_source=layer == candidate_source,
                **common,
                **found,
            )
        )
    return tuple(plans)
