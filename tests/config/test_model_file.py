"""Reading ``config.json``: defaults, warnings, files that are not there, and the way back to JSON."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from deepinfer.checkpoint.released import released_config
from deepinfer.checkpoint.tiny import tiny_config
from deepinfer.config.model_file import load_model_config, model_config_from_dict, model_config_to_dict
from deepinfer.errors import CheckpointFileError, ConfigError

ROOT = Path(__file__).parents[2]
CHECKPOINTS = [
    ROOT / "deepinfer/data/tiny_v41",
    *sorted(file.parent for file in ROOT.glob("tests/golden/*/config.json")),
]


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


def test_unknown_keys_of_all_sections_are_one_warning(tiny, caplog):
    tiny["query_norm"] = True
    tiny["text_config"]["first_k_dense_replace"] = 1
    tiny["vision_config"]["window_size"] = 8
    tiny["quantization_config"]["fmt"] = "e4m3"
    with caplog.at_level(logging.WARNING):
        model_config_from_dict(tiny)
    (record,) = caplog.records
    assert record.getMessage() == (
        "config keys not used by this engine: query_norm, text_config.first_k_dense_replace, vision_config.window_size,"
        " quantization_config.fmt"
    )


@pytest.mark.parametrize(
    ("section", "key", "meant"),
    [
        ("", "tokenizer_compatability", "tokenizer_compatibility"),
        ("", "vison_config", "vision_config"),
        ("text_config", "hc_shift", "hc_shifted"),
        ("text_config", "use_fp4_sparse_k", "use_fp4_sparse_kv"),
        ("text_config", "index_k_source_layers", "index_k_source_layer_ids"),
        ("text_config", "rope_scalling", "rope_scaling"),
        ("text_config", "engram_layers_ids", "engram_layer_ids"),
        ("text_config", "num_nextn_predict_layer", "num_nextn_predict_layers"),
        ("text_config", "hidden_sizes", "hidden_size"),
        ("text_config.rope_scaling", "beta_fats", "beta_fast"),
        ("vision_config", "downsample_ration", "downsample_ratio"),
        ("quantization_config", "scale_format", "scale_fmt"),
    ],
)
def test_a_misspelt_key_is_not_taken_for_an_absent_one(released, section, key, meant):
    place = released
    for name in section.split(".") if section else ():
        place = place[name]
    place[key] = place.pop(meant, 1)
    with pytest.raises(ConfigError, match=f"Did you mean {meant}\\?") as caught:
        model_config_from_dict(released)
    assert f"{section}.{key} is".removeprefix(".") in caught.value.what
    assert meant in caught.value.why


def test_a_key_like_one_that_is_there_is_only_reported(tiny, caplog):
    tiny["text_config"]["hidden_sizes"] = 7
    with caplog.at_level(logging.WARNING):
        assert model_config_from_dict(tiny).text.hidden_size == 256
    assert "text_config.hidden_sizes" in caplog.text


def test_what_other_programs_write_into_any_configuration_is_silent(released, caplog):
    more = {"torch_dtype": "bfloat16", "transformers_version": "4.57.0", "use_cache": True, "_name_or_path": "x"}
    sampling = {"temperature": 0.6, "top_p": 0.95, "do_sample": True}
    released.update(more | sampling)
    released["text_config"].update(more | sampling | {"gate_temp": 1.0, "num_hash_layers": 0})
    released["vision_config"].update(more)
    with caplog.at_level(logging.WARNING):
        model_config_from_dict(released)
    assert not caplog.records


@pytest.mark.parametrize("path", CHECKPOINTS, ids=lambda path: path.name)
def test_no_checkpoint_of_this_repository_has_an_unknown_key(path, caplog):
    with caplog.at_level(logging.WARNING):
        load_model_config(path)
    assert not caplog.records


@pytest.mark.parametrize("config", [released_config(), tiny_config()], ids=["released", "tiny"])
def test_no_configuration_that_is_written_here_has_an_unknown_key(config, caplog):
    with caplog.at_level(logging.WARNING):
        model_config_from_dict(model_config_to_dict(config))
    assert not caplog.records


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
