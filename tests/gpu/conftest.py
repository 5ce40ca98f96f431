"""The model of the tests on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.support import make_checkpoint


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint of the tiny configuration."""
    return make_checkpoint(tmp_path_factory.mktemp("tiny") / "model")
