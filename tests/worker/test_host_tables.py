"""What the host keeps from step to step is what it would make anew."""

from __future__ import annotations

import random

import numpy as np

from deepinfer.messages import Chunk
from deepinfer.worker.device_step import SlotTables, padded_block_tables
from deepinfer.worker.ragged_rows import RaggedRows
from tests.engine.support import chunk_of


def _chunk(slot: int, table: tuple[int, ...]) -> Chunk:
    return chunk_of([5], 0, 1, table, slot, f"r{slot}")


def test_block_tables_by_slot_are_those_of_the_chunks() -> None:
    rng, known = random.Random(0), SlotTables(9)
    tables: dict[int, tuple[int, ...]] = {}
    for _ in range(300):
        slots = rng.sample(range(9), rng.randint(1, 8))
        for slot in slots:
            kind = rng.random()
            if slot not in tables or kind < 0.1:  # another sequence, perhaps with a shorter table
                tables[slot] = tuple(rng.sample(range(1, 99), rng.randint(1, 5)))
            elif kind < 0.3:  # another block
                tables[slot] = (*tables[slot], rng.randrange(1, 99))
        chunks = [_chunk(slot, tables[slot]) for slot in slots]
        found, expected = known.of(chunks), padded_block_tables(chunks)
        assert found.dtype == expected.dtype
        assert np.array_equal(found, expected)


def test_tables_of_a_step_are_not_changed_by_the_next() -> None:
    known = SlotTables(4)
    first = known.of([_chunk(1, (7, 8)), _chunk(2, (9,))])
    known.of([_chunk(1, (3, 4)), _chunk(2, (5, 6, 1))])
    assert first.tolist() == [[7, 8], [9, 0]]


def test_last_rows() -> None:
    rows = RaggedRows.of_chunks(
        [chunk_of(list(range(9)), 0, count, (1,), slot) for slot, count in ((1, 3), (2, 1), (3, 4))]
    )
    assert rows.last_rows([1, 1, 4]).tolist() == [2, 3, 4, 5, 6, 7]
    assert rows.last_rows([0, 0, 0]).tolist() == []
    assert rows.last_rows([3, 1, 2]).tolist() == [0, 1, 2, 3, 6, 7]
    assert (rows.starts.tolist(), rows.counts.tolist(), rows.slots.tolist()) == ([0, 0, 0], [3, 1, 4], [1, 2, 3])
