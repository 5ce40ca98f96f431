"""Shared by all tests: one thread per process, fixed seeds, and where the golden numbers are."""

from __future__ import annotations

import os
import random
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


@pytest.fixture(autouse=True)
def _fixed_seeds() -> None:
    """Same random numbers for every test, whatever ran before it. torch is touched only where a test imported it."""
    random.seed(0)
    np.random.seed(0)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)
        torch.manual_seed(0)


@pytest.fixture(scope="session")
def golden_dir() -> Path:
    """Small checkpoints, and what independent implementations compute on them."""
    return Path(__file__).parent / "golden"
