"""The indexer's kernels against the reference: queries, scores, selection, candidate blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from deepinfer.kernels.indexer import selection
from deepinfer.kernels.indexer.query import index_query
from deepinfer.kernels.indexer.scores import score_chunks, score_rows
from deepinfer.kernels.indexer.selection import IndexView, index_candidates, index_full, long_rows
from deepinfer.kernels.indexer.topk import select_blocks, select_entries
from deepinfer.ops import index_select as reference
from deepinfer.ops.number_formats import q4u_round
from deepinfer.ops.records import IndexKeyRecord, RecordStore
from deepinfer.ops.rope import rotate
from deepinfer.ops.step_views import ChunkSpan, StreamView


@dataclass
class Case:
    """A step: one entry of ``chunks`` per sequence, (rows, visible entries of the last row)."""

    query: torch.Tensor
    weights: torch.Tensor
    keys: torch.Tensor
    view: IndexView
    stream: StreamView
    heads: int
    width: int

    @property
    def store(self) -> RecordStore:
        return RecordStore(IndexKeyRecord(self.width), self.keys)


def make_case(
    chunks: list[tuple[int, int]],
    device: torch.device,
    heads: int = 4,
    width: int = 64,
    per_block: int = 32,
    exact: bool = True,
    padding: int = 0,
    seed: int = 0,
) -> Case:
    """Index keys, queries and weights. ``exact``: small integers, so that float32 sums and bf16 scores are exact.

    Blocks are shuffled; whatever no row may read holds NaN scales.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = sum(count for count, _ in chunks)

    def draw(*shape: int) -> torch.Tensor:
        if exact:
            return torch.randint(-1, 2, shape, generator=generator).float()
        return torch.randn(shape, generator=generator)

    blocks_of = [-(-visible // per_block) for _, visible in chunks]
    num_blocks = sum(blocks_of) + 3
    shuffled = torch.randperm(num_blocks - 1, generator=generator) + 1  # block 0 is nobody's: padding points to it
    tables = torch.zeros((len(chunks), max(1, *blocks_of)), dtype=torch.int64)
    record = IndexKeyRecord(width)
    keys = torch.full((num_blocks * per_block, record.record_elements), 255, dtype=torch.uint8)
    begin, spans, num_visible, sequence = 0, [], [], []
    taken = 0
    for index, (count, visible) in enumerate(chunks):
        mine = shuffled[taken : taken + blocks_of[index]]
        taken += blocks_of[index]
        tables[index, : len(mine)] = mine
        slots = (mine[:, None] * per_block + torch.arange(per_block)).flatten()[:visible]
        keys[slots] = record.encode(draw(visible, width))
        spans.append(ChunkSpan(begin, begin + count, visible - 1))
        num_visible += [max(0, visible - count + 1 + row) for row in range(count)]
        sequence += [index] * count
        begin += count
    num_visible += [0] * padding
    sequence += [0] * padding
    query = draw(rows + padding, heads, width).to(torch.bfloat16)
    query = q4u_round(query).to(torch.bfloat16)
    weights = draw(rows + padding, heads).to(torch.bfloat16)
    visible_rows = torch.tensor(num_visible, device=device)
    stream = StreamView(
        ratio=1,
        entries_per_block=per_block,
        num_visible=visible_rows,
        max_visible=max(num_visible),
        sequence=torch.tensor(sequence, device=device),
        block_tables=tables.to(device),
        spans=tuple(spans),
        emit_rows=visible_rows[:0],
        emit_slots=visible_rows[:0],
        emit_positions=visible_rows[:0],
        pairs=None,
    )
    view = IndexView(
        block_table=stream.block_tables.int(),
        row_sequence=stream.sequence.int(),
        num_visible=visible_rows.int(),
        entries_per_block=per_block,
        long_rows=long_rows(spans),
    )
    return Case(query.to(device), weights.to(device), keys.to(device), view, stream, heads, width)


def padded(selected: torch.Tensor, count: int) -> torch.Tensor:
    return torch.nn.functional.pad(selected, (0, count - selected.shape[1]), value=-1)


def physical(case: Case, entries: torch.Tensor) -> torch.Tensor:
    slots = case.stream.entry_slots(entries, slice(0, len(entries)))
    return torch.where(entries >= 0, slots, -1)


def expected_full(case: Case, count: int, candidates: tuple[int, int] | None = None):
    return reference.index_full(case.query, case.weights, case.store, case.stream, count, True, candidates)


DECODE = [(1, 0), (1, 1), (1, 15), (1, 16), (1, 17), (1, 64), (1, 130), (1, 97)]
VERIFY = [(3, 40), (4, 5), (2, 2), (1, 97), (3, 18), (5, 70)]
PREFILL = [(33, 33), (1, 70), (21, 111), (2, 50)]
MIXED = [(1, 60), (6, 70), (19, 90), (1, 40), (12, 80), (1, 97), (1, 12)]  # long chunks amid short ones
SMALL = [(9, 12), (1, 70), (11, 40)]  # one chunk too long to be scored row by row


@pytest.mark.parametrize("heads", [4, 32, 5])
@pytest.mark.parametrize("width", [64, 128, 96])
def test_query_is_rotated_and_rounded(heads: int, width: int, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(5)
    wide = torch.randn((7, heads * width + 64), generator=generator).mul(3).to(device, torch.bfloat16)
    query = wide[:, : heads * width].unflatten(1, (heads, width))
    query[2, 0] = 0
    phase = torch.rand((7, 16), generator=generator).mul(1000)
    cos, sin = phase.cos().to(device), phase.sin().to(device)
    expected = q4u_round(rotate(query, cos, sin)).to(torch.bfloat16)
    differing = (index_query(query, cos, sin) != expected).double().mean()
    assert differing <= 0.002  # a rotation next to a tie of bf16, seldom next to one of e2m1 as well


@pytest.mark.parametrize("chunks", [DECODE, VERIFY, PREFILL, MIXED], ids=["decode", "verify", "prefill", "mixed"])
@pytest.mark.parametrize(("heads", "width"), [(4, 64), (32, 128), (5, 96)])
def test_selection_equals_the_reference_where_sums_are_exact(
    chunks: list[tuple[int, int]], heads: int, width: int, device: torch.device
) -> None:
    """Small integers give many ties, so this also fixes that the lowest index wins."""
    case = make_case(chunks, device, heads, width, padding=3)
    expected = padded(expected_full(case, 16)[0], 16)
    got = index_full(case.query, case.weights, case.keys, case.view, 16, wants_entries=True)
    assert got.entries is not None
    assert torch.equal(got.entries.long(), expected)
    assert torch.equal(got.slots.long(), physical(case, expected))


def test_negative_weights_leave_ties_at_zero_and_below(device: torch.device) -> None:
    case = make_case(DECODE, device, padding=1)
    for weights in (-case.weights.abs(), torch.zeros_like(case.weights), -torch.ones_like(case.weights)):
        case.weights = weights
        got = index_full(case.query, case.weights, case.keys, case.view, 16, wants_entries=True)
        assert got.entries is not None
        assert torch.equal(got.entries.long(), padded(expected_full(case, 16)[0], 16))


def scored(case: Case, variant: str) -> torch.Tensor:
    rows = case.query.shape[0]
    keys = torch.full((rows, case.view.capacity), 77, dtype=torch.int16, device=case.query.device)
    view = case.view
    operands = (case.query, case.weights, case.keys, view.block_table, view.row_sequence, view.num_visible, keys, 0)
    if variant == "rows":
        score_rows(*operands, view.entries_per_block, num_programs=5)
    elif variant == "chunks":
        score_chunks(*operands, view.entries_per_block, tile_entries=64, tile_rows=4, group_rows=16, num_programs=3)
    else:
        score_chunks(*operands, view.entries_per_block, tile_entries=32, tile_rows=2, group_rows=8, num_programs=99)
    return keys


def reference_keys(case: Case) -> torch.Tensor:
    """Order keys ``[rows, capacity]`` of the reference's scores; 77 where an entry is hidden."""
    rows, capacity = case.query.shape[0], case.view.capacity
    out = torch.full((rows, capacity), 77, dtype=torch.int16, device=case.query.device)
    for row in range(rows):
        visible = int(case.stream.num_visible[row])
        entries = torch.arange(visible, device=out.device)[None]
        values = case.store.read(case.stream.entry_slots(entries, slice(row, row + 1)))
        scores = reference._scores(case.query[row, None, None], case.weights[row, None, None], values, True)[0, 0]
        bits = (scores + 0.0).to(torch.bfloat16).view(torch.int16)
        out[row, :visible] = torch.where(bits < 0, bits ^ 0x7FFF, bits)
    return out


@pytest.mark.parametrize("variant", ["rows", "chunks", "narrow"])
@pytest.mark.parametrize("chunks", [VERIFY, SMALL], ids=["verify", "small"])
def test_scores_equal_the_reference_where_sums_are_exact(
    variant: str, chunks: list[tuple[int, int]], device: torch.device
) -> None:
    case = make_case(chunks, device, padding=2)
    assert torch.equal(scored(case, variant), reference_keys(case))


@pytest.mark.parametrize("variant", ["rows", "chunks"])
def test_random_scores_differ_by_one_rounding_at_most(variant: str, device: torch.device) -> None:
    case = make_case(VERIFY, device, 32, 128, exact=False)
    got, expected = scored(case, variant).int(), reference_keys(case).int()
    difference = (got - expected).abs()
    # Positive and negative weights cancel: near zero an order key is fine-grained, elsewhere one bf16 step is one key.
    assert (difference > 1).double().mean() <= 0.005
    assert (difference > 0).double().mean() <= 0.02


@pytest.mark.parametrize("variant", ["rows", "chunks"])
def test_a_row_alone_scores_as_in_a_batch(variant: str, device: torch.device) -> None:
    case = make_case(VERIFY, device, 5, 64, exact=False)
    together = scored(case, variant)
    view = case.view
    for row in (0, 3, 9, 12):
        one = slice(row, row + 1)
        alone = Case(
            case.query[one],
            case.weights[one],
            case.keys,
            IndexView(view.block_table, view.row_sequence[one], view.num_visible[one], view.entries_per_block),
            case.stream,
            case.heads,
            case.width,
        )
        assert torch.equal(scored(alone, variant), together[one])


def key_case(rows: int, capacity: int, spread: int, device: torch.device, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Order keys with many ties (few distinct ``spread``), what is visible, and a shuffled block table per row."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randint(-spread, spread + 1, (rows, capacity), generator=generator).to(device, torch.int16)
    visible = torch.randint(0, capacity + 1, (rows,), generator=generator)
    table = torch.stack([torch.randperm(capacity // 32 + 1, generator=generator) for _ in range(rows)])
    return keys, visible.to(device, torch.int32), table.to(device, torch.int32)


def as_scores(keys: torch.Tensor) -> torch.Tensor:
    return torch.where(keys < 0, keys ^ 0x7FFF, keys).to(torch.int16).view(torch.bfloat16).float()


@pytest.mark.parametrize("short", [10000, 200])
@pytest.mark.parametrize("spread", [3, 300, 32000])
def test_selection_by_radix(short: int, spread: int, device: torch.device) -> None:
    """One program a row, and several; every kind of count: none, fewer than asked for, exactly as many, many more."""
    rows, capacity, count = 9, 777, 40
    keys, visible, table = key_case(rows, capacity, spread, device)
    visible[:6] = torch.tensor([0, 1, count - 1, count, count + 1, capacity])
    sequence = torch.arange(rows, device=device, dtype=torch.int32)
    slots = torch.full((rows, count), 99, dtype=torch.int32, device=device)
    entries = torch.full_like(slots, 99)
    select_entries(keys, visible, sequence, table, 32, slots, entries, short=short, block=64, num_programs=4 * rows)
    hidden = torch.arange(capacity, device=device) >= visible[:, None]
    keys[hidden] = 0x7F80  # infinity: must not matter
    expected = reference.top_entries(as_scores(keys), ~hidden, count)
    assert torch.equal(entries.long(), expected)
    safe = expected.clamp_min(0)
    expected_slots = torch.where(expected < 0, -1, table.long().gather(1, safe // 32) * 32 + safe % 32)
    assert torch.equal(slots.long(), expected_slots)


@pytest.mark.parametrize("short", [10000, 20])
@pytest.mark.parametrize("spread", [3, 32000])
def test_candidate_blocks(short: int, spread: int, device: torch.device) -> None:
    rows, capacity, block_size, count = 8, 500, 8, 20
    keys, visible, _ = key_case(rows, capacity, spread, device, 1)
    visible[:5] = torch.tensor([0, 1, count * block_size, count * block_size + 1, capacity])
    keys[5, :100] = 0x7F80  # infinite scores count as the largest finite one
    keys[5, 200:300] = 0x7F7F
    blocks = torch.full((rows, count), 99, dtype=torch.int32, device=device)
    select_blocks(keys, visible, block_size, blocks, short=short, block=32, num_programs=4 * rows)
    expected = reference.top_blocks(as_scores(keys), visible.long(), block_size, count)
    assert torch.equal(blocks.long(), expected)


@pytest.mark.parametrize("chunks", [DECODE, VERIFY], ids=["decode", "verify"])
def test_candidates_restrict_the_selection(chunks: list[tuple[int, int]], device: torch.device) -> None:
    case = make_case(chunks, device, padding=2)
    count, block_size, num_blocks = 16, 4, 6
    got = index_full(case.query, case.weights, case.keys, case.view, count, (block_size, num_blocks))
    selected, blocks = expected_full(case, count, (block_size, num_blocks))
    assert blocks is not None
    assert got.blocks is not None
    assert torch.equal(got.blocks.long(), blocks)
    assert torch.equal(got.slots.long(), physical(case, padded(selected, count)))
    other = make_case(chunks, device, padding=2, seed=7)  # another layer's query and weights
    narrowed = index_candidates(
        other.query, other.weights, case.keys, case.view, got.blocks, block_size, count, wants_entries=True
    )
    expected = reference.index_candidates(
        other.query, other.weights, case.store, case.stream, blocks, block_size, count, True
    )
    assert narrowed.entries is not None
    assert torch.equal(narrowed.entries.long(), expected)
    assert torch.equal(narrowed.slots.long(), physical(case, expected))


def test_candidates_that_keep_every_block_change_nothing(device: torch.device) -> None:
    case = make_case([(1, 30), (1, 9)], device)
    full = index_full(case.query, case.weights, case.keys, case.view, 16, (8, 8))
    assert full.blocks is not None
    assert full.blocks.tolist() == [[0, 1, 2, 3, -1, -1, -1, -1], [0, 1, -1, -1, -1, -1, -1, -1]]
    narrowed = index_candidates(case.query, case.weights, case.keys, case.view, full.blocks, 8, 16)
    assert torch.equal(narrowed.slots, full.slots)


def test_invariant_candidates_are_scored_one_by_one(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where all blocks are kept, which depends on the longest context of the batch."""
    case = make_case([(20, 30)], device)
    full = index_full(case.query, case.weights, case.keys, case.view, 16, (8, 8), invariant=True)
    assert full.blocks is not None
    monkeypatch.setattr(selection, "score_chunks", None)
    narrowed = index_candidates(case.query, case.weights, case.keys, case.view, full.blocks, 8, 16, invariant=True)
    assert torch.equal(narrowed.slots, full.slots)


def test_rows_one_by_one_select_what_chunks_select(device: torch.device) -> None:
    case = make_case(SMALL, device)
    chunks = index_full(case.query, case.weights, case.keys, case.view, 16)
    rows = index_full(case.query, case.weights, case.keys, case.view, 16, invariant=True)
    assert torch.equal(chunks.slots, rows.slots)


def test_slabs_of_rows_change_nothing(device: torch.device) -> None:
    case = make_case(SMALL, device, exact=False)
    whole = index_full(case.query, case.weights, case.keys, case.view, 16, (4, 6))
    slabs = index_full(case.query, case.weights, case.keys, case.view, 16, (4, 6), scratch_bytes=2 * 128 * 7)
    assert torch.equal(whole.slots, slabs.slots)
    assert whole.blocks is not None
    assert slabs.blocks is not None
    assert torch.equal(whole.blocks, slabs.blocks)


@pytest.mark.parametrize("slab", [2 * 128 * 5, 2 * 128 * 22, 2 * 128 * 64])
def test_only_rows_of_long_chunks_share_keys(slab: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ways to score may differ in their last bits: rows before and behind all long chunks keep theirs."""
    case = make_case(MIXED, device)
    scored: dict[str, int] = {"_score_rows": 0, "_score_chunks": 0}

    def counted(name: str, run: Callable[..., None]) -> Callable[..., None]:
        def score(query: torch.Tensor, *rest: Any) -> None:
            scored[name] += len(query)
            run(query, *rest)

        return score

    for name in scored:
        monkeypatch.setattr(selection, name, counted(name, getattr(selection, name)))
    got = index_full(case.query, case.weights, case.keys, case.view, 16, scratch_bytes=slab)
    assert scored == {"_score_rows": 7 + 2, "_score_chunks": 19 + 1 + 12}
    assert torch.equal(got.slots.long(), physical(case, padded(expected_full(case, 16)[0], 16)))


def test_a_known_largest_context_changes_nothing(device: torch.device) -> None:
    case = make_case(SMALL, device)
    view = case.view
    wider = torch.nn.functional.pad(view.block_table, (0, 9))
    views = [
        IndexView(wider, view.row_sequence, view.num_visible, view.entries_per_block, limit, view.long_rows)
        for limit in (None, case.stream.max_visible)
    ]
    first, second = (index_full(case.query, case.weights, case.keys, each, 16) for each in views)
    assert torch.equal(first.slots, second.slots)


def test_short_contexts_select_everything_unscored(device: torch.device) -> None:
    case = make_case([(1, 9), (1, 0), (1, 16)], device)
    case.keys[:] = 255
    got = index_full(case.query, case.weights, case.keys, case.view, 32, wants_entries=True)
    assert got.entries is not None
    for row, visible in enumerate((9, 0, 16)):
        assert got.entries[row].tolist() == [*range(visible), *[-1] * (32 - visible)]
