"""Measured, refined and stored step costs."""

from __future__ import annotations

import json

import pytest

from deepinfer.errors import ConfigError
from deepinfer.speculative.cost_refinement import RefinedCost
from deepinfer.speculative.cost_store import CostStore, cost_key
from deepinfer.speculative.cost_table import CostTable

KEY = cost_key({"device": "somewhere", "sizes": [1, 2]})
TABLE = CostTable.of([(1, 2.0), (4, 3.0), (8, 5.0)])


def test_measuring_runs_large_sizes_first_and_drops_extremes():
    calls = []
    seconds = {2: iter([9.0, 1.0, 2.0, 3.0, 4.0, 100.0]), 8: iter([0.0, 5.0, 5.0, 5.0, 0.1, 50.0])}

    def measure(rows: int) -> float:
        calls.append(rows)
        return next(seconds[rows])

    table = CostTable.measure([2, 8], measure)
    assert calls == [8] * 6 + [2] * 6
    assert table.sizes == (2, 8)
    assert table.times_ms == pytest.approx((3000.0, 5000.0))


def test_cover_is_the_smallest_size_that_holds_the_rows():
    assert [TABLE.cover(rows) for rows in (1, 2, 4, 5, 8, 9)] == [1, 4, 4, 8, 8, None]
    assert [TABLE.time_ms(rows) for rows in (1, 2, 4, 5, 9)] == [2.0, 3.0, 3.0, 5.0, None]


def test_without_graphs_a_step_costs_what_its_own_rows_cost():
    smooth = CostTable.of([(2, 2.0), (4, 3.0), (8, 5.0)], is_staircase=False)
    assert [smooth.time_ms(rows) for rows in (1, 2, 3, 4, 5, 8, 9)] == [2.0, 2.0, 2.5, 3.0, 3.5, 5.0, None]
    assert smooth.charged_rows(5) == 5
    assert TABLE.charged_rows(5) == 8


@pytest.mark.parametrize("pairs", [[], [(0, 1.0)], [(1, 1.0), (1, 2.0)], [(1, 0.0)], [(1, float("nan"))]])
def test_impossible_tables_are_refused(pairs):
    with pytest.raises(ConfigError, match="Measure"):
        CostTable.of(pairs)


def test_slope_is_learned_from_ten_steps_of_a_size_and_ignores_outliers():
    cost = RefinedCost(TABLE)
    for _ in range(9):
        cost.observe(8, 2, 5.8, 0.0)
    assert cost.slope_ms == 0.0
    for step in range(9):
        cost.observe(8, 2, 900.0 if step % 3 == 0 else 5.8, 0.0)
    assert cost.slope_ms == pytest.approx(0.1)
    assert cost.estimate_ms(3, 2) == pytest.approx(3.0 + 0.4)  # a step of 3 rows runs as 4
    for _ in range(10):
        cost.observe(4, 2, 3.0 + 4 * 0.3, 0.0)
    assert cost.slope_ms == pytest.approx(0.2)  # median over sizes of 0.1 and 0.3


def test_slope_is_never_negative():
    cost = RefinedCost(TABLE)
    for _ in range(20):
        cost.observe(8, 1, 1.0, 0.0)
    assert cost.slope_ms == 0.0
    assert cost.estimate_ms(8, 1) == 5.0


def test_old_steps_leave_the_window():
    cost = RefinedCost(TABLE, forward_window=30)
    for _ in range(30):
        cost.observe(8, 1, 5.0 + 8 * 0.5, 0.0)
    assert cost.slope_ms == pytest.approx(0.5)
    for _ in range(30):
        cost.observe(8, 1, 5.0 + 8 * 0.1, 0.0)
    assert cost.slope_ms == pytest.approx(0.1)


def test_sampler_time_by_requests_with_a_global_fallback():
    cost = RefinedCost(TABLE)
    assert cost.sampler_ms(3) == 0.0
    for value in (1.0, 1.0, 9.0, 1.0, 1.0):
        cost.observe(1, 3, 2.0, value)
    assert cost.sampler_ms(3) == 1.0
    assert cost.sampler_ms(7) == 1.0  # nothing known about 7
    for _ in range(9):
        cost.observe(1, 7, 2.0, 4.0)
    assert cost.sampler_ms(7) == 4.0
    assert cost.sampler_ms(3) == 1.0
    assert cost.sampler_ms(5) == 4.0
    assert cost.estimate_ms(1, 7) == 6.0
    assert cost.estimate_ms(100, 7) is None


def test_a_step_beyond_the_table_teaches_the_sampler_only():
    cost = RefinedCost(TABLE)
    for _ in range(12):
        cost.observe(100, 2, 50.0, 1.5)
    assert cost.slope_ms == 0.0
    assert cost.sampler_ms(2) == 1.5


def test_tables_survive_a_restart(tmp_path):
    store = CostStore(tmp_path / "new", 100, now=lambda: 1000.0)
    assert store.load(KEY) is None
    path = store.save(KEY, TABLE)
    assert store.load(KEY) == TABLE
    assert store.load(cost_key({"device": "elsewhere"})) is None
    assert [entry.name for entry in (tmp_path / "new").iterdir()] == [path.name]  # no temporary file is left


def test_newest_valid_table_within_its_time_to_live(tmp_path):
    clock = [1000.0]
    store = CostStore(tmp_path, 100, now=lambda: clock[0])
    store.save(KEY, CostTable.of([(1, 1.0)]))
    clock[0] = 1050.0
    newer = store.save(KEY, CostTable.of([(1, 2.0)], is_staircase=False))
    assert store.load(KEY) == CostTable.of([(1, 2.0)], is_staircase=False)
    newer.write_text("{torn")
    assert store.load(KEY) == CostTable.of([(1, 1.0)])
    clock[0] = 1101.0
    assert store.load(KEY) is None


def test_only_our_own_expired_files_are_removed(tmp_path):
    clock = [1000.0]
    store = CostStore(tmp_path, 100, now=lambda: clock[0])
    expired = store.save(KEY, TABLE)
    foreign = [
        tmp_path / "notes.txt",
        tmp_path / f"{KEY}.{'0' * 32}.5",
        tmp_path / f"deepinfer-cost-{KEY}.{'0' * 32}.5.json",  # our name, not our content
        tmp_path / "deepinfer-cost-short.0.5.json",
    ]
    for path in foreign:
        path.write_text(json.dumps([[1, 2.0]]))
    (tmp_path / "folder").mkdir()
    clock[0] = 1000.0 + 100 + 7200
    store.save(KEY, TABLE)
    assert expired.exists()  # within the grace time
    clock[0] += 1.0
    kept = store.save(KEY, TABLE)
    assert not expired.exists()
    assert kept.exists()
    assert all(path.exists() for path in foreign)
    assert (tmp_path / "folder").is_dir()


def test_key_depends_on_every_fact_and_not_on_their_order():
    facts = {"device": "x", "driver": "1", "sizes": [1, 2], "model": "abc"}
    assert cost_key(facts) == cost_key(dict(reversed(facts.items())))
    for name in facts:
        assert cost_key({**facts, name: "other"}) != cost_key(facts)


def test_unusable_settings_are_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be made"):
        CostStore(tmp_path / "file", 1)
    with pytest.raises(ConfigError, match="positive"):
        CostStore(tmp_path, 0)
