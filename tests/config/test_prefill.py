"""Decoder bounded replay is refused where it would leave a window without its keys, or does not fit the model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deepinfer.checkpoint.tiny import tiny_config
from deepinfer.config.env import read_environment
from deepinfer.config.prefill import PrefillConfig, check_truncation
from deepinfer.errors import ConfigError

TEXT = tiny_config(vision=False).text
COMPACT = PrefillConfig(truncation="compact", keep_tokens=22)


def test_keep_tokens_cover_window_and_backtracking():
    check_truncation(COMPACT, TEXT, 6)
    with pytest.raises(ConfigError, match=r"prefill_keep_tokens is 22.*16 \+ 7 = 23.*Give 23 or more"):
        check_truncation(COMPACT, TEXT, 7)
    check_truncation(PrefillConfig(keep_tokens=1), TEXT, 6)  # off: nothing to check
    assert PrefillConfig(keep_tokens=30).decoder_keep_tokens == 0
    assert COMPACT.decoder_keep_tokens == 22


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dspark_target_layer_ids": (4, 6, 7)}, "features at or before layer 4"),
        ({"engram_layer_ids": (1, 5)}, "n-gram layer lies behind layer 4"),
        (
            {"kv_source_layer_ids": (2, 4, 6), "index_source_layer_ids": (2, 4, 6), "candidate_source_layer_id": None},
            "KV",
        ),
        (
            {
                "compress_ratios": (0, 0, 2, 2, 2, 2, 2, 2, 0, 0),
                "kv_source_layer_ids": (2,),
                "index_source_layer_ids": (2,),
                "candidate_source_layer_id": None,
            },
            "no decoder layers",
        ),
    ],
)
def test_models_that_cannot_be_cut_are_refused(changes, reason):
    text = replace(TEXT, **changes)
    with pytest.raises(ConfigError, match=rf"prefill_truncation is 'compact'.*{reason}"):
        check_truncation(COMPACT, text, 6)


@pytest.mark.parametrize("values", [{"truncation": "compress"}, {"truncation": "mask", "keep_tokens": -1}])
def test_values_out_of_range_are_refused(values):
    with pytest.raises(ConfigError):
        PrefillConfig(**values)


def test_variables_of_the_vendor_are_read():
    found = read_environment(
        {
            "DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE": "mask",
            "DEEPINFER_YOCO_PREFILL_KEEP_TOKENS": "140",
            "DEEPINFER_PREFIX_CACHE": "bounded",
        }
    )
    assert found.warnings == ()
    assert {name: value for name, (_variable, value) in found.options.items()} == {
        "prefill_truncation": "mask",
        "prefill_keep_tokens": 140,
        "prefix_cache": "bounded",
    }
