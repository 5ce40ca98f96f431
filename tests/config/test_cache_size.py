"""How many blocks are made: all that could be used, no more than fit, and an error with the arithmetic."""

from __future__ import annotations

import json
import logging

import pytest

from deepinfer.config.cache_size import size_cache
from deepinfer.config.env import read_environment
from deepinfer.config.resolve import resolve
from deepinfer.errors import CapacityError

MIB = 2**20


@pytest.fixture
def config(tiny, tmp_path):
    """4 sequences of 1024 tokens: 8 blocks each, 33 with the null block."""
    (tmp_path / "config.json").write_text(json.dumps(tiny), encoding="utf-8")
    return resolve({"model": tmp_path, "max_num_seqs": 4, "memory_fraction": 0.5}, read_environment({})).config


def test_plenty_of_memory_gives_what_can_be_used(config):
    sized, reason = size_cache(config, bytes_per_block=MIB, fixed_bytes=MIB, available_bytes=1000 * MIB)
    assert sized.cache.num_blocks == 4 * 8 + 1
    assert "4 sequences of 1024 tokens" in str(reason)
    assert config.cache.num_blocks is None


def test_little_memory_gives_what_fits(config):
    sized, reason = size_cache(config, bytes_per_block=MIB, fixed_bytes=MIB, available_bytes=42 * MIB)
    assert sized.cache.num_blocks == 42 // 2 - 1
    assert "of 33 for 4 sequences" in str(reason)


@pytest.mark.parametrize("available", [0, 19])
def test_less_than_one_sequence_is_an_error_with_the_arithmetic(config, available):
    with pytest.raises(CapacityError, match="needs 8 and the null block") as caught:
        size_cache(config, bytes_per_block=MIB, fixed_bytes=MIB, available_bytes=available * MIB)
    assert "MiB per block" in str(caught.value)
    assert size_cache(config, bytes_per_block=MIB, fixed_bytes=MIB, available_bytes=20 * MIB)[0].cache.num_blocks == 9


def test_model_without_streams_needs_only_its_slots(config):
    sized, _ = size_cache(config, bytes_per_block=0, fixed_bytes=MIB, available_bytes=2 * MIB)
    assert sized.cache.num_blocks == 33
    with pytest.raises(CapacityError):
        size_cache(config, bytes_per_block=0, fixed_bytes=2 * MIB, available_bytes=2 * MIB)


def test_given_number_is_kept_if_it_fits(tiny, tmp_path, caplog):
    (tmp_path / "config.json").write_text(json.dumps(tiny), encoding="utf-8")
    given = resolve({"model": tmp_path, "num_blocks": 5}, read_environment({})).config
    with caplog.at_level(logging.WARNING):
        sized, reason = size_cache(given, bytes_per_block=MIB, fixed_bytes=MIB, available_bytes=6 * MIB)
    assert sized is given
    assert reason is None
    assert "512 tokens" in caplog.text
    with pytest.raises(CapacityError, match="num_blocks is 5"):
        size_cache(given, bytes_per_block=MIB, fixed_bytes=MIB, available_bytes=5 * MIB)
