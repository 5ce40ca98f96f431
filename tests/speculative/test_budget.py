"""The budget: the worked example, brute force, limits."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.speculative.allocation import allocate_on_host
from deepinfer.speculative.budget import choose_budget
from deepinfer.speculative.cost_refinement import RefinedCost
from deepinfer.speculative.cost_table import CostTable

EXAMPLE = [[0.90, 0.72, 0.50], [0.60, 0.30, 0.10], [0.95, 0.90, 0.80], [0.0, 0.0, 0.0]]
CURVE = RefinedCost(CostTable.of([(4, 10.0), (8, 11.0), (16, 14.0)]))


def test_worked_example_gives_13_rows():
    budget = choose_budget(EXAMPLE, CURVE)
    assert budget.total_rows == 13
    assert budget.expected_tokens / budget.cost_ms == pytest.approx(0.698, abs=5e-4)
    assert allocate_on_host(EXAMPLE, 13) == [4, 4, 4, 1]


def test_first_maximum_wins_on_a_plateau():
    assert choose_budget([[0.0, 0.0]], RefinedCost(CostTable.of([(3, 1.0)]))).total_rows == 1


def test_looks_beyond_a_plateau():
    """Rows 2 and 3 do not pay, row 4 does: a search that stops at the first fall would stay at 1."""
    cost = RefinedCost(CostTable.of([(1, 1.0), (2, 2.0), (3, 2.9), (4, 3.0)]))
    assert choose_budget([[0.9, 0.9, 0.9]], cost).total_rows == 4


def test_limits():
    assert choose_budget(EXAMPLE, CURVE, max_rows=9).total_rows == 8
    assert choose_budget(EXAMPLE, CURVE, max_rows=2).total_rows == 4  # one row each is not negotiable
    assert choose_budget(EXAMPLE, CURVE, other_rows=3).total_rows == 13  # with 16 rows in the step
    assert choose_budget(EXAMPLE, CURVE, other_rows=10).total_rows == 6  # no more than 16 fit the table
    beyond = choose_budget(EXAMPLE, CURVE, other_rows=100)
    assert (beyond.total_rows, beyond.cost_ms) == (4, None)
    assert choose_budget([], CURVE).total_rows == 0
    assert choose_budget([[], [0.5]], CURVE).total_rows == 3  # a request without drafts


survival_lists = st.lists(
    st.lists(st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.7, 0.9, 1.0]), min_size=0, max_size=3).map(
        lambda values: sorted(values, reverse=True)
    ),
    min_size=1,
    max_size=3,
)
step_times = st.lists(st.floats(0.5, 4.0), min_size=12, max_size=12).map(
    lambda steps: [sum(steps[: i + 1]) for i in range(12)]
)


@given(survival_lists, step_times)
def test_no_prefix_closed_allocation_is_better(survivals, times):
    """At every total the greedy choice has the most expected tokens, and the chosen total the best ratio."""
    cost = RefinedCost(CostTable.of(list(enumerate(times, 1))))
    budget = choose_budget(survivals, cost)
    best = 0.0
    for lengths in itertools.product(*(range(len(each) + 1) for each in survivals)):
        total = len(survivals) + sum(lengths)
        expected = len(survivals) + sum(sum(each[:n]) for each, n in zip(survivals, lengths, strict=True))
        rows = allocate_on_host(survivals, total)
        greedy = len(survivals) + sum(sum(each[: n - 1]) for each, n in zip(survivals, rows, strict=True))
        assert greedy >= expected - 1e-9
        best = max(best, expected / times[total - 1])
    assert budget.expected_tokens / budget.cost_ms == pytest.approx(best, rel=1e-9)
