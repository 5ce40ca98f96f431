"""The output of a request is a function of the request: not of batch, arrival, drafts, schedule or preemption."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deepinfer.sampling.params import SamplingParams
from tests.engine.requests import Case, mixed_cases, random_cases, run_alone, run_crowd
from tests.engine.support import make_engine, random_ids

COUNT = 24


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return random_cases(COUNT, seed=11)


@pytest.fixture(scope="module")
def expected(tiny_path: Path, cases: list[Case]) -> list[tuple[Any, ...]]:
    """Alone, synchronous, without speculation."""
    engine = make_engine(tiny_path, num_speculative_tokens=0, async_scheduling=False)
    return run_alone(engine, cases)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("drafts", [0, 1, 3, 5, "adaptive"])
def test_crowd_with_speculation_equals_alone_without(
    tiny_path: Path, cases: list[Case], expected: list[tuple[Any, ...]], drafts: Any, is_async: bool
) -> None:
    arguments: dict[str, Any] = {"num_speculative_tokens": drafts}
    if drafts == "adaptive":
        arguments = {"num_speculative_tokens": 4, "adaptive_verification": True}
    engine = make_engine(tiny_path, async_scheduling=is_async, max_num_batched_tokens=64, **arguments)
    assert run_crowd(engine, cases, seed=3) == expected


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_preemption_changes_nothing(tiny_path: Path, is_async: bool) -> None:
    # Every sequence grows over the end of its only block, and there are not enough blocks for all to do so at once.
    cases = random_cases(8, seed=5)
    cases = [
        Case(random_ids(112 + index, seed=index), SamplingParams.from_dict({**case.params.to_dict(), "max_tokens": 24}))
        for index, case in enumerate(cases)
    ]
    plain = make_engine(tiny_path, num_speculative_tokens=0, async_scheduling=False)
    expected = run_alone(plain, cases)
    engine = make_engine(tiny_path, num_speculative_tokens=4, async_scheduling=is_async, num_blocks=9)
    assert run_crowd(engine, cases, seed=8) == expected
    assert engine.scheduler.num_preemptions > 0


def test_counts_of_drafts_add_up(tiny_path: Path, cases: list[Case]) -> None:
    engine = make_engine(tiny_path, num_speculative_tokens=4)
    for case in cases:
        engine.add_request(case.prompt, case.params)
    while engine.has_work():
        for output in engine.step():
            for each in output.outputs:
                assert each.num_drafts_accepted <= each.num_drafts_verified <= 4 * each.num_steps
                assert len(each.token_ids) <= each.num_steps + each.num_drafts_accepted


EVERYTHING: dict[str, dict[str, Any]] = {
    "sync 1": {"num_speculative_tokens": 1, "async_scheduling": False, "max_num_batched_tokens": 64},
    "async 5": {"num_speculative_tokens": 5},
    "async adaptive, small steps": {
        "num_speculative_tokens": 4,
        "adaptive_verification": True,
        "max_num_batched_tokens": 48,
    },
    "async 3, few blocks": {"num_speculative_tokens": 3, "num_blocks": 7, "prefix_checkpoints": 4},
    "async 4, no prefix cache": {"num_speculative_tokens": 4, "prefix_cache": "off"},
}


def compare_everything(path: Path, cases: list[Case], names: list[str], **arguments: Any) -> None:
    """Every circumstance of ``EVERYTHING`` against one after the other, plain, with an empty cache.

    Args:
        arguments: of all engines.
    """
    plain = {"num_speculative_tokens": 0, "async_scheduling": False, "prefix_cache": "off"}
    engine = make_engine(path, **plain, **arguments)
    expected = run_alone(engine, cases)
    engine.close()
    for name in names:
        engine = make_engine(path, **EVERYTHING[name], **arguments)
        found = run_crowd(engine, cases, seed=len(name))
        different = [index for index in range(len(cases)) if found[index] != expected[index]]
        assert not different, f"{name}: requests {different}"
        if engine.scheduler.prefix is not None:
            if "few blocks" in name:
                assert engine.scheduler.num_preemptions + engine.scheduler.prefix.index.num_evictions > 0
            else:
                assert engine.scheduler.prefix.statistics.num_cached_tokens > 0, name
        engine.close()


def test_grammars_and_prefix_hits_in_the_mix_change_nothing(tiny_path: Path) -> None:
    compare_everything(tiny_path, mixed_cases(15, seed=2), ["async adaptive, small steps"])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_hundreds_of_requests_under_every_circumstance(tiny_path: Path, seed: int) -> None:
    compare_everything(tiny_path, mixed_cases(40, seed=100 + seed), list(EVERYTHING))
