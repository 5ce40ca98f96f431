"""Checkpoints shared by the engine tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.support import make_checkpoint


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint of the tiny configuration (spec 11)."""
    return make_checkpoint(tmp_path_factory.mktemp("tiny") / "model")
