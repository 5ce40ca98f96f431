"""On a GPU, batch-invariant: a request's output does not depend on what else the engine does, and how.

Grammars, penalties, log-probabilities, stops, prefix hits, preemption and drafts take turns in one engine, so chained
steps and steps that the host waits for follow each other in every order.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.engine.requests import mixed_cases
from tests.engine.test_circumstances import EVERYTHING, compare_everything

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("name", EVERYTHING)
def test_everything_in_the_mix_changes_nothing(path: Path, name: str) -> None:
    compare_everything(path, mixed_cases(24, seed=7), [name], accelerator="nvidia", batch_invariant=True)
