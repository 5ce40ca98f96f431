"""The one-launch tables of a step are those of ``RowExpander``."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.config.model import YarnConfig
from deepinfer.kernels.step_tables import _sine_cosine, step_tables
from deepinfer.layers.caches import BLOCK_TOKENS, CacheGeometry
from deepinfer.layers.fused.device_rows import Column, RowExpander
from deepinfer.ops.rope import rope_frequencies

pytestmark = pytest.mark.gpu
GEOMETRY = CacheGeometry(num_blocks=64, num_slots=9, window=24, ring_length=30, pair_ring_length=7)


def _ulps(found: Tensor, expected: Tensor) -> Tensor:
    """Distance in units of the last place."""
    return (found.view(torch.int32).long() - expected.view(torch.int32).long()).abs()


def _table(rng: random.Random, num_chunks: int, longest: int, padding: int) -> Tensor:
    """Chunks of random sequences, then padding rows."""
    columns: list[list[int]] = []
    for sequence in range(num_chunks):
        start, count = rng.choice((0, 1, rng.randint(2, 900))), rng.randint(1, longest)
        floor, entry_floor = rng.choice((0, rng.randint(0, start + 2))), rng.choice((0, start + rng.randint(0, count)))
        columns += [
            [7, position, 1 + sequence, floor, start, start + count, entry_floor, sequence]
            for position in range(start, start + count)
        ]
    columns += [[0, -1, 0, 0, 0, 0, 0, 0]] * padding
    assert len(columns[0]) == len(Column)
    return torch.tensor(columns, dtype=torch.int32).T.contiguous()


@pytest.mark.parametrize("keys_first", [False, True])
@pytest.mark.parametrize(("num_chunks", "longest", "padding"), [(1, 1, 0), (5, 6, 3), (2, 40, 1)])
def test_equal_to_the_expander(num_chunks: int, longest: int, padding: int, keys_first: bool, device: torch.device):
    rng = random.Random(num_chunks)
    table = _table(rng, num_chunks, longest, padding).to(device)
    blocks = [[rng.randrange(64) for _ in range(8)] for _ in range(num_chunks)]
    block_tables = torch.tensor(blocks, dtype=torch.int32, device=device)
    yarn = YarnConfig(factor=16.0, beta_fast=32.0, beta_slow=1.0, original_max_position_embeddings=4096)
    plain, compressed = (rope_frequencies(1e4, 24, None), rope_frequencies(1.6e5, 24, yarn))
    plain, compressed = plain.to(device), compressed.to(device)
    expected = RowExpander(GEOMETRY, (1, 2), plain, compressed).reference(table, block_tables, keys_first)
    found = step_tables(
        table,
        block_tables,
        plain,
        compressed,
        keys_first=keys_first,
        ratios=(1, 2),
        window=GEOMETRY.window,
        ring_length=GEOMETRY.ring_length,
        pair_ring_length=GEOMETRY.pair_ring_length,
        block_tokens=BLOCK_TOKENS,
    )
    assert torch.equal(found.ring_slot, expected.ring_slot)
    assert torch.equal(found.window_index, expected.window_index)
    angles = [(found.plain_angles, expected.plain_angles), (found.compressed_angles, expected.compressed_angles)]
    for ratio, stream in expected.streams.items():
        mine = found.streams[ratio]
        for name in ("num_visible", "emit_slot", "partner", "pair_store_slot"):
            one, other = getattr(mine, name), getattr(stream, name)
            assert (one is None) == (other is None)
            assert one is None or torch.equal(one, other), (ratio, name)
        angles.append((mine.entry_angles, stream.entry_angles))
    for pairs in angles:
        for one, other in zip(*pairs, strict=True):
            assert one.is_contiguous()
            assert int(_ulps(one, other).max()) <= 1


@triton.jit
def _angles_kernel(angle, sine, cosine, block: tl.constexpr):
    place = tl.program_id(0) * block + tl.arange(0, block)
    by_sine, by_cosine = _sine_cosine(tl.load(angle + place))
    tl.store(sine + place, by_sine)
    tl.store(cosine + place, by_cosine)


def test_angles_up_to_a_million_positions_are_those_of_the_reference(device: torch.device):
    """Also beside multiples of a quarter turn, where a sine or cosine is small and keeps its relative precision."""
    positions = torch.cat((torch.arange(64), torch.randint(0, 2**20, (960,)))).double()
    frequencies = torch.cat((rope_frequencies(1e4, 64, None), rope_frequencies(1.6e5, 64, None)))
    angle = (positions[:, None] * frequencies).flatten()
    quarters = (torch.randint(0, 600_000, (4096,)).double() * (np.pi / 2)).nextafter(torch.tensor(0.0).double())
    angle = torch.cat((angle, quarters)).to(device)
    sine, cosine = (torch.empty(len(angle), device=device) for _ in range(2))
    _angles_kernel[(len(angle) // 4096,)](angle, sine, cosine, block=4096, enable_fp_fusion=False)
    assert len(angle) % 4096 == 0
    for found, expected in ((sine, angle.sin().float()), (cosine, angle.cos().float())):
        distance = _ulps(found, expected)
        assert int(distance.max()) <= 1
        assert int((distance > 0).sum()) <= 2
