"""What reaches the model is always a token: placeholders of steps that were planned ahead never do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deepinfer.engine.engine import Engine
from deepinfer.layers.step_state import StepState
from deepinfer.messages import StepPlan
from deepinfer.sampling.params import SamplingParams
from tests.engine.requests import Case, random_cases, run_alone, summary
from tests.engine.support import make_engine, random_ids

VOCAB = 512


class InputWatch:
    """Checks every id of every forward of an engine, the n-gram history among them, against what sequences hold."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.num_rows = self.num_cut = self.num_returns = 0
        self._decoded: set[str] = set()
        self._run, self._forward = engine.runner.run, engine.runner.model.forward
        engine.runner.run = self.run  # type: ignore[method-assign]
        engine.runner.model.forward = self.forward  # type: ignore[method-assign]

    def run(self, plan: StepPlan, trace: Any = None) -> Any:
        for chunk in plan.chunks:
            assert all(0 <= token < VOCAB for token in (*chunk.token_ids, *chunk.history)), chunk
            assert len(chunk.history) == min(chunk.start, 3)
            if chunk.is_prefill:
                self.num_returns += chunk.request_id in self._decoded
                self._decoded.discard(chunk.request_id)
            else:
                self._decoded.add(chunk.request_id)
                self.num_cut += chunk.num_rows < 1 + self.engine.config.speculation.num_tokens
        return self._run(plan, trace)

    def forward(self, state: StepState, caches: Any) -> Any:
        self.num_rows += len(state.ids)
        assert int(state.ids.min()) >= 0
        assert int(state.ids.max()) < VOCAB
        assert int(state.ngram_ids[:, 0].min()) >= 0
        assert int(state.ngram_ids.min()) >= -1  # a barrier: before the start of the sequence
        assert int(state.ngram_ids.max()) < VOCAB
        return self._forward(state, caches)


def watched_run(engine: Engine, cases: list[Case], doomed: dict[int, int]) -> tuple[InputWatch, list[Any]]:
    """All cases at once; some are aborted before a certain step. Returns finished requests in order."""
    assert engine.config.scheduler.async_scheduling
    watch = InputWatch(engine)
    names = [engine.add_request(case.prompt, case.params) for case in cases]
    found: dict[str, Any] = {}
    step = 0
    while engine.has_work():
        for index, when in doomed.items():
            if step == when:
                engine.abort(names[index])
        step += 1
        for output in engine.step():
            if output.finished:
                found[output.request_id] = output.outputs[0]
        engine.check()
    assert any(found[names[index]].finish_reason == "abort" for index in doomed)
    return watch, [found[name] for name in names]


def check_the_rest(path: Path, cases: list[Case], outputs: list[Any], doomed: dict[int, int]) -> None:
    """Those that were not aborted are what they are alone."""
    kept = [index for index in range(len(cases)) if index not in doomed]
    plain = make_engine(path, num_speculative_tokens=0, async_scheduling=False)
    assert [summary(outputs[index]) for index in kept] == run_alone(plain, [cases[index] for index in kept])


@pytest.mark.parametrize("is_adaptive", [False, True])
def test_no_placeholder_reaches_the_model_when_rows_are_scarce(tiny_path: Path, is_adaptive: bool) -> None:
    """S4: planned ahead, with a budget that cuts most drafts off, and aborts in between.

    (A running sequence never misses a step for want of rows: it gets one at least. What it can lose is its drafts.)
    """
    cases, doomed = random_cases(14, seed=9, longest=20), {1: 6, 4: 7, 8: 14}
    engine = make_engine(
        tiny_path,
        num_speculative_tokens=4,
        max_num_batched_tokens=9,
        max_num_seqs=8,
        adaptive_verification=is_adaptive,
    )
    watch, outputs = watched_run(engine, cases, doomed)
    assert watch.num_cut > 20, "drafts have to be left out"
    check_the_rest(tiny_path, cases, outputs, doomed)


def test_no_placeholder_reaches_the_model_after_a_preemption(tiny_path: Path) -> None:
    """S4: planned ahead, with sequences that lose their memory while a step of theirs runs, and aborts in between."""
    # Every sequence grows over the end of its only block, and there are not enough blocks for all at once.
    cases = [
        Case(random_ids(112 + index, seed=index), SamplingParams(max_tokens=24, seq_seed=index, ignore_eos=True))
        for index in range(8)
    ]
    engine, doomed = make_engine(tiny_path, num_speculative_tokens=4, num_blocks=11), {2: 4, 5: 9}
    watch, outputs = watched_run(engine, cases, doomed)
    assert watch.num_returns > 0, "sequences have to lose their memory after they began to decode"
    check_the_rest(tiny_path, cases, outputs, doomed)
