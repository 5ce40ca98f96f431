"""Two evaluations of the same samples."""

from __future__ import annotations

import pytest
from rich.console import Console

from deepinfer.errors import ConfigError
from deepinfer.evaluation.compare import compare, render_comparison
from deepinfer.evaluation.evaluate import Evaluation, Plan, evaluate
from deepinfer.evaluation.report import as_json, render
from deepinfer.evaluation.suite import ask, cells_of, make_problems
from tests.evaluation.scripted import ScriptedModel, knows


def evaluation(wrong: int, *, seed: int = 0, chunk: int = 1) -> Evaluation:
    problems = make_problems(ScriptedModel(str), cells_of(["copy"])[0], 40, seed)
    model = ScriptedModel(knows([problem.sample for problem in problems], wrong), chunk=chunk)
    return Evaluation(answers=ask(model, problems, batch=16))


def test_differences_are_paired():
    found = compare(evaluation(wrong=2), evaluation(wrong=12, chunk=3))
    row = found["tasks"]["copy"]["512"]
    assert (row["a"], row["b"], row["n"]) == (0.95, 0.7, 40)
    assert (row["only_a"], row["only_b"]) == (10, 0)
    assert row["difference"]["value"] == pytest.approx(-0.25)
    assert row["difference"]["high"] < 0
    assert row["p_value"] == pytest.approx(2 / 2**10, abs=1e-4)
    assert row["same_text"] == pytest.approx(0.75)
    assert 1.2 < found["tokens_per_step"]["low"] <= found["tokens_per_step"]["value"] <= 2


def test_equal_engines_differ_by_nothing():
    row = compare(evaluation(wrong=4), evaluation(wrong=4))["tasks"]["copy"]["512"]
    assert row["same_text"] == 1
    assert row["p_value"] == 1
    assert row["difference"]["low"] < 0 < row["difference"]["high"]


def test_different_samples_are_refused():
    with pytest.raises(ConfigError, match="tokenizers"):
        compare(evaluation(wrong=0), evaluation(wrong=0, seed=1))


def test_only_common_cells_are_compared():
    nothing = compare(evaluation(wrong=0), Evaluation())
    assert nothing == {"tasks": {}, "bits_per_byte": None, "tokens_per_step": None}


def test_texts_are_compared_in_bits_per_byte():
    plan = Plan(tasks=("text",), samples={0: 1}, max_windows=2)
    found = compare(*(evaluate(ScriptedModel(lambda prompt: "x"), plan) for _ in range(2)))
    assert found["bits_per_byte"] == {"value": 0.0, "low": 0.0, "high": 0.0}


def test_tables_show_the_numbers():
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    a, b = evaluation(wrong=2), evaluation(wrong=12)
    console.print(render(as_json(a)), render_comparison(compare(a, b)))
    shown = console.export_text()
    assert "95.0 %" in shown
    assert "-25.0" in shown
    assert "10, 0" in shown
