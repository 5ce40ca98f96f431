"""From a running engine's log to temperatures that the next engine takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deepinfer.config.engine import ObserveConfig
from deepinfer.engine.speculation_setup import CALIBRATION_FILE
from deepinfer.engine.statistics import EngineStatistics
from deepinfer.entrypoints.cli import main
from deepinfer.entrypoints.llm import LLM
from deepinfer.errors import ConfigError
from deepinfer.sampling.params import SamplingParams
from deepinfer.speculative.confidence_log import ConfidenceLog
from deepinfer.worker.step_results import SequenceTokens

ENGINE = {"max_model_len": 160, "max_num_seqs": 8, "num_threads": 1, "progress": False, "num_speculative_tokens": 3}


def test_log_is_written_calibrated_and_found_beside_the_checkpoint(own_model: Path, tmp_path: Path, capsys) -> None:
    log = tmp_path / "confidence.jsonl"
    with LLM(own_model, confidence_log=log, confidence_temperatures="2", **ENGINE) as llm:
        params = SamplingParams(temperature=2.0, max_tokens=40, seq_seed=1, ignore_eos=True)
        outputs = llm.generate(["a", "b", "c", "d"], params, use_tqdm=False)
        slots = llm.engine.worker.slots
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert len(lines) == sum(output.outputs[0].num_steps - 1 for output in outputs)  # the prompt's step verifies none
    behind_the_end = sum(output.outputs[0].num_drafts_verified for output in outputs) - sum(
        line["verified"] for line in lines
    )
    assert 0 <= behind_the_end <= 2 * len(outputs)
    assert all(len(line["logits"]) == 3 and line["accepted"] <= line["verified"] <= 3 for line in lines)
    assert slots.confidence.max() < 1
    # The newest confidences come from the newest logits at temperature 2, so both lie in one range.
    assert max(abs(logit) for line in lines for logit in line["logits"]) < 40

    assert main(["calibrate", str(log), "--output", str(own_model), "--num-drafts", "3"]) == 0
    out = capsys.readouterr().out
    assert "observations" in out
    assert "caution" in out
    fitted = json.loads((own_model / CALIBRATION_FILE).read_text())
    with LLM(own_model, **ENGINE) as llm:
        taken = llm.engine.worker.drafter
        assert taken is not None
        assert taken._temperatures.tolist() == pytest.approx(fitted["temperatures"])
    with LLM(own_model, **{**ENGINE, "num_speculative_tokens": 2}) as llm:  # a shorter block than was calibrated
        taken = llm.engine.worker.drafter
        assert taken is not None
        assert taken._temperatures.tolist() == pytest.approx(fitted["temperatures"][:2])


def test_drafts_behind_the_end_of_an_output_are_not_logged(tmp_path: Path) -> None:
    log = ConfidenceLog(tmp_path / "log", (1.0,) * 3)
    statistics = EngineStatistics(ObserveConfig(logging_interval_steps=0, disable_log_stats=True), 3, log)
    found = SequenceTokens([5, 6, 7, 8], first_row=0, num_drafts=3, confidence=[0.9, 0.8, 0.7], is_bad=False)
    statistics.verified(3, found)
    statistics.verified(2, found, end=2)
    statistics.close()
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [(line["accepted"], line["verified"]) for line in lines] == [(3, 3), (2, 2)]


def test_unusable_logs_and_outputs_are_refused(tmp_path: Path, own_model: Path, capsys) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text('{"logits": [1, 2], "accepted": 1, "verified": 2}\n')
    assert main(["calibrate", str(log), "--num-drafts", "5", "--output", str(tmp_path / "x.json")]) == 2
    assert "calibrate each draft length with its own logs" in capsys.readouterr().err
    before = log.read_text()
    assert main(["calibrate", str(log), "--output", str(log)]) == 2
    assert "also one of the logs" in capsys.readouterr().err
    assert log.read_text() == before
    assert main(["calibrate", str(log), "--num-drafts", "-2"]) == 2
    assert "--num-drafts is -2" in capsys.readouterr().err
    assert main(["calibrate", str(log), "--output", str(tmp_path / "x.json")]) == 2
    assert "1 observations of a draft" in capsys.readouterr().err
    assert not (tmp_path / "x.json").exists()
    log.write_text(before * 60)
    assert main(["calibrate", str(log), "--output", str(tmp_path / "missing" / "x.json")]) == 2
    assert "cannot be written" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="confidence log"):
        LLM(own_model, confidence_log=tmp_path / "missing" / "log", **ENGINE)


def test_step_times_are_kept_from_start_to_start(own_model: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("DEEPINFER_DECODE_PERF_CACHE_DIR", str(tmp_path / "costs"))
    monkeypatch.setenv("DEEPINFER_DECODE_PERF_CACHE_TTL_SEC", "600")

    def table(**more: object) -> object:
        with LLM(own_model, adaptive_verification=True, **{**ENGINE, **more}) as llm:
            assert llm.engine.config.speculation.cost_ttl_s == 600
            planner = llm.engine.planner
            assert planner is not None
            return planner.cost.table

    first = table()
    assert len(list((tmp_path / "costs").iterdir())) == 1
    assert table() == first, "times of two measurements are never the same: the second was read"
    assert table(numerics="float32") != first
    assert len(list((tmp_path / "costs").iterdir())) == 2
