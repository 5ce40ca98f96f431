"""Steps that are sampled before the step before them has been read give the same outputs.

An accelerator runs them from tokens that only its memory holds. Here the same path runs on a CPU, see
:mod:`tests.engine.chained`; steps with drafts are in ``test_chained_drafts.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deepinfer.engine.engine import Engine
from deepinfer.sampling.params import SamplingParams
from tests.engine.chained import Chain
from tests.engine.requests import Case, mixed_cases, random_cases, run_crowd
from tests.engine.support import make_checkpoint, make_engine, random_ids


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny") / "model")


@pytest.mark.parametrize("seed", [1, 2])
def test_same_outputs_in_a_crowd(path: Path, seed: int) -> None:
    """Penalties and grammars among the requests break the chain again and again."""
    cases = mixed_cases(20, seed)
    expected = run_crowd(make_engine(path, num_speculative_tokens=0, async_scheduling=False), cases, seed=seed)
    engine = make_engine(path, num_speculative_tokens=0)
    chain = Chain(engine)
    assert run_crowd(engine, cases, seed=seed + 7) == expected
    assert chain.num_open > 0


def test_simple_requests_chain_all_the_way(path: Path) -> None:
    cases = [
        Case(random_ids(5 + 9 * number, seed=number), SamplingParams(max_tokens=12, temperature=1.0, seq_seed=number))
        for number in range(6)
    ]
    expected = run_crowd(make_engine(path, num_speculative_tokens=0, async_scheduling=False), cases, seed=0)
    engine = make_engine(path, num_speculative_tokens=0)
    chain = Chain(engine)
    assert run_crowd(engine, cases, seed=0) == expected
    tokens = sum(len(output[0]) for output in expected)
    assert chain.num_open >= tokens - 3 * len(cases)
    assert chain.num_wrong_guesses == 0


def test_preempted_and_aborted(path: Path) -> None:
    cases = random_cases(12, seed=4)
    expected = run_crowd(make_engine(path, num_speculative_tokens=0, async_scheduling=False), cases, seed=1)
    engine = make_engine(path, num_speculative_tokens=0, num_blocks=4)
    Chain(engine)
    doomed = engine.add_request(random_ids(30), SamplingParams(max_tokens=50, ignore_eos=True))
    for _ in range(4):
        engine.step()
    engine.abort(doomed)
    assert any(output.finished for output in engine.step())
    assert run_crowd(engine, cases, seed=2) == expected
    engine.check()


@pytest.mark.parametrize("drafts", [0, 4])
def test_prompts_of_the_start_leave_no_trace(path: Path, drafts: int) -> None:
    """They run in the slot and the block that no sequence uses."""
    arguments = {"num_speculative_tokens": drafts, "adaptive_verification": False}
    cases = random_cases(8, seed=6)
    expected = run_crowd(make_engine(path, async_scheduling=False, **arguments), cases, seed=1)
    engine = make_engine(path, **arguments)
    chain = Chain(engine)
    assert chain.num_open == 0
    forwards: list[int] = []
    run = engine.runner.run
    engine.runner.run = lambda plan: forwards.append(plan.num_rows) or run(plan)  # type: ignore[method-assign, func-returns-value]
    engine.worker.prepare(300, 0, show_progress=False)
    assert forwards == [48, 300]
    engine.check()
    assert run_crowd(engine, cases, seed=2) == expected
    engine.check()


def test_prompts_of_the_start_wait_where_steps_have_to(path: Path) -> None:
    """The rejection verifier needs the distributions of the drafts, so its steps are never chained."""
    arguments = {"num_speculative_tokens": 4, "adaptive_verification": False, "sampler": "rejection"}
    cases = random_cases(6, seed=3)
    expected = run_crowd(make_engine(path, **arguments), cases, seed=1)
    engine = make_engine(path, **arguments)
    engine.runner.device_tokens = object()  # type: ignore[assignment] - as on a GPU
    engine.worker.prepare(100, 0, show_progress=False)
    engine.runner.device_tokens = None
    assert run_crowd(engine, cases, seed=1) == expected
    engine.check()


def _once(function: Any, error: BaseException, call: int) -> Any:
    """``function``, but its call number ``call`` raises."""
    calls = 0

    def run(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            raise error
        return function(*arguments, **named)

    return run


def _finish(engine: Engine, names: list[str]) -> list[tuple[int, ...]]:
    """Run to the end. Returns the tokens of these requests."""
    done = {}
    for _ in range(200):
        if not engine.has_work():
            break
        done.update({output.request_id: output for output in engine.step() if output.finished})
    engine.check()
    return [tuple(done[name].outputs[0].token_ids) for name in names]


@pytest.mark.parametrize("call", [1, 2, 3, 4])
@pytest.mark.parametrize("where", ["read", "sample_unread", "launch"])
def test_interrupted_while_tokens_are_awaited(path: Path, where: str, call: int) -> None:
    """A second Ctrl-C lands where the host waits. Requests of that step end, and the engine goes on."""
    params = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True)
    prompts = [random_ids(6 + number, seed=number) for number in range(3)]
    plain = make_engine(path, num_speculative_tokens=0, async_scheduling=False)
    expected = _finish(plain, [plain.add_request(prompt, params) for prompt in prompts])
    engine = make_engine(path, num_speculative_tokens=0)
    Chain(engine)
    doomed = [engine.add_request(prompt, params) for prompt in prompts]
    setattr(engine.worker, where, _once(getattr(engine.worker, where), KeyboardInterrupt(), call))
    with pytest.raises(KeyboardInterrupt):
        _finish(engine, doomed)
    assert all(engine.is_finished(name) for name in doomed)
    engine.take_changes()
    engine.drain()
    engine.check()
    assert _finish(engine, [engine.add_request(prompt, params) for prompt in prompts]) == expected


@pytest.mark.parametrize("chained", [False, True])
@pytest.mark.parametrize("where", ["run", "sample"])
def test_a_failed_step_spares_those_that_start_behind_it(path: Path, chained: bool, where: str) -> None:
    """Sequences of a failed step know neither where they stand nor their newest token: no step may run them again."""
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    engine = make_engine(path, num_speculative_tokens=0)
    good = engine.add_request(random_ids(9, seed=3), params)
    expected = _finish(engine, [good])
    engine = make_engine(path, num_speculative_tokens=0)
    if chained:
        Chain(engine)
    name = "sample_unread" if where == "sample" and chained else where
    owner = engine.runner if where == "run" else engine.worker
    setattr(owner, name, _once(getattr(owner, name), RuntimeError("no memory"), 1))
    bad = engine.add_request(random_ids(7, seed=4), params)
    engine.run_step()
    good = engine.add_request(random_ids(9, seed=3), params)
    assert _finish(engine, [good, bad]) == [expected[0], ()]


def test_a_scored_prompt_breaks_the_chain_only_while_it_is_computed(path: Path) -> None:
    scored = SamplingParams(max_tokens=12, temperature=0, prompt_logprobs=1, ignore_eos=True)
    plain = make_engine(path, num_speculative_tokens=0, async_scheduling=False)
    name = plain.add_request(random_ids(40, seed=5), scored)
    while not plain.is_finished(name):
        plain.run_step()
    engine = make_engine(path, num_speculative_tokens=0, max_num_batched_tokens=16)
    chain = Chain(engine)
    engine.add_request(random_ids(5), SamplingParams(max_tokens=30, temperature=0, ignore_eos=True))
    again = engine.add_request(random_ids(40, seed=5), scored)
    while not engine.is_finished(again):
        engine.run_step()
    (expected,), found = plain.take_changes([name]), engine.take_changes([again])[0]
    assert found.prompt_logprobs == expected.prompt_logprobs
    assert found.outputs[0].token_ids == expected.outputs[0].token_ids
    assert chain.num_open > 10
