"""Checkpoints shared by the engine tests; tests marked slow run with ``-m slow`` only."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.support import make_checkpoint


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint of the tiny configuration (spec 11)."""
    return make_checkpoint(tmp_path_factory.mktemp("tiny") / "model")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "slow" in config.option.markexpr:
        return
    here = Path(__file__).parent
    left_out = [item for item in items if here in item.path.parents and item.get_closest_marker("slow")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]
