"""One random tiny checkpoint for all tests of the doors, and one ``LLM`` over it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from deepinfer.checkpoint.random_checkpoint import make_random_checkpoint
from deepinfer.checkpoint.tiny import tiny_config
from deepinfer.entrypoints.llm import LLM

SMALL = {"max_model_len": 160, "max_num_seqs": 4, "num_threads": 1, "num_speculative_tokens": 0, "progress": False}
"""Drafts of random weights are never right, so speculation only costs time here; one test turns it on."""


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Settings of whoever runs the tests must not change them, nor the tests that person's cache directory."""
    for name in os.environ:
        if name.startswith("DEEPINFER_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Several shards, so that one can go missing."""
    directory = tmp_path_factory.mktemp("models") / "tiny"
    make_random_checkpoint(directory, tiny_config(vision=False), seed=0, max_shard_bytes=3_000_000)
    assert len(list(directory.glob("*.safetensors"))) > 1
    return directory


@pytest.fixture
def own_model(model_path: Path, tmp_path: Path) -> Path:
    """A copy that a test may break."""
    return Path(shutil.copytree(model_path, tmp_path / "model"))


@pytest.fixture(scope="session")
def shared_llm(model_path: Path) -> LLM:
    return LLM(model_path, **SMALL)


@pytest.fixture
def llm(shared_llm: LLM) -> Iterator[LLM]:
    """The shared engine; nothing may be left in it when the test ends."""
    yield shared_llm
    shared_llm.engine.check()
    assert not shared_llm.engine.has_work(), "the test left a request in the engine"
    assert shared_llm.engine.scheduler.usage == 0, "the test left blocks in use"
