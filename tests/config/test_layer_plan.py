"""Roles of layers: the tables of spec 1.2 and 11, and the source lists that have to be refused (spec 2.4, item 7)."""

from __future__ import annotations

from typing import Any

import pytest

from deepinfer.config.layer_plan import IndexMode, LayerPlan, plan_layers
from deepinfer.config.model_file import model_config_from_dict
from deepinfer.errors import ConfigError


def _plan(ratios: list[int], **changes: Any) -> tuple[LayerPlan, ...]:
    arguments: dict[str, Any] = {
        "compress_ratios": ratios,
        "kv_sources": [0],
        "index_sources": [0],
        "index_k_sources": None,
        "candidate_source": None,
        "engram_layers": [],
        "feature_layers": [],
    }
    return plan_layers(**{**arguments, **changes})


def test_released_layers_have_the_published_roles(released):
    layers = model_config_from_dict(released).text.layers
    modes = [layer.mode for layer in layers]
    full = {2, 8, 14, 20}
    reindex = {24, 28, 32, 36}
    for number, mode in enumerate(modes):
        if number < 2:
            expected = IndexMode.NONE
        elif number in full:
            expected = IndexMode.FULL
        elif number in reindex:
            expected = IndexMode.REINDEX
        else:
            expected = IndexMode.REUSE
        assert mode is expected, number
    assert [layer.kv_source for layer in layers] == [None] * 2 + [2] * 6 + [8] * 6 + [14] * 6 + [20] * 20
    assert [layer.index_source for layer in layers[20:]] == [20] * 4 + [24] * 4 + [28] * 4 + [32] * 4 + [36] * 4
    assert [layer.layer_id for layer in layers if layer.owns_kv] == [2, 8, 14, 20]
    assert [layer.layer_id for layer in layers if layer.owns_index_keys] == [2, 8, 14, 20]
    assert [layer.layer_id for layer in layers if layer.owns_indexer] == [2, 8, 14, 20, 24, 28, 32, 36]
    assert [layer.layer_id for layer in layers if layer.is_candidate_source] == [20]
    assert [layer.layer_id for layer in layers if layer.has_engram] == [1, 14]
    assert [layer.layer_id for layer in layers if layer.is_feature_target] == [37, 38, 39]


def test_tiny_layers_have_the_derived_roles(tiny):
    text = model_config_from_dict(tiny).text
    modes = [layer.mode.value for layer in text.layers]
    assert modes == ["none", "none", "full", "reuse", "full", "reuse", "reindex", "reuse"]
    assert [layer.index_source for layer in text.layers] == [None, None, 2, 2, 4, 4, 6, 6]
    assert text.first_decoder_layer == 4
    assert [layer.layer_id for layer in text.kv_source_layers] == [2, 4]


def test_without_candidate_source_every_indexer_scores_everything(tiny):
    del tiny["text_config"]["candidate_source_layer_id"]
    modes = [layer.mode for layer in model_config_from_dict(tiny).text.layers]
    assert modes[6] is IndexMode.FULL
    assert IndexMode.REINDEX not in modes


def test_separate_index_key_list_is_followed():
    layers = _plan([1, 1, 1, 1], kv_sources=[0, 2], index_sources=[0, 2], index_k_sources=[0])
    assert [layer.kv_source for layer in layers] == [0, 0, 2, 2]
    assert [layer.index_k_source for layer in layers] == [0, 0, 0, 0]
    assert [layer.owns_index_keys for layer in layers] == [True, False, False, False]


REFUSED = {
    "no KV source at or before a layer": (
        [1, 1],
        {"kv_sources": [1], "index_sources": [0, 1]},
        "kv_source_layer_ids",
        "layer 0",
    ),
    "no selection at or before a layer": ([1, 1], {"index_sources": [1], "kv_sources": [0, 1]}, "index_", "layer 0"),
    "KV segment of two ratios": ([2, 1], {}, "kv_source_layer_ids", "layer 1 has ratio 1"),
    "selection across the split": ([2, 1], {"kv_sources": [0, 1]}, "index_source_layer_ids", "layer 1"),
    "unsorted list": ([1, 1], {"kv_sources": [1, 0]}, "kv_source_layer_ids", "ascending"),
    "repeated source": ([1, 1], {"kv_sources": [0, 0]}, "kv_source_layer_ids", "distinct"),
    "source beyond the layers": ([1, 1], {"kv_sources": [0, 2]}, "kv_source_layer_ids", "no layer 2"),
    "negative source": ([1, 1], {"kv_sources": [-1, 0]}, "kv_source_layer_ids", "no layer -1"),
    "source without a stream": ([0, 1], {"kv_sources": [0, 1]}, "kv_source_layer_ids", "ratio 0"),
    "index keys without a latent": (
        [1, 1],
        {"index_k_sources": [0, 1], "index_sources": [0, 1]},
        "index_k_source_layer_ids",
        "layer 1 is no KV source",
    ),
    "selection kept over new index keys": ([1, 1], {"kv_sources": [0, 1]}, "index_source_layer_ids", "add layer 1"),
    "candidate source without an indexer": ([1, 1], {"candidate_source": 1}, "candidate_source_layer_id", "[0]"),
    "candidates of other index keys": (
        [1, 1],
        {"kv_sources": [0, 1], "index_sources": [0, 1], "candidate_source": 0},
        "candidate_source_layer_id",
        "layer 1 selects inside its candidate blocks",
    ),
}


@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_contradicting_source_lists_are_refused(case):
    ratios, changes, key, explanation = REFUSED[case]
    with pytest.raises(ConfigError) as caught:
        _plan(ratios, **changes)
    assert key in str(caught.value)
    assert explanation.lower() in str(caught.value).lower()
