"""The device's layout of draft blocks says what the host's says, and the kernel what the layout says."""

from __future__ import annotations

import importlib.util
import os
import random

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

from deepinfer.layers.caches import CacheGeometry
from deepinfer.layers.fused.draft_rows import DraftExpander
from deepinfer.ops.rope import rope_angles, rope_frequencies
from deepinfer.worker.draft_batch import build_draft_batch

GEOMETRY = CacheGeometry(num_blocks=64, num_slots=9, window=16, ring_length=22, pair_ring_length=7)
FREQUENCIES = rope_frequencies(1e4, 8, None)
CPU = torch.device("cpu")


def random_requests(rng: random.Random, count: int) -> tuple[list[int], list[int], list[int]]:
    """Anchors, floors (some of them late, one behind the anchor) and slots."""
    anchors = [rng.choice((0, 1, 14, 15, 16, rng.randint(17, 900))) for _ in range(count)]
    floors = [rng.choice((0, 0, rng.randint(0, anchor + 1))) for anchor in anchors]
    return anchors, floors, rng.sample(range(1, 9), count)


def int32(*columns: list[int]) -> list[torch.Tensor]:
    return [torch.tensor(column, dtype=torch.int32) for column in columns]


@pytest.mark.parametrize("block", [1, 3, 5])
@pytest.mark.parametrize("seed", range(5))
def test_equal_to_the_layout_of_the_host(seed: int, block: int) -> None:
    rng = random.Random(seed)
    count = rng.randint(1, 6)
    anchors, floors, slots = random_requests(rng, count)
    expected = build_draft_batch(anchors, floors, slots, block, GEOMETRY, CPU)
    expander = DraftExpander(GEOMETRY, block, FREQUENCIES)
    padding = rng.randint(0, 2)
    rows = expander.expand(*int32(anchors + [-1] * padding, floors + [-1] * padding, slots + [-1] * padding))
    live = count * block
    assert torch.equal(rows.positions[:live].long(), expected.positions)
    places = np.concatenate((np.arange(live), -2 - expected.window.previous.numpy()))
    index = expected.window.index.numpy()
    for row in range(live):
        wanted = [int(places[place]) for place in index[row] if place >= 0]
        assert [place for place in rows.window_index[row].tolist() if place != -1] == wanted
    assert torch.equal(rows.plain_angles[0][:live], rope_angles(expected.positions, FREQUENCIES)[0])
    for tensor in (rows.positions, rows.window_index):
        assert (tensor[live:] == -1).all()
    assert (rows.ring_slot == -1).all()


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
@pytest.mark.parametrize("block", [1, 5])
def test_one_launch_gives_the_same(block: int) -> None:
    from deepinfer.kernels.draft_tables import draft_tables

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    anchors, floors, slots = random_requests(random.Random(block), 6)
    inputs = [each.to(device) for each in int32([*anchors, -1], [*floors, 5], [*slots, -1])]
    frequencies = FREQUENCIES.to(device)
    geometry = {"window": GEOMETRY.window, "ring_length": GEOMETRY.ring_length}
    positions, index, angles = draft_tables(*inputs, frequencies, block=block, **geometry)
    expected = DraftExpander(GEOMETRY, block, frequencies).reference(*inputs)
    assert torch.equal(positions, expected[0])
    assert torch.equal(index, expected[1])
    for found, wanted in zip(angles, expected[2], strict=True):
        assert int((found.view(torch.int32).long() - wanted.view(torch.int32).long()).abs().max()) <= 1
