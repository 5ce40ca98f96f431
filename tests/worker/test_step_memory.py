"""What memory plans count with is what the fused layers do. The plans know neither them nor Triton."""

from __future__ import annotations

import importlib.util
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

from deepinfer.kvcache import memory_plan, sublayer_memory

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")


def test_sizes_of_blocks_are_those_of_the_kernels() -> None:
    from deepinfer.kernels.indexer import selection
    from deepinfer.kernels.moe import grouped_wgmma
    from deepinfer.models import fused_v41

    assert sublayer_memory.EXPERT_BLOCK == grouped_wgmma.BLOCK
    assert memory_plan.HEAD_ROWS == fused_v41.HEAD_ROWS
    assert memory_plan.INDEX_SCRATCH_BYTES == selection.SCRATCH_BYTES


class _Head:
    """A product by a matrix that is written where it is asked for."""

    def __init__(self, weight: Tensor) -> None:
        self.weight, self.num_outputs = weight, len(weight)
        self.outputs: list[Tensor] = []

    def forward(self, hidden: Tensor, out: Tensor | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
        out = torch.empty(len(hidden), self.num_outputs, dtype=dtype) if out is None else out
        self.outputs.append(out)
        return out.copy_(hidden.float() @ self.weight.float().T)


@pytest.mark.parametrize("rows", [0, 1, 64, 65, 130])
def test_invariant_logits_are_made_in_one_piece_of_memory(rows: int) -> None:
    from deepinfer.models.fused_v41 import FusedV41

    torch.manual_seed(1)
    head, hidden = _Head(torch.randn(40, 32, dtype=torch.bfloat16)), torch.randn(rows, 32, dtype=torch.bfloat16)
    model: Any = SimpleNamespace(invariant=True)
    found = FusedV41.vocabulary_product(model, head, hidden)  # type: ignore[arg-type]
    assert found.dtype == torch.float32
    assert [len(out) for out in head.outputs] == [64] * -(-rows // 64), "always the same number of rows"
    assert all(out.untyped_storage().data_ptr() == found.untyped_storage().data_ptr() for out in head.outputs)
    torch.testing.assert_close(found, hidden.float() @ head.weight.float().T)
