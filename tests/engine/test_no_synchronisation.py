"""Launching a step asks the device for nothing, and the host plans a step before it has seen the one before it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer.engine.engine import Engine, InFlight
from deepinfer.ops.index_select import top_entries
from deepinfer.worker.step_results import Launched, StepTokens
from tests.engine.no_sync import NoSync
from tests.engine.requests import random_cases, run_crowd
from tests.engine.support import make_engine

REFERENCE_ONLY = {"ops/moe.py: moe", "layers/engram.py: forward", "checkpoint/engram_table.py: gather"}
"""The functions that look at values all the same, because they are for a CPU. The loop over experts asks how many rows
each has; grouped products of an accelerator read the counts on the device. Rows of n-gram tables that stay in the files
are read by the host; an accelerator needs the tables in memory that it can address. Whoever adds a function here has to
say why no accelerator will run it."""


class GuardedLaunches:
    """Puts the guard around every launch of an engine's worker."""

    def __init__(self, engine: Engine) -> None:
        self.guard = NoSync()
        self.num_launches = 0
        self._launch = engine.worker.launch
        engine.worker.launch = self.launch  # type: ignore[method-assign]

    def launch(self, *args: Any) -> Launched:
        self.num_launches += 1
        with self.guard:
            return self._launch(*args)


@pytest.mark.parametrize("arguments", [{}, {"adaptive_verification": True, "prefill_truncation": "compact"}], ids=str)
def test_launching_a_step_reads_nothing_back(tiny_path: Path, arguments: dict[str, Any]) -> None:
    if "prefill_truncation" in arguments:
        arguments = {**arguments, "prefill_keep_tokens": 24}
    engine = make_engine(tiny_path, num_speculative_tokens=4, max_num_batched_tokens=64, **arguments)
    launches = GuardedLaunches(engine)
    run_crowd(engine, random_cases(6, seed=3), seed=1)
    assert launches.num_launches > 10
    unknown = {where: line for where, line in launches.guard.found.items() if where not in REFERENCE_ONLY}
    assert not unknown, "these lines would wait for the device"
    assert set(launches.guard.found) == REFERENCE_ONLY, "known places have to be noticed, or the guard notices nothing"


def test_the_guard_names_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = (
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: bool(x[0, 0] > 0),
        lambda x: x[x > 0],
        lambda x: torch.nonzero(x),
        lambda x: x.cpu(),
        lambda x: x.numpy(),
        lambda x: torch.repeat_interleave(x, torch.ones(x.shape[0], dtype=torch.int64), dim=0),
    )
    for number, read in enumerate(reads):
        original = torch.topk

        def spying(*args: Any, _read: Any = read, _original: Any = original, **kwargs: Any) -> Any:
            _read(args[0])
            return _original(*args, **kwargs)

        guard = NoSync()
        with monkeypatch.context() as patch, guard:
            patch.setattr(torch, "topk", spying)
            top_entries(torch.ones(2, 5), torch.ones(2, 5, dtype=torch.bool), 2)
        (where,) = guard.found
        assert where == "ops/index_select.py: top_entries", f"read {number}: {where}"
    with NoSync() as guard:
        top_entries(torch.ones(2, 5), torch.ones(2, 5, dtype=torch.bool), 2)
    assert not guard.found


class Sealed:
    """Results of a step that nobody may look at before they are committed."""

    def __init__(self, tokens: StepTokens) -> None:
        self._tokens = tokens
        self.is_open = False

    def __getattr__(self, name: str) -> Any:
        assert self.is_open, f"{name} of a step was read before its commit"
        return getattr(self._tokens, name)


@pytest.mark.parametrize("is_adaptive", [False, True])
def test_the_next_step_is_planned_and_launched_before_this_one_is_looked_at(tiny_path: Path, is_adaptive: bool) -> None:
    cases = random_cases(8, seed=6)
    arguments: dict[str, Any] = {"num_speculative_tokens": 3, "adaptive_verification": is_adaptive}
    expected = run_crowd(make_engine(tiny_path, async_scheduling=False, **arguments), cases, seed=2)
    engine = make_engine(tiny_path, **arguments)
    events: list[tuple[str, int]] = []
    sample, commit, launch = engine.worker.sample, engine.commit, engine.worker.launch

    def sealing_sample(step: Launched, *more: Any) -> Any:
        events.append(("sampled", step.plan.step_id))
        return Sealed(sample(step, *more))

    def opening_commit(step: InFlight) -> None:
        events.append(("commit", step.plan.step_id))
        assert isinstance(step.tokens, Sealed)
        step.tokens.is_open = True
        commit(step)

    def noted_launch(plan: Any, verify_rows: int | None = None) -> Launched:
        events.append(("launched", plan.step_id))
        return launch(plan, verify_rows)

    engine.worker.sample = sealing_sample  # type: ignore[method-assign]
    engine.commit = opening_commit  # type: ignore[method-assign]
    engine.worker.launch = noted_launch  # type: ignore[method-assign]
    assert run_crowd(engine, cases, seed=2) == expected
    order = {event: place for place, event in enumerate(events)}
    last = max(step for _, step in events)
    ahead = [
        order["sampled", step] < order["launched", step + 1] < order["commit", step] < order["sampled", step + 1]
        for step in range(last)
    ]
    assert sum(ahead) > 0.8 * last, "only where nothing could be planned ahead may a step wait for its results"
