"""The plan of a whole engine: what is counted as weights, and that it follows the options."""

from __future__ import annotations

import json

import pytest

from deepinfer.checkpoint import tiny_config
from deepinfer.checkpoint.released import released_config
from deepinfer.checkpoint.released_slice import released_slice
from deepinfer.config.env import read_environment
from deepinfer.config.model_file import model_config_to_dict
from deepinfer.config.resolve import resolve
from deepinfer.engine.memory_planning import plan_device_memory
from deepinfer.errors import CapacityError

H200 = int(139.8 * 2**30)


def config_of(model, tmp_path, **arguments):
    (tmp_path / "config.json").write_text(json.dumps(model_config_to_dict(model)), encoding="utf-8")
    return resolve({"model": tmp_path, **arguments}, read_environment({})).config


def test_slice_fits_on_one_gpu(tmp_path):
    model = released_slice(engram_vocab_size=1_000_000)
    plan = plan_device_memory(config_of(model, tmp_path, max_num_seqs=64, max_model_len=8192), model, H200)
    assert plan.num_tokens == 64 * 8192
    names = [item.name for item in plan.weights]
    assert "routed experts" in names
    assert "engram tables" not in names
    assert "draft" not in names


def test_drafts_count_when_they_are_used(tmp_path):
    model = tiny_config()
    without = plan_device_memory(config_of(model, tmp_path, num_speculative_tokens=0), model, 8 * 2**30)
    config = config_of(model, tmp_path, num_speculative_tokens=3)
    with_drafts = plan_device_memory(config, model, 8 * 2**30)
    assert with_drafts.weight_bytes > without.weight_bytes
    assert with_drafts.reserve_bytes > without.reserve_bytes


def test_whole_model_is_refused_with_the_arithmetic(tmp_path):
    model = released_config()
    with pytest.raises(CapacityError, match="routed experts: 28") as caught:
        plan_device_memory(config_of(model, tmp_path), model, H200)
    assert "keep fewer layers" in str(caught.value)
