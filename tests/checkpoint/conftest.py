"""A small checkpoint on disk, and a copy of it that a test may break."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from deepinfer.checkpoint import make_random_checkpoint, tiny_config
from deepinfer.config.model import ModelConfig
from tests.checkpoint.raw_files import RawCheckpoint, read_raw


@pytest.fixture(scope="session")
def config() -> ModelConfig:
    return tiny_config(n_routed_experts=2, dspark_n_routed_experts=2)


@pytest.fixture(scope="session")
def pristine(config: ModelConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Never write to this one."""
    directory = tmp_path_factory.mktemp("checkpoint") / "tiny"
    make_random_checkpoint(directory, config, seed=7, max_shard_bytes=2_000_000)
    return directory


@pytest.fixture
def broken(pristine: Path, tmp_path: Path) -> RawCheckpoint:
    """A copy to change; call ``write()`` after changing it."""
    shutil.copytree(pristine, tmp_path / "broken")
    return read_raw(tmp_path / "broken")
