"""Arguments, variables and defaults become one checked tree, and every automatic choice has a reason."""

from __future__ import annotations

import dataclasses
import json
import logging
import operator
from pathlib import Path

import pytest

from deepinfer.config import engine as engine_config
from deepinfer.config.engine import BLOCK_TOKENS
from deepinfer.config.env import read_environment
from deepinfer.config.options import AUTO, FOREIGN, OPTIONS
from deepinfer.config.resolve import resolve
from deepinfer.errors import CheckpointFileError, ConfigError
from deepinfer.kvcache import block_pool

NOTHING = read_environment({})


@pytest.fixture
def model_dir(tiny, tmp_path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(tiny), encoding="utf-8")
    return tmp_path


def _reason(resolved, field):
    (found,) = [reason for reason in resolved.reasons if reason.field == field]
    return found


def test_only_a_model_is_needed(model_dir):
    config, reasons = resolve({"model": model_dir}, NOTHING)
    assert config.model.path == config.model.tokenizer_path == model_dir
    assert config.numerics == "faithful"
    assert config.scheduler.max_num_seqs == 256
    assert config.scheduler.chunked_prefill is True
    assert config.cache.block_tokens == BLOCK_TOKENS == block_pool.BLOCK_TOKENS
    assert config.cache.num_blocks is None
    assert config.sampling.max_tokens == 16
    assert config.observe.logs_statistics
    assert {reason.field for reason in reasons} == {
        "model.tokenizer_path",
        "device.platform",
        "device.num_threads",
        "scheduler.max_model_len",
        "scheduler.max_num_batched_tokens",
        "speculation.num_tokens",
        "cache.memory_fraction",
        "cache.num_checkpoints",
    }


def test_every_option_fills_the_field_that_the_table_names(model_dir):
    config, _ = resolve({"model": model_dir}, NOTHING)
    for option in OPTIONS:
        value = operator.attrgetter(option.field)(config)
        if option.default not in (None, AUTO):
            assert value == option.default, option.name


def test_the_tree_is_frozen(model_dir):
    config, _ = resolve({"model": model_dir}, NOTHING)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.cache.num_blocks = 7


def test_argument_beats_variable_beats_default(model_dir):
    env = read_environment({"DEEPINFER_MAX_NUM_SEQS": "8", "DEEPINFER_NUMERICS": "float32"})
    from_variable = resolve({"model": model_dir}, env)
    assert from_variable.config.scheduler.max_num_seqs == 8
    assert "DEEPINFER_MAX_NUM_SEQS" in _reason(from_variable, "scheduler.max_num_seqs").why
    from_argument = resolve({"model": model_dir, "max_num_seqs": 4}, env)
    assert from_argument.config.scheduler.max_num_seqs == 4
    assert from_argument.config.numerics == "float32"
    assert not [reason for reason in from_argument.reasons if reason.field == "scheduler.max_num_seqs"]


def test_a_variable_of_another_type_fills_the_option_it_stands_for(model_dir):
    env = read_environment({"DEEPINFER_ENFORCE_EAGER": "1"})
    from_variable = resolve({"model": model_dir}, env)
    assert from_variable.config.device.graphs == "off"
    assert "DEEPINFER_ENFORCE_EAGER" in _reason(from_variable, "device.graphs").why
    assert resolve({"model": model_dir, "cuda_graphs": "lazy"}, env).config.device.graphs == "lazy"


def test_argument_auto_overrides_a_variable(model_dir):
    env = read_environment({"DEEPINFER_MAX_MODEL_LEN": "100"})
    assert resolve({"model": model_dir}, env).config.scheduler.max_model_len == 100
    assert resolve({"model": model_dir, "max_model_len": None}, env).config.scheduler.max_model_len == 100
    assert resolve({"model": model_dir, "max_model_len": "auto"}, env).config.scheduler.max_model_len == 1024


def test_model_may_come_from_the_variable(model_dir):
    env = read_environment({"DEEPINFER_HF_MODEL_DIR": str(model_dir)})
    assert resolve({}, env).config.model.path == model_dir


def test_automatic_values_and_their_reasons(model_dir):
    resolved = resolve({"model": model_dir, "max_num_seqs": 5000}, NOTHING)
    reason = _reason(resolved, "scheduler.max_model_len")
    assert str(reason) == "scheduler.max_model_len = 1024 (min(4096, max_position_embeddings 1024))"
    assert resolved.config.scheduler.max_num_batched_tokens == 25000, "a row and four drafts for each"
    assert "max_num_seqs 5000" in _reason(resolved, "scheduler.max_num_batched_tokens").why
    assert resolved.config.device.platform == "cpu"
    assert "not nvidia: " in _reason(resolved, "device.platform").why
    assert resolved.config.cache.memory_fraction == 0.5


def test_values_that_follow_from_others_stay_within_their_own_limits(tiny, tmp_path):
    """Nobody is told that an option which was not given is out of range."""
    tiny["text_config"]["dspark_block_size"] = 100
    (tmp_path / "config.json").write_text(json.dumps(tiny), encoding="utf-8")
    resolved = resolve({"model": tmp_path, "max_num_seqs": 1_000_000, "prefix_cache": "exact"}, NOTHING)
    assert resolved.config.cache.num_checkpoints == engine_config.MAX_CHECKPOINTS
    assert resolved.config.speculation.num_tokens == engine_config.MAX_DRAFTS
    assert str(engine_config.MAX_CHECKPOINTS) in _reason(resolved, "cache.num_checkpoints").why


def test_model_length_is_not_above_4096_by_itself(released, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(released), encoding="utf-8")
    assert resolve({"model": tmp_path}, NOTHING).config.scheduler.max_model_len == 4096
    longer = resolve({"model": tmp_path, "max_model_len": 20_000, "chunked_prefill": False}, NOTHING)
    assert longer.config.scheduler.max_num_batched_tokens == 20_000


def test_warnings_and_reasons_are_logged(model_dir, caplog):
    with caplog.at_level(logging.INFO, logger="deepinfer"):
        resolve({"model": model_dir}, read_environment({"DEEPINFER_MAX_NUM_SEQ": "1"}))
    assert "did you mean DEEPINFER_MAX_NUM_SEQS?" in caplog.text
    assert "scheduler.max_model_len = 1024" in caplog.text


def test_texts_from_a_command_line_are_parsed(model_dir):
    arguments = {"model": str(model_dir), "max_num_seqs": "4", "chunked_prefill": "0", "token_blacklist": "1-3,7"}
    config, _ = resolve(arguments, NOTHING)
    assert config.scheduler.max_num_seqs == 4
    assert config.scheduler.chunked_prefill is False
    assert config.sampling.token_blacklist == ((1, 3), (7, 7))


def test_names_of_other_engines_work(model_dir):
    arguments = {"model": model_dir, "gpu_memory_utilization": 0.8, "tokens_per_block": -1, "device": "cpu"}
    config, _ = resolve(arguments, NOTHING)
    assert config.cache.memory_fraction == 0.8
    assert config.cache.block_tokens == 128
    assert config.device.platform == "cpu"


def test_arguments_of_other_engines_pass_with_their_harmless_values(model_dir):
    arguments = {item.name: item.accepted[0] for item in FOREIGN}
    assert resolve({"model": model_dir, **arguments}, NOTHING) == resolve({"model": model_dir}, NOTHING)


# Arguments next to the model, and what the error has to name.
REFUSED = [
    ({"max_num_seq": 3}, ["max_num_seq'", "max_num_seqs"]),
    ({"frobnicate": 3}, ["frobnicate", "docs/configuration.md"]),
    ({"expert_parallel_size": 2}, ["expert_parallel_size", "2", "1"]),
    ({"tensor_parallel_size": 8}, ["tensor_parallel_size", "8", "one process"]),
    ({"memory_fraction": 0.5, "gpu_memory_utilization": 0.5}, ["memory_fraction", "gpu_memory_utilization"]),
    ({"gpu_memory_utilization": 1.5}, ["memory_fraction", "1.5", "(0, 1]"]),
    ({"memory_fraction": 0}, ["memory_fraction", "0"]),
    ({"max_num_seqs": 0}, ["max_num_seqs", "0"]),
    ({"max_num_seqs": 2.5}, ["max_num_seqs", "2.5", "int"]),
    ({"max_num_seqs": True}, ["max_num_seqs", "True"]),
    ({"max_num_seqs": "lots"}, ["max_num_seqs", "lots"]),
    ({"max_num_seqs": "auto"}, ["max_num_seqs", "auto"]),
    ({"max_num_batched_tokens": 255}, ["max_num_batched_tokens", "255", "max_num_seqs=256"]),
    ({"max_num_batched_tokens": 512, "chunked_prefill": False}, ["max_num_batched_tokens", "512", "1024"]),
    ({"max_model_len": 1025}, ["max_model_len", "1025", "1024"]),
    ({"max_model_len": 1}, ["max_model_len", "1"]),
    ({"prefill_keep_tokens": -1, "prefill_truncation": "mask"}, ["prefill_keep_tokens is -1"]),
    ({"tokenizer": ""}, ["tokenizer is ''", "the path is empty"]),
    ({"num_blocks": 1}, ["num_blocks", "1"]),
    ({"block_tokens": 64}, ["block_tokens", "64", "128"]),
    ({"numerics": "bf16"}, ["numerics", "bf16", "faithful, fast, float32"]),
    ({"load_format": "gguf"}, ["load_format", "gguf", "dummy"]),
    ({"accelerator": "tpu"}, ["accelerator", "tpu", "nvidia"]),
    ({"accelerator": "ascend"}, ["ascend", "not available, because"]),
    ({"num_threads": 0}, ["num_threads", "0"]),
    ({"num_threads": 100_000}, ["num_threads", "100000", "processors"]),
    ({"num_threads": 10**30}, ["num_threads", "processors"]),
    ({"grammar_workers": 0}, ["grammar_workers", "0"]),
    ({"grammar_workers": 100_000}, ["grammar_workers", "100000", "processors"]),
    ({"num_layers": 4}, ["num_layers", "4", "dummy"]),
    ({"num_layers": 0, "load_format": "dummy"}, ["num_layers", "0"]),
    ({"num_layers": 9, "load_format": "dummy"}, ["num_layers", "9", "8 layers"]),
    ({"default_temperature": -1}, ["default_temperature", "-1"]),
    ({"default_temperature": 1e39}, ["default_temperature", "1e+39", "float32"]),
    ({"default_top_p": 0}, ["default_top_p", "0"]),
    ({"default_top_k": 0}, ["default_top_k", "0"]),
    ({"default_max_tokens": 0}, ["default_max_tokens", "0"]),
    ({"token_blacklist": "500-512"}, ["token_blacklist", "500-512", "511"]),
    ({"seed": "x"}, ["seed", "x"]),
    ({"chunked_prefill": "yes"}, ["chunked_prefill", "yes"]),
]


@pytest.mark.parametrize(("arguments", "named"), REFUSED, ids=lambda item: str(item)[:50])
def test_bad_argument_is_refused_with_name_and_value(model_dir, arguments, named):
    with pytest.raises(ConfigError) as caught:
        resolve({"model": model_dir, **arguments}, NOTHING)
    for text in named:
        assert text in str(caught.value)
    assert not caught.value.what.startswith(("scheduler.", "device.", "cache.")), "the option, not our field"


@pytest.mark.parametrize(("processors", "most"), [(1, 256), (2, 256), (64, 512)])
def test_several_times_the_processors_is_the_most_threads(model_dir, monkeypatch, processors, most):
    monkeypatch.setattr(engine_config, "num_processors", lambda: processors)
    assert resolve({"model": model_dir, "num_threads": most}, NOTHING).config.device.num_threads == most
    with pytest.raises(ConfigError, match=f"ive a number up to {most};"):
        resolve({"model": model_dir, "num_threads": most + 1}, NOTHING)


def test_bad_choice_in_a_variable_names_the_variable(model_dir):
    with pytest.raises(ConfigError, match="DEEPINFER_NUMERICS is 'fp8'"):
        resolve({"model": model_dir}, read_environment({"DEEPINFER_NUMERICS": "fp8"}))


def test_no_model_says_how_to_give_one():
    with pytest.raises(ConfigError, match="DEEPINFER_HF_MODEL_DIR"):
        resolve({}, NOTHING)


def test_missing_model_directory_is_a_file_error(tmp_path):
    with pytest.raises(CheckpointFileError, match="does not exist"):
        resolve({"model": tmp_path / "nowhere"}, NOTHING)
