"""Both replays of spec 6 against the executable specification, row by row."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from deepinfer.engine.engine import Engine
from deepinfer.reference import ReferenceModel
from tests.engine.support import even_pieces, make_checkpoint, make_engine, oracle, random_ids
from tests.worker.replay_support import BLOCKS, block_bytes, run_pieces, set_mode, spoil_states

NUMERICS = ("faithful", "float32")
LENGTH = 90
"""Candidate blocks are restricted from 64 tokens on."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("replay") / "tiny", seed=3)


@pytest.fixture(scope="module")
def engines(path: Path) -> dict[str, Engine]:
    return {numerics: make_engine(path, numerics=numerics, num_blocks=16, max_num_seqs=4) for numerics in NUMERICS}


@pytest.fixture(scope="module")
def oracles(path: Path) -> dict[str, ReferenceModel]:
    return {numerics: oracle(path, numerics) for numerics in NUMERICS}


@pytest.fixture(autouse=True)
def _compact_again(engines: dict[str, Engine]) -> None:
    for engine in engines.values():
        set_mode(engine, "compact")


def assert_same(got: Tensor, expected: Tensor, numerics: str) -> None:
    """Bit for bit where both round; in float32 up to what float64 sums leave after one rounding."""
    if numerics == "faithful":
        assert torch.equal(got, expected.float())
    else:
        torch.testing.assert_close(got, expected.float(), rtol=2e-5, atol=2e-5)


# ---- decoder bounded replay (6.1) --------------------------------------------------------------------------------


@pytest.mark.parametrize("numerics", NUMERICS)
@pytest.mark.parametrize("truncation", ["mask", "compact"])
@pytest.mark.parametrize("keep", [22, 30])
def test_kept_rows_are_those_of_the_specification(numerics, truncation, keep, engines, oracles):
    ids = random_ids(LENGTH)
    set_mode(engines[numerics], truncation)
    with torch.no_grad():
        expected = oracles[numerics].forward(ids, decoder_keep=keep)[-keep:]
    assert_same(run_pieces(engines[numerics], ids, [LENGTH], keep=keep), expected, numerics)


@pytest.mark.parametrize(
    "sizes", [[1] * 3 + [87], [67, 1, 22], [68, 22], [69, 21], [40, 40, 10], [7] * 12 + [6]], ids=str
)
def test_chunks_do_not_matter(sizes, engines):
    """Chunks wholly before the rectangle, ending just before, at and just behind its edge, and inside it."""
    ids, engine = random_ids(LENGTH), engines["faithful"]
    whole = run_pieces(engine, ids, [LENGTH], keep=22)
    for truncation in ("mask", "compact"):
        set_mode(engine, truncation)
        spoil_states(engine, 3)
        assert torch.equal(run_pieces(engine, ids, sizes, keep=22), whole), truncation


def test_mask_and_compact_agree_bit_for_bit(engines):
    for seed, keep in ((1, 22), (2, 37), (3, 60)):
        ids, results = random_ids(LENGTH, seed=seed), []
        for truncation in ("mask", "compact"):
            set_mode(engines["faithful"], truncation)
            results.append(run_pieces(engines["faithful"], ids, [50, 40], keep=keep))
        assert results[0].shape == (keep, 512)
        assert torch.equal(*results)


def test_keeping_the_whole_prompt_is_no_truncation(engines):
    ids, engine = random_ids(40), engines["faithful"]
    exact = run_pieces(engine, ids, [40])
    assert torch.equal(run_pieces(engine, ids, [13, 27], keep=40), exact)
    assert torch.equal(run_pieces(engine, ids, [13, 27], keep=99), exact)
    assert not torch.equal(run_pieces(engine, ids, [40], keep=22), exact[-22:])


def test_entries_are_complete_whatever_is_truncated(engines):
    """Long-range memory of all layers is that of a full run: only windows of the decoder are cut."""
    ids, engine = random_ids(LENGTH), engines["faithful"]
    run_pieces(engine, ids, [LENGTH])
    full = block_bytes(engine, BLOCKS[0])
    for place in full:
        assert place.any()
    run_pieces(engine, ids, even_pieces(LENGTH, 20), keep=22, blocks=(7, 3, 4), slot=2)
    for first, second in zip(full, block_bytes(engine, 7), strict=True):
        assert torch.equal(first, second)


def test_generation_goes_on_behind_a_truncated_prompt(engines, oracles):
    """Decode rows see full windows of kept tokens; the specification says so by a rectangle that grows with them."""
    ids, engine, keep = random_ids(LENGTH), engines["faithful"], 30
    prompt = ids[:60]
    run_pieces(engine, prompt, [25, 35], keep=keep)
    rows = [run_pieces(engine, ids[: at + 1], [1], start=at, keep=keep + at + 1 - 60) for at in range(60, LENGTH)]
    with torch.no_grad():
        expected = oracles["faithful"].forward(ids, decoder_keep=keep + LENGTH - 60)[60:]
    assert_same(torch.cat(rows), expected, "faithful")


def test_truncated_and_whole_sequences_share_a_step(engines):
    """A chunk that keeps nothing, one that keeps its tail, and a decode row in one batch give what they give alone."""

    from deepinfer.messages import StepPlan
    from tests.engine.support import chunk_of

    engine = engines["faithful"]
    one, two, three = (random_ids(60, seed=seed) for seed in (4, 5, 6))
    alone = run_pieces(engine, two, [60], keep=24, blocks=(4,), slot=1)
    single = run_pieces(engine, three, [59, 1], blocks=(6,), slot=2)[-1:]
    run_pieces(engine, three[:59], [59], blocks=(6,), slot=2)
    chunks = (
        chunk_of(one, 0, 20, (3,), 3, name="one")._replace(decoder_floor=36, num_sampled=0),
        chunk_of(two, 0, 60, (4,), 1, name="two")._replace(decoder_floor=36, num_sampled=24),
        chunk_of(three, 59, 1, (6,), 2, name="three"),
    )
    together = engine.runner.run(StepPlan(0, chunks)).sample_logits()
    assert torch.equal(together, torch.cat((alone, single)))


# ---- encoder bounded replay after a hit (6.2) --------------------------------------------------------------------


@pytest.mark.parametrize("numerics", NUMERICS)
@pytest.mark.parametrize("hit", [2, 10, 16, 20, 32, 64, 66, 88])
def test_rows_behind_a_hit_are_those_of_the_specification(numerics, hit, engines, oracles):
    """Hits shorter than the window, of one window, and up to two tokens before the end; another used the slot."""
    ids, engine, window = random_ids(LENGTH, seed=hit), engines[numerics], 16
    run_pieces(engine, ids[:hit], [hit])
    before = block_bytes(engine, BLOCKS[0])
    spoil_states(engine, 1)
    start = hit - min(hit, window)
    got = run_pieces(engine, ids, [LENGTH - start], start=start, slot=1, window_floor=start, entry_floor=hit)
    with torch.no_grad():
        expected = oracles[numerics].forward(ids, prefix_hit=hit)
    assert_same(got, expected, numerics)
    assert_unchanged(engine, before, hit)


def assert_unchanged(engine: Engine, before: list[Tensor], hit: int) -> None:
    """The entries of the hit are the same bytes, though not all of the block's are."""
    after = block_bytes(engine, BLOCKS[0])
    for first, second in zip(before, after, strict=True):
        num_entries = hit * len(first) // 128
        assert torch.equal(first[:num_entries], second[:num_entries])
    assert any(not torch.equal(first, second) for first, second in zip(before, after, strict=True))


@pytest.mark.parametrize("sizes", [[1] * 10 + [36], [15, 31], [16, 30], [17, 29], [40, 6]], ids=str)
def test_replay_in_pieces_is_replay_at_once(sizes, engines):
    """Pieces end before, at and behind the border between replayed and new rows."""
    ids, engine, hit = random_ids(76, seed=8), engines["faithful"], 46
    run_pieces(engine, ids[:hit], [hit])
    whole = run_pieces(engine, ids, [46], start=30, window_floor=30, entry_floor=hit)
    spoil_states(engine, 2)
    assert torch.equal(run_pieces(engine, ids, sizes, start=30, slot=2, window_floor=30, entry_floor=hit), whole)


@pytest.mark.parametrize("truncation", ["mask", "compact"])
@pytest.mark.parametrize(("hit", "keep"), [(40, 30), (64, 30), (80, 30), (88, 24)])
def test_both_replays_together(truncation, hit, keep, engines, oracles):
    """The rectangle begins behind, inside and before the replayed window."""
    ids, engine = random_ids(LENGTH, seed=9), engines["faithful"]
    set_mode(engine, truncation)
    run_pieces(engine, ids[:hit], [hit])
    spoil_states(engine, 1)
    start = hit - 16
    sizes = even_pieces(LENGTH - start, 13)
    got = run_pieces(engine, ids, sizes, start=start, slot=1, window_floor=start, entry_floor=hit, keep=keep)
    with torch.no_grad():
        expected = oracles["faithful"].forward(ids, prefix_hit=hit, decoder_keep=keep)
    kept = min(keep, LENGTH - start)
    assert_same(got[-kept:], expected[-kept:], "faithful")


def test_draft_rings_are_refilled_by_the_replayed_rows(engines):
    """The draft behind a hit sees the window that it sees after a cold run, if not the same values."""
    ids, engine = random_ids(70, seed=11), engines["float32"]
    run_pieces(engine, ids[:46], [46])
    run_pieces(engine, ids, [24 + 16], start=30, slot=2, window_floor=30, entry_floor=46)
    geometry = engine.runner.caches.geometry
    places = torch.tensor([2 * geometry.ring_length + at % geometry.ring_length for at in range(54, 70)])
    spoil_states(engine, 2)
    run_pieces(engine, ids, [24 + 16], start=30, slot=2, window_floor=30, entry_floor=46)
    for layer in engine.runner.caches.draft:
        keys = layer.window.read(places)
        assert torch.isfinite(keys).all()
        assert keys.abs().sum(1).min() > 0


def test_unshifted_reads_are_cut_at_the_same_place(tmp_path: Path) -> None:
    """Models whose sublayers read with their own mix: the input of every row needs the mix of every row."""
    path = make_checkpoint(
        tmp_path / "unshifted",
        hc_shifted=False,
        num_nextn_predict_layers=0,
        compress_ratios=(0, 0, 2, 2, 1, 1, 1, 1),
        dspark_target_layer_ids=(),
    )
    engine, ids = make_engine(path, num_blocks=16, max_num_seqs=4), random_ids(60, seed=12)
    with torch.no_grad():
        expected = oracle(path, "faithful").forward(ids, decoder_keep=22)[-22:]
    for sizes in ([60], [38, 22], [30, 30]):
        assert_same(run_pieces(engine, ids, sizes, keep=22), expected, "faithful")
