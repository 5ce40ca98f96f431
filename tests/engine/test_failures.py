"""Failures stay with the request that they belong to, and every request ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer.engine.engine import Engine
from deepinfer.engine.outputs import RequestOutput
from deepinfer.errors import EngineError, RequestError
from deepinfer.sampling.params import SamplingParams
from deepinfer.structured.spec import Choice
from tests.engine.support import make_engine, random_ids

BOTH = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
PLAIN = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
DRAFTS = pytest.mark.parametrize("drafts", [0, 4])


def run(engine: Engine, most_steps: int = 400) -> dict[str, RequestOutput]:
    """All results; a request that never ends is a failure of the test, not of its time limit."""
    found = {}
    for _ in range(most_steps):
        if not engine.has_work():
            engine.check()
            return found
        found.update({output.request_id: output for output in engine.step() if output.finished})
    raise AssertionError(f"after {most_steps} steps {len(found)} requests are finished and there is still work")


@BOTH
@DRAFTS
def test_a_sequence_that_fills_all_memory_ends_with_its_tokens(tiny_path: Path, is_async: bool, drafts: int) -> None:
    engine = make_engine(tiny_path, num_blocks=3, async_scheduling=is_async, num_speculative_tokens=drafts)
    name = engine.add_request(random_ids(250), SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))
    output = run(engine)[name]
    assert output.outputs[0].finish_reason == "length"
    assert len(output.outputs[0].token_ids) == 256 + 1 - 250, "every place is used, drafts or not"
    assert output.error
    roomy = make_engine(tiny_path, num_blocks=8)
    name = roomy.add_request(random_ids(250), SamplingParams(max_tokens=7, temperature=0, ignore_eos=True))
    assert run(roomy)[name].outputs[0].token_ids == output.outputs[0].token_ids


@BOTH
@DRAFTS
def test_a_row_without_a_token_spares_its_neighbours(tiny_path: Path, is_async: bool, drafts: int) -> None:
    arguments: dict[str, Any] = {"async_scheduling": is_async, "num_speculative_tokens": drafts}
    plain = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    prompts = [random_ids(5 + index, seed=index) for index in range(3)]
    engine = make_engine(tiny_path, **arguments)
    expected = [engine.add_request(prompt, plain) for prompt in prompts]
    tokens = [output.outputs[0].token_ids for output in map(run(engine).__getitem__, expected)]
    # The same engine again: its slots hold what the first requests left there.
    eos = engine.model_config.eos_token_id
    masked = engine.add_request([3, 4], SamplingParams(allowed_token_ids=[eos], min_tokens=2, max_tokens=8))
    names = [engine.add_request(prompt, plain) for prompt in prompts]
    results = run(engine)
    assert results[masked].outputs[0].finish_reason == "error"
    assert "no token can be sampled" in str(results[masked].error)
    assert "repetition_penalty" in str(results[masked].error)
    assert [results[name].outputs[0].token_ids for name in names] == tokens


@pytest.mark.parametrize(
    "extreme", [{"repetition_penalty": 1e-30}, {"repetition_penalty": 1e30}, {"temperature": 3.4e38}], ids=str
)
def test_the_ends_of_the_ranges_leave_tokens_to_sample(tiny_path: Path, extreme: dict[str, Any]) -> None:
    engine = make_engine(tiny_path)
    blocked = {"logit_bias": {5: -100.0}, "min_tokens": 8}  # -inf for EOS: a temperature must not turn it into NaN
    values = [{"max_tokens": 8, "temperature": temperature, **blocked, **extreme} for temperature in (0.0, 1.0)]
    names = [engine.add_request(random_ids(20), SamplingParams.from_dict(each)) for each in values]
    results = run(engine)
    assert [(results[name].error, len(results[name].outputs[0].token_ids)) for name in names] == [(None, 8)] * 2


@BOTH
def test_nan_in_one_sequence_spares_its_neighbours(tiny_path: Path, is_async: bool) -> None:
    engine = make_engine(tiny_path, async_scheduling=is_async)
    plain = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    good = engine.add_request([9, 10, 11], plain)
    expected = run(engine)[good].outputs[0].token_ids
    embedding = engine.runner.model.embedding
    kept = embedding[77].clone()
    embedding[77] = torch.nan
    bad, good = engine.add_request([5, 77, 6], plain), engine.add_request([9, 10, 11], plain)
    results = run(engine)
    embedding[77] = kept
    assert results[bad].outputs[0].finish_reason == "error"
    assert results[good].outputs[0].token_ids == expected
    again = engine.add_request([9, 10, 11], plain)
    assert run(engine)[again].outputs[0].token_ids == expected


def test_a_limit_before_max_tokens_is_said_in_words(tiny_path: Path) -> None:
    engine = make_engine(tiny_path, max_model_len=64)
    name = engine.add_request(random_ids(60), SamplingParams(max_tokens=500, temperature=0, ignore_eos=True))
    output = run(engine)[name]
    assert output.outputs[0].finish_reason == "length"
    assert len(output.outputs[0].token_ids) == 5
    assert "max_model_len = 64" in str(output.error)


def test_a_closed_engine_says_so(tiny_path: Path) -> None:
    engine = make_engine(tiny_path)
    engine.add_request([1, 2], SamplingParams())
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.run_step()


@BOTH
def test_prompt_logprobs_are_right_whatever_the_neighbours_verify(tiny_path: Path, is_async: bool) -> None:
    """The rows of a step are those that ran, not those that were planned."""
    scored = SamplingParams(max_tokens=2, temperature=0, prompt_logprobs=0, ignore_eos=True)
    prompt = random_ids(40, seed=77)
    alone = make_engine(tiny_path, num_speculative_tokens=0, prefix_cache="off")
    name = alone.add_request(prompt, scored)
    expected = run(alone)[name].prompt_logprobs
    for steps in (1, 2, 5):
        engine = make_engine(tiny_path, async_scheduling=is_async, num_speculative_tokens=4, adaptive_verification=True)
        others = [engine.add_request(random_ids(6, seed=index), PLAIN) for index in range(4)]
        for _ in range(steps):
            engine.run_step()
        name = engine.add_request(prompt, scored)
        others.append(engine.add_request(random_ids(30, seed=9), PLAIN))
        results = run(engine)
        assert results[name].prompt_logprobs == expected, f"after {steps} steps"
        assert all(results[other].error is None for other in others)


@BOTH
@DRAFTS
def test_a_stop_before_a_bad_row_wins(tiny_path: Path, is_async: bool, drafts: int) -> None:
    """The earliest event ends a request, also inside a block of drafts."""
    engine = make_engine(tiny_path, async_scheduling=is_async, num_speculative_tokens=drafts)
    params = SamplingParams(
        structured=Choice(["yes"]), stop=["ye"], first_n_token_no_eos=8, max_tokens=12, temperature=0
    )
    name = engine.add_request([1, 2, 3], params)
    output = run(engine)[name]
    engine.close()
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason, output.error) == ("stop", "ye", None)


def test_refused_requests_leave_nothing_behind(tiny_path: Path) -> None:
    engine, twin = make_engine(tiny_path), make_engine(tiny_path)
    sampled = SamplingParams(max_tokens=6, ignore_eos=True)
    with pytest.raises(RequestError, match="ignore_eos"):
        engine.add_request([1], SamplingParams(structured=Choice(["a"]), ignore_eos=True))
    with pytest.raises(RequestError, match="after_reasoning"):
        engine.add_request([1], SamplingParams(structured=Choice(["a"], after_reasoning="zzz")))
    for salt in (None, 5, "\ud800"):
        with pytest.raises(RequestError, match="cache_salt"):
            engine.add_request([1], PLAIN, cache_salt=salt)  # type: ignore[arg-type]
    assert not engine.has_work()
    names = engine.add_request([4, 5], sampled), twin.add_request([4, 5], sampled)
    tokens = [run(each)[name].outputs[0].token_ids for each, name in zip((engine, twin), names, strict=True)]
    assert tokens[0] == tokens[1], "a refused request must not change the seeds of later ones"
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.add_request([1], PLAIN)
