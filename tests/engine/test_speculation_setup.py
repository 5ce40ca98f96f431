"""What a step costs, as an engine measures and keeps it: the sizes that run, and all that the times depend on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from deepinfer.engine import speculation_setup
from deepinfer.engine.engine import Engine
from deepinfer.engine.speculation_setup import _cost_facts, step_cost
from tests.engine.support import make_engine


@pytest.fixture
def engine(tiny_path: Path) -> Engine:
    return make_engine(tiny_path, num_speculative_tokens=1, max_num_seqs=4)


def test_steps_that_run_as_graphs_cost_what_the_next_size_costs(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deepinfer.speculative.cost_table.NUM_TIMED", 3)
    smooth = step_cost(engine.config, engine.runner).table
    assert smooth.sizes == (1, 2, 4, 8)
    assert not smooth.is_staircase
    engine.runner.graph_sizes = (1, 6)
    stairs = step_cost(engine.config, engine.runner).table
    assert stairs.sizes == (1, 6)
    assert stairs.is_staircase
    assert stairs.charged_rows(2) == 6


def test_kept_times_are_those_of_the_same_graphs_and_operators(engine: Engine) -> None:
    config, runner = engine.config, engine.runner
    facts = _cost_facts(config, runner, (1, 2))
    assert facts == _cost_facts(config, runner, (1, 2))
    others = [replace(config, batch_invariant=True), replace(config, device=replace(config.device, graphs="off"))]
    keys = [speculation_setup.cost_key(_cost_facts(other, runner, (1, 2))) for other in others]
    runner.graph_sizes = (1, 2)
    keys += [speculation_setup.cost_key(_cost_facts(config, runner, (1, 2))), speculation_setup.cost_key(facts)]
    assert len(set(keys)) == 4
