"""Operators on nothing: sequences without entries, rows without keys, empty selections."""

from __future__ import annotations

import pytest
import torch

from deepinfer.ops.attention import sparse_attention
from deepinfer.ops.compress import pool_pairs
from deepinfer.ops.index_select import index_candidates, index_full, top_blocks, top_entries
from deepinfer.ops.moe import ExpertWeights, moe
from deepinfer.ops.records import Float32Record, RecordStore
from deepinfer.ops.step_views import ChunkSpan, RingView, StreamView

EMPTY = torch.empty(0, dtype=torch.int64)


def blind_stream(rows: int) -> StreamView:
    """Sequences of one token at ratio 2: no entry is complete. The only block of each table is the null block."""
    return StreamView(
        ratio=2,
        entries_per_block=4,
        num_visible=torch.zeros(rows, dtype=torch.int64),
        max_visible=0,
        sequence=torch.arange(rows),
        block_tables=torch.zeros(rows, 1, dtype=torch.int64),
        spans=tuple(ChunkSpan(row, row + 1, 0) for row in range(rows)),
        emit_rows=EMPTY,
        emit_slots=EMPTY,
        emit_positions=EMPTY,
        pairs=None,
    )


def poisoned_store(dim: int, slots: int = 4) -> RecordStore:
    store = RecordStore.allocate(Float32Record(dim), slots, torch.device("cpu"))
    store.data[:] = torch.nan
    return store


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_nothing_visible_selects_nothing(rows: int) -> None:
    """G2: batch of one with length zero, and all lengths zero: empty selections, and nothing outside is read."""
    query, weights = torch.ones(rows, 2, 32), torch.ones(rows, 2)
    stream, store = blind_stream(rows), poisoned_store(32)
    selected, blocks = index_full(query, weights, store, stream, 6, False, (4, 2))
    assert selected.shape == (rows, 0)
    assert blocks is None
    none = torch.full((rows, 2), -1, dtype=torch.int64)
    again = index_candidates(query, weights, store, stream, none, 4, 6, False)
    assert (again == -1).all()
    assert top_entries(torch.full((rows, 5), torch.nan), torch.zeros(rows, 5, dtype=torch.bool), 3).eq(-1).all()
    assert top_blocks(torch.ones(rows, 5), torch.zeros(rows, dtype=torch.int64), 2, 2).eq(-1).all()


@pytest.mark.parametrize("rows", [1, 4])
def test_attention_of_rows_without_any_entry_reads_no_store(rows: int) -> None:
    """G2: the window holds the row itself only, the selection is all padding, every store is NaN."""
    keys = torch.arange(rows * 32, dtype=torch.float32).view(rows, 32)
    window = RingView(index=torch.arange(rows)[:, None], previous=EMPTY, store_rows=EMPTY, store_slots=EMPTY)
    sink = torch.full((2,), -torch.inf, dtype=torch.float64)
    selection = (torch.full((rows, 3), -1, dtype=torch.int64), poisoned_store(32), blind_stream(rows))
    for chosen in (None, selection):
        context = sparse_attention(torch.ones(rows, 2, 32), keys, poisoned_store(32), window, sink, chosen)
        assert torch.equal(context, keys[:, None].expand(-1, 2, -1))


def test_a_row_without_any_key_leaves_all_to_the_sink() -> None:
    """G2, padding: a row that sees no key at all gives zeros, not NaN."""
    window = RingView(index=torch.tensor([[-1, -1]]), previous=EMPTY, store_rows=EMPTY, store_slots=EMPTY)
    keys = torch.full((1, 32), torch.nan)
    context = sparse_attention(torch.ones(1, 2, 32), keys, poisoned_store(32), window, torch.zeros(2).double(), None)
    assert torch.equal(context, torch.zeros(1, 2, 32))


def test_no_rows_at_all() -> None:
    """G2: operators that a step may call with nothing to do."""
    assert pool_pairs(torch.empty(0, 2, 32), torch.empty(0, 2, 32), torch.float32).shape == (0, 32)
    expert = ExpertWeights(torch.ones(16, 32).double(), torch.ones(32, 8).double())
    none = torch.empty(0, 2, dtype=torch.int64)
    assert moe(torch.empty(0, 32), none, none.double(), [expert] * 3, expert, 1.0, False).shape == (0, 32)
