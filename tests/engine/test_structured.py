"""Structured output in the engine: valid texts, the same with and without drafts, failures that stay alone."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from deepinfer.engine.engine import FINISH_PROMPT_TOO_LONG, Engine
from deepinfer.engine.output_builder import FINISH_ERROR, FINISH_LENGTH, FINISH_STOP
from deepinfer.engine.outputs import CompletionOutput
from deepinfer.errors import RequestError
from deepinfer.sampling.params import SamplingParams
from deepinfer.scheduler.sequence import FINISH_ABORT
from deepinfer.structured import failures
from deepinfer.structured.spec import Choice, JsonSchema, Regex, StructuredSpec
from tests.engine.support import make_engine, random_ids

SCHEMA = {
    "type": "object",
    "properties": {"id": {"type": "integer", "minimum": 0, "maximum": 99}, "tag": {"enum": ["x", "yy"]}},
    "required": ["id", "tag"],
    "additionalProperties": False,
}
SPECS: list[StructuredSpec | None] = [
    JsonSchema(SCHEMA),
    Regex(r"[a-c]{2,5}-[0-9]{1,3}"),
    None,
    Choice(["yes", "no", "perhaps"]),
]


def params_of(index: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=60, seq_seed=index, temperature=[0.0, 1.0, 1.4][index % 3], structured=SPECS[index % len(SPECS)]
    )


def run(engine: Engine, count: int) -> list[tuple[list[int], str, str | None]]:
    names = [engine.add_request(random_ids(5, seed=index), params_of(index)) for index in range(count)]
    found = {}
    while engine.has_work():
        for output in engine.step():
            if output.finished:
                assert output.error is None, output.error
                each = output.outputs[0]
                found[output.request_id] = (each.token_ids, each.text, each.finish_reason)
        engine.check()
    engine.close()
    return [found[name] for name in names]


@pytest.fixture(scope="module")
def plain(tiny_path: Path) -> list[Any]:
    return run(make_engine(tiny_path, num_speculative_tokens=0, async_scheduling=False), 24)


def num_valid(results: list[Any]) -> int:
    """How many constrained texts ended on their own; every one of them has to be valid."""
    num_checked = 0
    for index, (_, text, reason) in enumerate(results):
        spec = SPECS[index % len(SPECS)]
        if spec is None or reason != "stop":
            continue
        num_checked += 1
        if isinstance(spec, JsonSchema):
            jsonschema.validate(json.loads(text), SCHEMA)
        elif isinstance(spec, Regex):
            assert re.fullmatch(r"[a-c]{2,5}-[0-9]{1,3}", text)
        else:
            assert text in ("yes", "no", "perhaps")
    return num_checked


def test_finished_texts_are_valid(plain: list[Any]) -> None:
    assert num_valid(plain) >= 12


@pytest.mark.parametrize(
    "arguments",
    [{"async_scheduling": False}, {}, {"adaptive_verification": True}, {"num_blocks": 5}],
    ids=["sync", "async", "adaptive", "few blocks"],
)
def test_drafts_and_schedule_change_nothing(tiny_path: Path, plain: list[Any], arguments: dict[str, Any]) -> None:
    engine = make_engine(tiny_path, num_speculative_tokens=4, **arguments)
    assert run(engine, 24) == plain


def test_rejection_sampler_writes_valid_texts(tiny_path: Path) -> None:
    assert num_valid(run(make_engine(tiny_path, sampler="rejection"), 12)) >= 6


def test_a_bad_schema_ends_its_request_only(tiny_path: Path) -> None:
    engine = make_engine(tiny_path, grammar_timeout_s=0.3, grammar_workers=1)
    with pytest.raises(RequestError, match="structured"):
        engine.add_request([1, 2], SamplingParams(structured="json"))
    with pytest.raises(RequestError):
        engine.add_request([1, 2], SamplingParams(structured=Regex("(a"), so_args=None))
    for timing in ({"trigger_token_ids": [3, 512]}, {"trigger_token_ids": [3], "bound_token_id": 512}):
        with pytest.raises(RequestError, match=r"token_ids? is 512"):  # it never comes: nothing would be constrained
            engine.add_request([1, 2], SamplingParams(structured=Regex("a", **timing)))
    heavy = JsonSchema({"type": "array", "items": {"enum": [f"value {i}" for i in range(9000)]}, "maxItems": 300})
    slow = engine.add_request([1, 2], SamplingParams(structured=heavy, max_tokens=8))
    good = engine.add_request([1, 2], SamplingParams(structured=Choice(["no"]), max_tokens=8))
    free = engine.add_request([1, 2], SamplingParams(max_tokens=8, ignore_eos=True))
    results = {}
    while engine.has_work():
        results.update({output.request_id: output for output in engine.step() if output.finished})
    engine.check()
    engine.close()
    assert results[slow].outputs[0].finish_reason == "schema_timeout"
    assert results[slow].error
    assert results[slow].outputs[0].token_ids == []
    assert results[good].outputs[0].text == "no"
    assert len(results[free].outputs[0].token_ids) == 8


def test_abort_finds_a_request_whose_grammar_is_pending(tiny_path: Path) -> None:
    engine = make_engine(tiny_path)
    name = engine.add_request([1, 2], SamplingParams(structured=Choice(["a", "b"])))
    assert engine.abort(name)
    (output,) = engine.take_changes()
    assert output.outputs[0].finish_reason == "abort"
    assert not engine.has_work()
    engine.check()
    engine.close()


def test_every_finish_reason_is_documented() -> None:
    described = inspect.getsource(CompletionOutput)
    kinds = [value for name, value in vars(failures).items() if name.isupper() and name != "VENDOR_REASON"]
    assert len(kinds) == 4
    for reason in (*kinds, FINISH_STOP, FINISH_LENGTH, FINISH_ERROR, FINISH_ABORT, FINISH_PROMPT_TOO_LONG):
        assert f"``{reason}``" in described
