"""Selection against a sort written for reading: ties, signed zeros, short rows, hidden NaN."""

import pytest
import torch

from deepinfer.ops.index_select import index_candidates, index_full, top_blocks, top_entries
from deepinfer.ops.records import Float32Record, RecordStore
from deepinfer.ops.step_views import ChunkSpan, StreamView


def naive_top(scores: list[float], count: int) -> list[int]:
    order = sorted(range(len(scores)), key=lambda j: (-scores[j] if scores[j] else 0.0, j))
    return sorted(order[:count])


@pytest.mark.parametrize("n", [1, 5, 33])
@pytest.mark.parametrize("count", [1, 4, 40])
def test_lowest_index_wins_ties(n, count):
    generator = torch.Generator().manual_seed(n * 100 + count)
    scores = torch.randint(-2, 3, (20, n), generator=generator).float()
    scores[::2] = torch.where(scores[::2] == 0, -0.0, scores[::2])
    num_visible = torch.randint(0, n + 1, (20,), generator=generator)
    visible = torch.arange(n) < num_visible.unsqueeze(-1)
    hidden = torch.where(visible, scores, torch.nan)
    picked = top_entries(hidden, visible, count)
    assert picked.shape == (20, min(n, count))
    for row in range(20):
        expected = naive_top(scores[row, : num_visible[row]].tolist(), count)
        assert [j for j in picked[row].tolist() if j >= 0] == expected
        assert picked[row].tolist()[len(expected) :] == [-1] * (picked.shape[1] - len(expected))


def test_zero_and_minus_zero_are_equal():
    scores = torch.tensor([[-0.0, 0.0, -0.0, 0.0]])
    assert top_entries(scores, torch.ones(1, 4, dtype=torch.bool), 2).tolist() == [[0, 1]]


def test_last_visible_block_is_kept_and_hidden_members_do_not_count():
    scores = torch.tensor([[1.0, 5.0, 9.0, 2.0, 8.0, 0.0, 7.0, 99.0]])
    assert top_blocks(scores, torch.tensor([7]), 2, 2).tolist() == [[1, 3]]  # block 3 has one visible member
    assert top_blocks(scores, torch.tensor([5]), 2, 2).tolist() == [[1, 2]]
    assert top_blocks(scores, torch.tensor([0]), 2, 2).tolist() == [[-1, -1]]
    assert top_blocks(scores, torch.tensor([1]), 2, 3).tolist() == [[0, -1, -1]]


def make_stream(lengths, counts, per_block=4, ratio=1):
    """Sequences at ``lengths`` tokens whose last ``counts`` rows are in the step; blocks are handed out shuffled."""
    generator = torch.Generator().manual_seed(0)
    blocks = [-(-length // (per_block * ratio)) for length in lengths]
    ids = (torch.randperm(sum(blocks), generator=generator) + 1).tolist()
    tables = torch.zeros(len(lengths), max(blocks), dtype=torch.int64)
    rows, positions, spans = [], [], []
    for sequence, (length, count, size) in enumerate(zip(lengths, counts, blocks, strict=True)):
        tables[sequence, :size] = torch.tensor([ids.pop() for _ in range(size)])
        spans.append(ChunkSpan(len(rows), len(rows) + count, length - 1))
        rows += [sequence] * count
        positions += list(range(length - count, length))
    visible = (torch.tensor(positions) + 1) // ratio
    empty = torch.empty(0, dtype=torch.int64)
    return StreamView(
        ratio=ratio,
        entries_per_block=per_block,
        num_visible=visible,
        max_visible=int(visible.max()),
        sequence=torch.tensor(rows),
        block_tables=tables,
        spans=tuple(spans),
        emit_rows=empty,
        emit_slots=empty,
        emit_positions=empty,
        pairs=None,
    )


def make_case(lengths, counts, ratio=1):
    stream = make_stream(lengths, counts, ratio=ratio)
    generator = torch.Generator().manual_seed(1)
    num_slots = (int(stream.block_tables.max()) + 1) * stream.entries_per_block
    store = RecordStore.allocate(Float32Record(32), num_slots, torch.device("cpu"))
    store.data[:] = torch.nan  # what is not written must not matter
    rows = len(stream.sequence)
    for sequence, length in enumerate(lengths):
        entries = torch.arange(length // ratio)
        table = stream.block_tables[sequence]
        slots = table[entries // 4] * 4 + entries % 4
        store.data[slots] = torch.randn(len(entries), 32, generator=generator).round()
    query = torch.randn(rows, 3, 32, generator=generator).round()
    weights = torch.randn(rows, 3, generator=generator)
    return stream, store, query, weights


def naive_scores(stream, store, query, weights, row):
    table = stream.block_tables[stream.sequence[row]]
    result = []
    for j in range(int(stream.num_visible[row])):
        key = store.data[table[j // 4] * 4 + j % 4].double()
        result.append(float((weights[row].double() * (query[row].double() @ key).relu()).sum()))
    return torch.tensor(result).float().tolist()


@pytest.mark.parametrize("ratio", [1, 2])
def test_full_selection_over_a_ragged_batch_equals_a_loop(ratio):
    stream, store, query, weights = make_case([9, 1, 30, 17, 2], [3, 1, 30, 1, 1], ratio)
    selected, blocks = index_full(query, weights, store, stream, 6, False, None)
    assert blocks is None
    for row in range(len(stream.sequence)):
        expected = naive_top(naive_scores(stream, store, query, weights, row), 6)
        assert [j for j in selected[row].tolist() if j >= 0] == expected


def test_candidate_blocks_restrict_a_later_selection():
    stream, store, query, weights = make_case([40, 7, 33], [5, 1, 1])
    _, blocks = index_full(query, weights, store, stream, 6, False, (4, 3))
    assert blocks is not None
    other = torch.randn(query.shape, generator=torch.Generator().manual_seed(9))
    selected = index_candidates(other, weights, store, stream, blocks, 4, 5, False)
    for row in range(len(stream.sequence)):
        scores = naive_scores(stream, store, query, weights, row)
        visible = len(scores)
        best = [max(scores[b : b + 4]) for b in range(0, visible, 4)]
        best[-1] = float("inf")
        kept = naive_top(best, 3)
        assert [b for b in blocks[row].tolist() if b >= 0] == kept
        again = naive_scores(stream, store, other, weights, row)
        inside = [again[j] if j // 4 in kept else float("-inf") for j in range(visible)]
        expected = [j for j in naive_top(inside, 5) if j // 4 in kept]
        assert [j for j in selected[row].tolist() if j >= 0] == expected


def test_no_blocks_are_chosen_while_all_entries_are_candidates():
    stream, store, query, weights = make_case([12, 8], [1, 2])
    selected, blocks = index_full(query, weights, store, stream, 6, False, (4, 3))
    assert blocks is None
    assert selected.shape == (3, 6)
