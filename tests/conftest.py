"""Shared by all tests: one thread per process, fixed seeds, and where the golden numbers are."""

from __future__ import annotations

import os
import random
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings

# Read by torch when it is imported. pytest-xdist runs one process per core, so more threads would only fight.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The same examples in every run, so that a failure is a fact; no deadlines, since a busy machine is not a bug.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked slow run with ``-m slow`` only; each has a sampled sister that always runs."""
    if "slow" in config.option.markexpr:
        return
    slow = {item for item in items if item.get_closest_marker("slow")}
    if slow:
        config.hook.pytest_deselected(items=list(slow))
        items[:] = [item for item in items if item not in slow]


@pytest.fixture(autouse=True)
def _fixed_seeds() -> None:
    """Same random numbers for every test, whatever ran before it. torch is touched only where a test imported it."""
    random.seed(0)
    np.random.seed(0)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)
        torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def _ctrl_c_is_heard() -> None:
    """A shell without job control starts what runs in its background deaf to Ctrl-C, and tests press it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def golden_dir() -> Path:
    """Small checkpoints, and what independent implementations compute on them."""
    return Path(__file__).parent / "golden"
