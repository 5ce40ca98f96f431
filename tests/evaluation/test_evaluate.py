"""A whole evaluation with scripted models: the record's keys, skipped parts, progress."""

from __future__ import annotations

import json

import pytest

from deepinfer.errors import ConfigError
from deepinfer.evaluation.draft_metrics import DraftRecorder
from deepinfer.evaluation.evaluate import Plan, evaluate
from deepinfer.evaluation.report import as_json
from deepinfer.evaluation.suite import cells_of, make_problems
from tests.evaluation.scripted import EOS, ScriptedModel, knows


def model_that_knows(*tasks: str, **options) -> ScriptedModel:
    samples = [
        problem.sample for cell in cells_of(tasks) for problem in make_problems(ScriptedModel(str), cell, 8, seed=0)
    ]
    return ScriptedModel(knows(samples), **options)


def test_the_record_has_the_keys_of_the_machine_form():
    plan = Plan(tasks=("addition", "copy", "text"), samples={0: 8}, max_windows=2)
    record = json.loads(json.dumps(as_json(evaluate(model_that_knows("addition"), plan)), allow_nan=False))
    assert record["tasks"]["addition"]["512"] == {"exact_match": 1.0, "n": 8, "low": 0.6756, "high": 1.0}
    assert record["tasks"]["copy"]["512"]["exact_match"] == 0
    assert record["perplexity"] == pytest.approx(2)
    assert set(record["perplexity_by_text"]) == {"austen", "bible", "python"}
    assert record["dspark"] == {"mean_accepted_per_step": None, "acceptance_by_position": [], "ece": None}
    assert record["num_errors"] == 0
    assert record["cached_prompt_share"] == 0


def test_samples_per_length():
    plan = Plan(tasks=("needle",), samples={0: 3, 2048: 2, 4096: 1})
    record = as_json(evaluate(ScriptedModel(lambda prompt: "x"), plan))
    assert {length: row["n"] for length, row in record["tasks"]["needle"].items()} == {"512": 3, "2048": 2, "4096": 1}


def test_cells_that_do_not_fit_the_engine_are_named():
    plan = Plan(tasks=("needle",), samples={0: 2})
    record = as_json(evaluate(ScriptedModel(lambda prompt: "x", max_model_len=1024), plan))
    assert list(record["tasks"]["needle"]) == ["512"]
    assert record["skipped"] == {"needle 2048": "max_model_len is 1024", "needle 4096": "max_model_len is 1024"}
    with pytest.raises(ConfigError, match="max_model_len is 100"):
        evaluate(ScriptedModel(str, max_model_len=100), plan)


def test_perplexity_is_skipped_where_prompts_have_no_logits():
    model = ScriptedModel(lambda prompt: "x")
    model.engine.config.prefill.is_truncating = True
    record = as_json(evaluate(model, Plan(tasks=("text", "facts"), samples={0: 2})))
    assert record["perplexity"] is None
    assert "truncation" in record["skipped"]["text"]


def test_progress_reaches_its_total():
    seen: list[tuple[str, int, int]] = []
    plan = Plan(tasks=("addition", "facts"), samples={0: 5}, batch=2)
    evaluate(ScriptedModel(lambda prompt: "x"), plan, lambda *state: seen.append(state))
    assert ("facts 512", 10, 10) in seen
    assert all(done <= total for _, done, total in seen)


def test_draft_metrics_come_with_tasks():
    plan = Plan(tasks=("addition",), samples={0: 2})
    result = evaluate(ScriptedModel(lambda prompt: "x", drafts=2), plan)
    assert isinstance(result.drafts, DraftRecorder)
    result.drafts.label = "addition"
    for tokens in ([1], [1, 2, 3], [4, EOS]):
        result.drafts.observe("0", tokens, [0.9, 0.8])
    record = as_json(result)
    assert record["dspark"]["mean_accepted_per_step"] == 2.5
    assert record["dspark"]["acceptance_by_position"] == [1.0, 0.5]
    assert record["dspark_details"]["by_task"]["addition"]["num_steps"] == 2
