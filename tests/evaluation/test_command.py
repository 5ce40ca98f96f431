"""``deepinfer eval`` from end to end on random weights: nothing is right, and everything is measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deepinfer.entrypoints.cli import main
from tests.engine.support import make_checkpoint

SMALL = ["--num-threads", "1", "--max-model-len", "560", "--num-blocks", "60", "--prefix-checkpoints", "8"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / "tiny")


def run(model: Path, *arguments: str) -> int:
    return main(["eval", "--model", str(model), *SMALL, *arguments])


def test_random_weights_score_zero_with_ablations(model, tmp_path, capsys):
    file = tmp_path / "eval.json"
    assert run(model, "--suite", "addition", "--samples", "1", "--json", str(file), "--ablations") == 0
    record = json.loads(file.read_text())
    assert record["tasks"] == {"addition": {"512": {"exact_match": 0.0, "n": 1, "low": 0.0, "high": 0.7935}}}
    assert 1 <= record["dspark"]["mean_accepted_per_step"] < 2
    assert len(record["dspark"]["acceptance_by_position"]) == 4
    assert record["numerics"] == "faithful"
    assert record["model"]["digest"].startswith("sha256:")
    assert record["config"]["scheduler"]["max_model_len"] == 560
    assert record["config"]["speculation"]["num_tokens"] == 4
    assert not record["config"]["speculation"]["stops_where_it_does_not_pay"]  # no score may depend on step times
    assert {"command", "seed", "versions", "commit", "machine"} <= set(record)
    assert list(record["ablations"]) == ["no_engram", "window_only", "random_selection"]
    assert record["ablations"]["window_only"]["tasks"]["addition"]["512"]["change"]["value"] == 0
    shown = capsys.readouterr().out
    assert "Exact match" in shown
    assert "Without a mechanism" in shown


def test_comparison_finds_equal_texts_with_and_without_speculation(model, tmp_path, capsys):
    file = tmp_path / "compare.json"
    flags = ("--num-speculative-tokens 0", "--num-speculative-tokens 2 --no-async-scheduling")
    assert run(model, "--suite", "addition", "--samples", "2", "--compare", *flags, "--json", str(file)) == 0
    record = json.loads(file.read_text())
    assert record["differences"]["tasks"]["addition"]["512"]["same_text"] == 1
    assert record["a"]["dspark"]["mean_accepted_per_step"] is None
    assert record["b"]["dspark"]["mean_accepted_per_step"] >= 1
    assert record["a"]["config"]["scheduler"]["pipeline_depth"] == 2
    assert record["b"]["config"]["scheduler"]["pipeline_depth"] == 1
    assert record["a"]["flags"] == flags[0]
    assert "B - A" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--suite", "noodle"], "noodle"),
        (["--suite", "needle", "--max-model-len", "128"], "no sample of these suites fits"),
        (["--json", "/nowhere/x.json"], "/nowhere"),
        (["--json", "/"], "that is a directory"),
        (["--suite", "addition", "--compare", "'", ""], "No closing quotation"),
        (["--warm-tokens", "-1"], "--warm-tokens is -1"),
        (["--compare", "", "", "--ablations"], "one by one"),
    ],
)
def test_mistakes_are_explained(model, capsys, arguments, said):
    assert run(model, *arguments) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("text", ["0", "x", "5,512=0", "5,-1=3"])
def test_sample_counts_are_checked(model, text):
    with pytest.raises(SystemExit):
        run(model, "--samples", text)


def test_samples_of_a_length_that_no_task_has_are_refused(capsys):
    assert main(["eval", "--suite", "addition", "--samples", "2,700=3"]) == 2
    assert "the lengths of the tasks are 512, 2048, 4096" in capsys.readouterr().err
