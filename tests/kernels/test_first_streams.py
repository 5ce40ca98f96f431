"""The first streams of a step in one launch against torch."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from deepinfer.kernels.first_streams import first_streams

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("rows", "hidden", "streams"), [(1, 96, 4), (7, 1030, 4), (3, 64, 3)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("is_chained", [False, True])
def test_streams_are_embeddings_of_the_filled_ids(
    rows: int, hidden: int, streams: int, dtype: torch.dtype, is_chained: bool, device: torch.device
):
    embedding = torch.randn(50, hidden).bfloat16().to(device)
    table = torch.randint(0, 50, (2, rows)).to(dtype).to(device)
    ids, newest, slots = table[1], torch.randint(0, 50, (9,), dtype=torch.int32).to(device), None
    expected_ids = ids
    if is_chained:
        slots = torch.randint(0, 9, (rows,), dtype=torch.int32).to(device)
        ids[::2] = -1
        expected_ids = torch.where(ids < 0, newest[slots.long()].to(dtype), ids)
    trunk, read_mix = first_streams(ids, embedding, streams, newest if is_chained else None, slots)
    expected = functional.embedding(expected_ids.long(), embedding)
    assert torch.equal(trunk, expected[:, None].expand(-1, streams, -1))
    assert torch.equal(read_mix, torch.eye(streams, device=device)[:1].expand(rows, -1))


def test_no_rows(device: torch.device):
    trunk, read_mix = first_streams(
        torch.empty(0, dtype=torch.int32).to(device), torch.ones(5, 64).bfloat16().to(device), 4
    )
    assert trunk.shape == (0, 4, 64)
    assert read_mix.shape == (0, 4)
