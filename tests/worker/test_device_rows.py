"""The device's per-row tables say what the host's step views say."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from deepinfer.layers.caches import CacheGeometry
from deepinfer.layers.fused.device_rows import DeviceRows, RowExpander, fits_spare_room
from deepinfer.messages import Chunk, StepPlan
from deepinfer.ops.rope import rope_angles, rope_frequencies
from deepinfer.worker.device_step import host_table, padded_block_tables, token_ids
from deepinfer.worker.ragged_rows import RaggedRows
from deepinfer.worker.step_batch import StepBatch, StepBatchBuilder

GEOMETRY = CacheGeometry(num_blocks=64, num_slots=9, window=16, ring_length=22, pair_ring_length=7)
CPU = torch.device("cpu")
FREQUENCIES = rope_frequencies(1e4, 8, None), rope_frequencies(1.6e5, 8, None)


def random_chunks(rng: random.Random, longest: int) -> tuple[Chunk, ...]:
    slots = rng.sample(range(1, GEOMETRY.num_slots), rng.randint(1, 6))
    chunks = []
    for slot in slots:
        start, count = rng.choice((0, 1, 2, rng.randint(3, 400))), rng.randint(1, longest)
        blocks = rng.sample(range(1, 64), (start + count) // 128 + 1 + rng.randint(0, 2))
        floor = rng.choice((0, 0, rng.randint(0, start + 2)))
        entry_floor = rng.choice((0, start, start + rng.randint(0, count)))
        ids = tuple(rng.randrange(100) for _ in range(count))
        history = tuple(rng.randrange(100) for _ in range(min(start, 3)))
        chunks.append(
            Chunk(str(slot), start, ids, history, tuple(blocks), slot, 1, True, floor, entry_floor, decoder_floor=0)
        )
    return tuple(chunks)


def both(chunks: tuple[Chunk, ...], keys_first: bool) -> tuple[StepBatch, DeviceRows]:
    batch = StepBatchBuilder(GEOMETRY, {0, 1, 2}, 4, CPU).build(StepPlan(0, chunks))
    ragged = RaggedRows.of_chunks(chunks)
    host = host_table(ragged, token_ids(chunks, ragged.total), padded_block_tables(chunks))
    expander = RowExpander(GEOMETRY, (1, 2), *FREQUENCIES)
    rows = expander.expand(torch.from_numpy(host.table), torch.from_numpy(host.block_tables), keys_first, host.spans)
    return batch, rows


@pytest.mark.parametrize("keys_first", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_equal_to_step_views(seed: int, keys_first: bool) -> None:
    rng = random.Random(seed)
    chunks = random_chunks(rng, 6 if keys_first else 60)
    assert not keys_first or all(fits_spare_room(chunk.num_rows, GEOMETRY) for chunk in chunks)
    batch, rows = both(chunks, keys_first)
    ring, total = batch.window, rows.num_rows
    # window keys: the same sequence of places, wherever a step view keeps them
    places = np.concatenate((np.arange(total), -2 - ring.previous.numpy()))
    index = ring.index.numpy()
    expected = np.where(index >= 0, places[np.maximum(index, 0)], -1)
    found = rows.window_index.numpy()[:, -expected.shape[1] :]
    assert (rows.window_index.numpy()[:, : -expected.shape[1]] == -1).all()
    if keys_first:
        table = RaggedRows.of_chunks(chunks)
        own = table.slots[table.sequence] * GEOMETRY.ring_length + table.positions % GEOMETRY.ring_length
        expected = np.where(expected >= 0, -2 - own[np.maximum(expected, 0)], expected)
    assert (found == expected).all()
    stored = np.full(total, -1)
    stored[ring.store_rows] = ring.store_slots
    assert (rows.ring_slot.numpy() == stored).all()
    for ratio, view in batch.streams.items():
        stream = rows.streams[ratio]
        assert torch.equal(stream.num_visible.long(), view.num_visible)
        emitted = torch.full((total,), -1)
        emitted[view.emit_rows] = view.emit_slots
        assert torch.equal(stream.emit_slot.long(), emitted)
        wanted = rope_angles(view.emit_positions, FREQUENCIES[1])
        for mine, theirs in zip(stream.entry_angles, wanted, strict=True):
            assert torch.equal(mine[view.emit_rows], theirs)
        if ratio == 2:
            pairs = view.pairs
            assert pairs is not None
            assert stream.partner is not None
            assert stream.pair_store_slot is not None
            places = np.concatenate((np.arange(total), -2 - pairs.previous.numpy()))
            assert (stream.partner[view.emit_rows].numpy() == places[pairs.partner_index]).all()
            kept = np.full(total, -1)
            kept[pairs.store_rows] = pairs.store_slots
            assert (stream.pair_store_slot.numpy() == kept).all()
    assert torch.equal(rows.plain_angles[0], rope_angles(batch.positions, FREQUENCIES[0])[0])


def test_padding_rows_see_and_write_nothing() -> None:
    table = torch.zeros(8, 3, dtype=torch.int32)
    table[1] = -1
    rows = RowExpander(GEOMETRY, (1, 2), *FREQUENCIES).expand(table, torch.ones(3, 2, dtype=torch.int32), True)
    for tensor in (rows.window_index, rows.ring_slot, rows.streams[1].emit_slot, rows.streams[2].emit_slot):
        assert (tensor == -1).all()
    assert rows.streams[2].partner is not None
    assert rows.streams[2].pair_store_slot is not None
    assert (rows.streams[2].partner == -1).all()
    assert (rows.streams[2].pair_store_slot == -1).all()
    assert not rows.streams[1].num_visible.any()
    assert not rows.streams[2].num_visible.any()
