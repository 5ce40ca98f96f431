"""Reading ``config.json``: defaults, warnings, files that are not there, and the way back to JSON."""

from __future__ import annotations

import json
import logging

import pytest

from deepinfer.config.model_file import load_model_config, model_config_from_dict, model_config_to_dict
from deepinfer.errors import CheckpointFileError, ConfigError


def test_absent_optional_keys_take_the_specified_defaults(released):
    for key in ("candidate_source_layer_id", "rope_scaling", "engram_layer_ids", "engram_num_embeddings"):
        del released["text_config"][key]
    config = model_config_from_dict(released)
    text = config.text
    assert text.candidate_source_layer_id is None
    assert text.rope_scaling is None
    assert text.engram_layer_ids == ()
    assert text.index_k_source_layer_ids is None
    assert text.hc_shifted is True
    assert text.use_fp4_sparse_kv is True
    assert text.dspark_target_attn_input is True
    assert config.tokenizer_compatibility == "release"


def test_absent_draft_keys_mean_no_draft(released):
    text = released["text_config"]
    for key in [key for key in text if key.startswith("dspark_")] + ["num_nextn_predict_layers"]:
        del text[key]
    text["compress_ratios"] = text["compress_ratios"][:40]
    config = model_config_from_dict(released)
    assert config.text.num_nextn_predict_layers == 0
    assert not any(layer.is_feature_target for layer in config.text.layers)


def test_vision_may_be_absent(tiny):
    del tiny["vision_config"]
    assert model_config_from_dict(tiny).vision is None


def test_released_values_survive_reading(released):
    config = model_config_from_dict(released)
    assert config.text.rope_scaling.original_max_position_embeddings == 65536
    assert config.text.rms_norm_eps == 1e-20
    assert config.text.compress_rope_theta == 160000.0
    assert config.vision.min_pixels == 544**2
    assert config.quantization.weight_block_size == (32, 32)


@pytest.mark.parametrize("name", ["released", "tiny"])
def test_round_trip_through_json(name, request):
    config = model_config_from_dict(request.getfixturevalue(name))
    again = model_config_from_dict(json.loads(json.dumps(model_config_to_dict(config))))
    assert again == config


def test_round_trip_keeps_switches_off_and_lists_empty(tiny):
    tiny["text_config"].update(hc_shifted=False, use_fp4_sparse_kv=False, rope_scaling=None)
    tiny["text_config"].update(index_k_source_layer_ids=[2, 4], engram_layer_ids=[], engram_num_embeddings=[])
    del tiny["text_config"]["candidate_source_layer_id"], tiny["vision_config"]
    config = model_config_from_dict(tiny)
    assert model_config_from_dict(model_config_to_dict(config)) == config
    assert config.text.hc_shifted is False


def test_unknown_keys_are_reported_and_ignored(tiny, caplog):
    tiny["text_config"]["query_norm_per_head"] = True
    tiny["text_config"]["rope_scaling"]["mscale"] = 2.0
    tiny["text_config"]["use_cache"] = True  # known to have no effect on the arithmetic
    with caplog.at_level(logging.WARNING):
        model_config_from_dict(tiny)
    assert "text_config.query_norm_per_head" in caplog.text
    assert "text_config.rope_scaling.mscale" in caplog.text
    assert "use_cache" not in caplog.text


def test_v4_switches_that_are_off_are_fine(tiny):
    tiny["text_config"]["overlap_compression"] = False
    assert model_config_from_dict(tiny).text.num_hidden_layers == 8


def test_file_and_directory_both_work(tiny, tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(tiny), encoding="utf-8")
    assert load_model_config(file) == load_model_config(tmp_path) == load_model_config(str(tmp_path))


def test_missing_paths_say_what_is_missing(tmp_path):
    with pytest.raises(CheckpointFileError, match="does not exist"):
        load_model_config(tmp_path / "nowhere")
    with pytest.raises(CheckpointFileError, match=r"no config\.json"):
        load_model_config(tmp_path)


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe", b"", b'{"a": ' + b"1" * 5000 + b"}", b"[" * 100_000])
def test_broken_json_is_a_config_error(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match="is not JSON"):
        load_model_config(tmp_path)


@pytest.mark.parametrize("content", ["[]", "null", "3"])
def test_json_that_is_no_object_is_refused(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match="JSON object"):
        load_model_config(tmp_path)
