"""The first streams of a step in one launch against torch."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from deepinfer.kernels.first_streams import first_streams

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("rows", "hidden", "streams"), [(1, 96, 4), (7, 1030, 4), (3, 64, 3)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_streams_are_embeddings(rows: int, hidden: int, streams: int, dtype: torch.dtype, device: torch.device):
    embedding = torch.randn(50, hidden).bfloat16().to(device)
    ids = torch.randint(0, 50, (rows,)).to(dtype).to(device)
    trunk, read_mix = first_streams(ids, embedding, streams)
    expected = functional.embedding(ids.long(), embedding)
    assert torch.equal(trunk, expected[:, None].expand(-1, streams, -1))
    assert torch.equal(read_mix, torch.eye(streams, device=device)[:1].expand(rows, -1))


def test_no_rows(device: torch.device):
    trunk, read_mix = first_streams(
        torch.empty(0, dtype=torch.int32).to(device), torch.ones(5, 64).bfloat16().to(device), 4
    )
    assert trunk.shape == (0, 4, 64)
    assert read_mix.shape == (0, 4)
