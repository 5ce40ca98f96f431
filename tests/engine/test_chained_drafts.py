"""Steps with drafts that run before anybody on the host knows where their sequences stand give the same outputs.

An accelerator takes tokens, drafts and positions from its own memory. Here the same path runs on a CPU, see
:mod:`tests.engine.chained`; steps without drafts are in ``test_chained_steps.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer.engine.engine import Engine
from deepinfer.engine.outputs import RequestOutput
from deepinfer.messages import StepPlan
from deepinfer.sampling.params import SamplingParams
from deepinfer.worker.model_runner import StepResult
from tests.engine.chained import Chain
from tests.engine.requests import Case, mixed_cases, random_cases, run_alone, run_crowd, summary
from tests.engine.support import make_engine, random_ids


def plain(path: Path, **arguments: Any) -> Engine:
    """What everything is compared with: no speculation, no step ahead of another."""
    return make_engine(path, num_speculative_tokens=0, async_scheduling=False, **arguments)


def speculating(path: Path, drafts: int = 4, **arguments: Any) -> Engine:
    """Drafts in every step."""
    return make_engine(path, **{"num_speculative_tokens": drafts, "adaptive_verification": False, **arguments})


def outputs_by_seed(cases: list[Case], expected: list[tuple[Any, ...]]) -> dict[int, list[int]]:
    """For drafts that are mostly right."""
    return {case.params.seq_seed: list(output[0]) for case, output in zip(cases, expected, strict=True)}  # type: ignore[misc]


def free_cases(count: int, first_seed: int = 0, **values: Any) -> list[Case]:
    """Requests that never break a chain, of different lengths, every third greedy."""
    values = {"max_tokens": 23, "ignore_eos": True, **values}
    return [
        Case(
            random_ids(3 + 9 * number, seed=number + first_seed),
            SamplingParams(**{"temperature": (0.0, 1.0, 0.7)[number % 3], "seq_seed": 1000 + number, **values}),
        )
        for number in range(count)
    ]


def count_waits(engine: Engine) -> list[int]:
    """Chunks of the steps whose sampler the host waited for; the list grows while the engine runs."""
    waits: list[int] = []
    sample = engine.worker.sample

    def noted(step: Any, *more: Any) -> Any:
        waits.append(len(step.plan.chunks))
        return sample(step, *more)

    engine.worker.sample = noted  # type: ignore[method-assign]
    return waits


@pytest.mark.parametrize(("drafts", "seed"), [(1, 1), (4, 2), (5, 3)])
def test_same_outputs_in_a_crowd(tiny_path: Path, drafts: int, seed: int) -> None:
    """Stops, limits, log-probabilities, biases, shared prefixes; penalties and grammars break the chain at times."""
    cases = mixed_cases(20, seed)
    expected = run_crowd(plain(tiny_path), cases, seed=seed)
    engine = speculating(tiny_path, drafts)
    chain = Chain(engine, outputs_by_seed(cases, expected))
    assert run_crowd(engine, cases, seed=seed + 7) == expected
    assert chain.num_drafts > 0


def test_drafts_of_the_model_are_chained_as_well(tiny_path: Path) -> None:
    """And as many of them are verified and accepted as where the host waits for every step."""
    cases = free_cases(5, temperature=3.0, max_tokens=40)
    expected = run_crowd(plain(tiny_path), cases, seed=0)
    found, chained = [], (False, True)
    for is_chained in chained:
        engine = speculating(tiny_path, 3)
        chain = Chain(engine)
        if not is_chained:
            engine.runner.device_tokens = None
        waits = count_waits(engine)
        names = [engine.add_request(case.prompt, case.params) for case in cases]
        done = finish(engine)
        assert [summary(done[name].outputs[0]) for name in names] == expected
        each = [done[name].outputs[0] for name in names]
        found.append([(one.num_steps, one.num_drafts_verified, one.num_drafts_accepted) for one in each])
        assert bool(waits) is not is_chained
        assert (chain.num_wrong_guesses > 5) is is_chained
    assert found[0] == found[1]


def finish(engine: Engine, most_steps: int = 400) -> dict[str, RequestOutput]:
    """All results; whatever never ends is a failure."""
    found = {}
    for _ in range(most_steps):
        if not engine.has_work():
            engine.check()
            return found
        found.update({output.request_id: output for output in engine.step() if output.finished})
        engine.check()
    raise AssertionError(f"after {most_steps} steps there is still work")


@pytest.mark.parametrize("count", [1, 3, 7])
def test_simple_requests_chain_all_the_way(tiny_path: Path, count: int) -> None:
    cases = free_cases(count)
    expected = run_alone(plain(tiny_path), cases)
    engine = speculating(tiny_path, 5)
    chain = Chain(engine, outputs_by_seed(cases, expected))
    waits = count_waits(engine)
    assert run_crowd(engine, cases, seed=count) == expected
    assert not waits
    assert chain.num_drafts > chain.num_open > 2 * count
    assert engine.statistics.speculation.report().acceptance_rate > 0.3


@pytest.mark.parametrize("limit", ["max_tokens", "stop_token_ids", "stop"])
def test_ends_inside_accepted_blocks(tiny_path: Path, limit: str) -> None:
    """Whichever token of a block is the last: those behind it are dropped, and so is the step that runs already."""
    longest = Case([5, 6, 7], SamplingParams(max_tokens=30, temperature=1.0, seq_seed=15, ignore_eos=True))
    (output,) = run_alone(plain(tiny_path), [longest])
    cases = []
    for length in range(1, 20, 2):
        values: dict[str, Any] = {"max_tokens": 30, "seq_seed": 15, "ignore_eos": True, "temperature": 1.0}
        if limit == "max_tokens":
            values["max_tokens"] = length
        elif limit == "stop_token_ids":
            values["stop_token_ids"] = [output[0][length]]
        else:
            values["stop"] = [output[1][length : length + 2] or "x"]
        cases.append(Case([5, 6, 7], SamplingParams(**values)))
    expected = run_alone(plain(tiny_path), cases)
    engine = speculating(tiny_path, 5)
    chain = Chain(engine, {15: list(output[0])})
    waits = count_waits(engine)
    assert run_crowd(engine, cases, seed=3) == expected
    assert not waits
    assert chain.num_wrong_guesses > 5


def test_limits_of_memory_and_positions(tiny_path: Path) -> None:
    """At ``max_model_len``, and where a block ends: no row is planned past either, accepted drafts or not."""
    cases = [
        Case(random_ids(length, seed=length), SamplingParams(max_tokens=300, seq_seed=length, ignore_eos=True))
        for length in (118, 127, 128, 131, 138, 140)
    ]
    expected = run_alone(plain(tiny_path, max_model_len=140), cases)
    assert {len(case.prompt) + len(output[0]) for case, output in zip(cases, expected, strict=True)} == {141}
    engine = speculating(tiny_path, 5, max_model_len=140)
    chain = Chain(engine, outputs_by_seed(cases, expected))
    names = [engine.add_request(case.prompt, case.params) for case in cases]
    done = finish(engine)  # with an error that says which limit it was
    assert [summary(done[name].outputs[0]) for name in names] == expected
    assert chain.num_wrong_guesses > 5


def test_preempted_and_aborted(tiny_path: Path) -> None:
    cases = free_cases(6, max_tokens=36)
    cases = [Case(random_ids(100 + 3 * number, seed=number), case.params) for number, case in enumerate(cases)]
    expected = run_alone(plain(tiny_path), cases)
    engine = speculating(tiny_path, 4, num_blocks=6, prefix_cache="off")
    chain = Chain(engine, {**outputs_by_seed(cases, expected), 5: [1] * 50})
    doomed = engine.add_request(random_ids(30), SamplingParams(max_tokens=50, seq_seed=5, ignore_eos=True))
    for _ in range(4):
        engine.step()
    engine.abort(doomed)
    assert any(output.finished for output in engine.step())
    names = [engine.add_request(case.prompt, case.params) for case in cases]
    doomed = engine.add_request(random_ids(20), SamplingParams(max_tokens=50, seq_seed=5, ignore_eos=True))
    done: dict[str, RequestOutput] = {}
    for number in range(400):
        if not engine.has_work():
            break
        if number == 30:
            engine.abort(doomed)
        done.update({output.request_id: output for output in engine.step() if output.finished})
        engine.check()
    assert [summary(done[name].outputs[0]) for name in names] == expected
    assert engine.scheduler.num_preemptions > 0
    assert chain.num_wrong_guesses > 10


def test_prefixes_are_cached_as_without_drafts(tiny_path: Path) -> None:
    """Blocks and states that chained steps leave behind serve those who come later; the output's blocks, too."""
    params = SamplingParams(max_tokens=24, temperature=1.0, seq_seed=77, ignore_eos=True)
    first = Case(random_ids(120, seed=1), params)
    (output,) = run_alone(plain(tiny_path), [first])
    longer = first.prompt + list(output[0])
    cases = [first, *(Case(longer[:length], params) for length in (129, 140, 129))]
    expected = run_alone(plain(tiny_path, prefix_cache="off"), cases)
    engine = speculating(tiny_path, 5)
    known: dict[int, list[int]] = {}
    chain, found = Chain(engine, known), []
    for case, wanted in zip(cases, expected, strict=True):
        known[77] = list(wanted[0])
        name = engine.add_request(case.prompt, case.params)
        found.append(finish(engine)[name])
        assert summary(found[-1].outputs[0]) == wanted
    assert all(each.num_cached_tokens >= 128 for each in found[1:])
    assert chain.num_wrong_guesses > 10


@pytest.mark.parametrize("bad_position", [12, 14, 17])
def test_a_bad_row_spares_its_neighbours(tiny_path: Path, bad_position: int) -> None:
    """NaN in the middle of a block: the request ends with the tokens before it, and others do not notice."""
    cases = free_cases(3, max_tokens=14)
    expected = run_alone(plain(tiny_path), cases)
    engine = speculating(tiny_path, 5)
    Chain(engine, outputs_by_seed(cases, expected))
    _spoil(engine, "1", bad_position)
    waits = count_waits(engine)
    names = [engine.add_request(case.prompt, case.params) for case in cases]
    done = finish(engine)
    for number, (name, wanted) in enumerate(zip(names, expected, strict=True)):
        if number != 1:
            assert done[name].error is None
            assert summary(done[name].outputs[0]) == wanted
    num_tokens = bad_position - len(cases[1].prompt)
    assert f"position {bad_position}" in (done[names[1]].error or "")
    assert done[names[1]].outputs[0].token_ids == expected[1][0][:num_tokens]
    assert not waits
    # Its slot holds NaN now, and the next sequence in it does not mind.
    assert run_crowd(engine, cases, seed=1) == expected


def _spoil(engine: Engine, request_id: str, position: int) -> None:
    """Logits of a request that would give the token at ``position`` are NaN, once it got there with drafts."""
    run = engine.runner.run

    def spoiled(plan: StepPlan, trace: Any = None) -> StepResult:
        result = run(plan, trace)
        places, row = [], 0
        for chunk in plan.chunks:
            table = result.table
            assert table is not None
            for _ in range(chunk.num_rows):
                if chunk.request_id.split("#")[0] == request_id and int(table[1, row]) + 1 == position:
                    places.append(row)
                row += 1
        if not places:
            return result
        trunk = result.trunk.clone()
        trunk[places] = torch.nan
        return replace(result, trunk=trunk)

    engine.runner.run = spoiled  # type: ignore[method-assign]


def test_allow_lists_that_leave_nothing(tiny_path: Path) -> None:
    """A row with every token masked is bad as well, and lists of ids do not break a chain."""
    cases = free_cases(3, logit_bias={7: 3.0, 9: -2.0}, min_tokens=9, stop_token_ids=list(range(0, 500, 3)))
    expected = run_alone(plain(tiny_path), cases)
    engine = speculating(tiny_path, 3)
    Chain(engine, {**outputs_by_seed(cases, expected), 3: [1] * 9})
    waits = count_waits(engine)
    names = [engine.add_request(case.prompt, case.params) for case in cases]
    eos = engine.model_config.eos_token_id
    bad = SamplingParams(allowed_token_ids=[eos], min_tokens=2, max_tokens=8, seq_seed=3)
    masked = engine.add_request([3, 4], bad)
    done = finish(engine)
    assert [summary(done[name].outputs[0]) for name in names] == expected
    assert done[masked].error
    assert not waits


def test_truncated_prompts(tiny_path: Path) -> None:
    """Windows of the decoder are narrow just behind the prompt, where the host does not know positions either."""
    arguments: dict[str, Any] = {"prefill_truncation": "compact", "prefill_keep_tokens": 24}
    cases = free_cases(4)
    cases = [Case(random_ids(40 + 17 * number, seed=number), case.params) for number, case in enumerate(cases)]
    expected = run_alone(plain(tiny_path, **arguments), cases)
    assert expected != run_alone(plain(tiny_path), cases)
    engine = speculating(tiny_path, 4, max_num_batched_tokens=32, **arguments)
    chain = Chain(engine, outputs_by_seed(cases, expected))
    assert run_crowd(engine, cases, seed=2) == expected
    assert chain.num_wrong_guesses > 5


@pytest.mark.parametrize("arguments", [{}, {"adaptive_verification": True}], ids=["gate", "budget"])
def test_steps_that_are_planned_by_what_they_cost(tiny_path: Path, arguments: dict[str, Any]) -> None:
    """Where drafting is tried against not drafting, and where confidence limits the rows: that breaks the chain."""
    cases = random_cases(8, seed=9)
    expected = run_crowd(plain(tiny_path), cases, seed=1)
    engine = make_engine(tiny_path, **arguments)  # as many drafts as the model was trained for, while they pay
    assert engine.planner is not None
    chain = Chain(engine, outputs_by_seed(cases, expected))
    for seed in (1, 2):
        assert run_crowd(engine, cases, seed=seed) == expected
        assert engine.planner is not None
        engine.planner._rates.check()
    assert chain.num_open > 0


def _once(function: Callable[..., Any], error: BaseException, call: int) -> Any:
    """``function``, but its call number ``call`` raises."""
    calls = 0

    def run(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            raise error
        return function(*arguments, **named)

    return run


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("no memory")], ids=["interrupt", "failure"])
@pytest.mark.parametrize("call", [1, 3])
@pytest.mark.parametrize("where", ["read", "sample_unread", "launch", "follow"])
def test_interrupted_and_failed_steps(tiny_path: Path, where: str, call: int, error: BaseException) -> None:
    """Requests of that step end; whoever comes later finds slots and memory in order."""
    cases = free_cases(3, max_tokens=12)
    expected = run_alone(plain(tiny_path), cases)
    engine = speculating(tiny_path, 3)
    Chain(engine, outputs_by_seed(cases, expected))
    names = [engine.add_request(case.prompt, case.params) for case in cases]
    owner: Any = engine.worker.drafter if where == "follow" else engine.worker
    setattr(owner, where, _once(getattr(owner, where), error, call))
    if isinstance(error, KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            finish(engine)
    else:
        finish(engine)
    assert all(engine.is_finished(name) for name in names)
    engine.take_changes()
    engine.drain()
    engine.check()
    assert run_crowd(engine, cases, seed=1) == expected
