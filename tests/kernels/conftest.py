"""Kernels run through Triton's interpreter here, and natively where there is a GPU."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["test_*.py", "*/test_*.py"]

if not collect_ignore_glob and not torch.cuda.is_available():
    from tests.kernels.interpreter import repair

    repair()


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where the kernels under test run."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
