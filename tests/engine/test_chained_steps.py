"""Steps that are sampled before the step before them has been read give the same outputs.

An accelerator runs them from tokens that only its memory holds. Here the same path runs on a CPU: the runner takes
unknown tokens out of the device's table just before the forward.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer.engine.engine import Engine
from deepinfer.messages import PLACEHOLDER_TOKEN, Chunk, StepPlan
from deepinfer.sampling.params import SamplingParams
from deepinfer.worker.device_step import device_ngram_ids, token_ids
from deepinfer.worker.device_tokens import DeviceTokens
from deepinfer.worker.model_runner import StepResult
from deepinfer.worker.ragged_rows import RaggedRows
from tests.engine.requests import Case, mixed_cases, random_cases, run_crowd
from tests.engine.support import make_checkpoint, make_engine, random_ids


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny") / "model")


def chain(engine: Engine) -> Engine:
    """Let an engine on the CPU chain its steps; ``engine.num_chained`` counts rows whose token the host doesn't know."""
    runner, size = engine.runner, engine.model_config.text.engram_max_ngram_size
    tokens = DeviceTokens(runner.caches.geometry.num_slots, size, runner.device)
    runner.device_tokens = tokens
    run = runner.run
    engine.num_chained = 0  # type: ignore[attr-defined]

    def fill_in(chunk: Chunk) -> Chunk:
        if chunk.token_ids != (PLACEHOLDER_TOKEN,):
            return chunk
        engine.num_chained += 1  # type: ignore[attr-defined]
        known = [token for token in tokens.ngrams[chunk.state_slot].tolist() if token >= 0]
        assert known[0] == int(tokens.newest[chunk.state_slot])
        return replace(chunk, token_ids=(known[0],), history=tuple(reversed(known[1:])))

    def run_filled(plan: StepPlan, trace: Any = None) -> StepResult:
        rows = RaggedRows.of_chunks(plan.chunks)
        host = device_ngram_ids(plan.chunks, rows, token_ids(plan.chunks, rows.total), size)
        slots = torch.from_numpy(rows.slots[rows.sequence])
        ngrams = tokens.fill_ngrams(torch.from_numpy(host), slots)
        result = run(replace(plan, chunks=tuple(map(fill_in, plan.chunks))), trace)
        return replace(result, ngram_ids=ngrams)

    runner.run = run_filled  # type: ignore[method-assign]
    return engine


@pytest.mark.parametrize("seed", [1, 2])
def test_same_outputs_in_a_crowd(path: Path, seed: int) -> None:
    """Penalties and grammars among the requests break the chain again and again."""
    cases = mixed_cases(20, seed)
    expected = run_crowd(make_engine(path, num_speculative_tokens=0, async_scheduling=False), cases, seed=seed)
    engine = chain(make_engine(path, num_speculative_tokens=0))
    assert run_crowd(engine, cases, seed=seed + 7) == expected
    assert engine.num_chained > 0  # type: ignore[attr-defined]


def test_simple_requests_chain_all_the_way(path: Path) -> None:
    cases = [
        Case(random_ids(5 + 9 * number, seed=number), SamplingParams(max_tokens=12, temperature=1.0, seq_seed=number))
        for number in range(6)
    ]
    expected = run_crowd(make_engine(path, num_speculative_tokens=0, async_scheduling=False), cases, seed=0)
    engine = chain(make_engine(path, num_speculative_tokens=0))
    assert run_crowd(engine, cases, seed=0) == expected
    tokens = sum(len(output[0]) for output in expected)
    assert engine.num_chained >= tokens - 3 * len(cases)  # type: ignore[attr-defined]


def test_preempted_and_aborted(path: Path) -> None:
    cases = random_cases(12, seed=4)
    expected = run_crowd(make_engine(path, num_speculative_tokens=0, async_scheduling=False), cases, seed=1)
    engine = chain(make_engine(path, num_speculative_tokens=0, num_blocks=4))
    doomed = engine.add_request(random_ids(30), SamplingParams(max_tokens=50, ignore_eos=True))
    for _ in range(4):
        engine.step()
    engine.abort(doomed)
    assert any(output.finished for output in engine.step())
    assert run_crowd(engine, cases, seed=2) == expected
    engine.check()
