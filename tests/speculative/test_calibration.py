"""Fitting temperatures, and what logs and files may look like."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from deepinfer.errors import ConfigError
from deepinfer.speculative.calibration import (
    OnlineCalibrator,
    calibrate,
    confidences,
    expected_calibration_error,
    fit_temperatures,
)
from deepinfer.speculative.confidence_log import ConfidenceData, log_line, read_logs
from deepinfer.speculative.temperatures import MIN_TEMPERATURE, check_temperatures, load_temperatures

TRUE = (2.0, 0.5, 1.5)


def _observations(count: int, seed: int = 0, verified: int | None = None) -> ConfidenceData:
    """Drafts that stand with probability sigmoid(logit / T) given the ones before, T being ``TRUE``."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(1.0, 2.0, (count, len(TRUE)))
    stands = rng.random(logits.shape) < confidences(logits, TRUE)
    accepted = np.cumprod(stands, axis=1).sum(1)
    limit = np.full(count, len(TRUE)) if verified is None else np.full(count, verified)
    return ConfidenceData(logits, np.minimum(accepted, limit), limit)


def test_true_temperatures_are_found():
    found = fit_temperatures(_observations(20000))
    assert found.temperatures == pytest.approx(TRUE, rel=0.15)
    assert max(found.errors_after) < 0.015
    assert found.errors_before[0] > 0.05
    fresh = _observations(20000, seed=1)
    survival = np.cumprod(confidences(fresh.logits, found.temperatures), 1)
    for slot in range(3):
        assert expected_calibration_error(survival[:, slot], fresh.accepted > slot) < 0.02


def test_slots_without_data_keep_temperature_one():
    found = fit_temperatures(_observations(5000, verified=1))
    assert found.temperatures[0] == pytest.approx(2.0, rel=0.15)
    assert found.temperatures[1:] == (1.0, 1.0)
    assert found.num_rows == (5000, 0, 0)
    assert math.isnan(found.errors_after[1])


def test_rejections_count_only_where_an_acceptance_would_have():
    """A mixture of short and full verification gives the same fit: short rows say nothing about later slots."""
    full, short = _observations(20000), _observations(20000, seed=2, verified=1)
    both = ConfidenceData(*(np.concatenate(pair) for pair in zip(_parts(full), _parts(short), strict=True)))
    assert fit_temperatures(both).temperatures == pytest.approx(TRUE, rel=0.15)
    assert fit_temperatures(both).num_rows == (40000, 20000, 20000)


def _parts(data: ConfidenceData):
    return data.logits, data.accepted, data.verified


def test_expected_calibration_error_by_hand():
    predicted = np.array([0.1, 0.1, 0.9, 1.0])
    happened = np.array([False, True, True, True])
    assert expected_calibration_error(predicted, happened, 2) == pytest.approx((abs(0.2 - 1) + abs(1.9 - 2)) / 4)
    assert expected_calibration_error(np.array([0.0, 1.0]), np.array([False, True])) == 0.0


def test_command_reads_logs_and_writes_what_the_engine_loads(tmp_path):
    data = _observations(4000)
    logs = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    rows = list(zip(data.logits.tolist(), data.accepted.tolist(), data.verified.tolist(), strict=True))
    logs[0].write_text("".join(log_line(*row) for row in rows[:1000]) + "\n")
    logs[1].write_text("".join(log_line(*row) for row in rows[1000:]))
    output = tmp_path / "temperatures.json"
    found = calibrate(logs, output, num_slots=3)
    assert load_temperatures(output, 3) == pytest.approx(found.temperatures)
    assert found.temperatures == pytest.approx(TRUE, rel=0.3)
    assert json.loads(output.read_text())["num_rows"] == [4000, 4000, 4000]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "b.jsonl", "temperatures.json"]
    assert load_temperatures(output, 2) == found.temperatures[:2]
    assert load_temperatures(output, 5) == (*found.temperatures, found.temperatures[-1], found.temperatures[-1])


@pytest.mark.parametrize(
    "line",
    [
        "nonsense",
        "[]",
        '{"logits": [1.0], "accepted": 2, "verified": 1}',
        '{"logits": [1.0], "accepted": 0, "verified": 2}',
        '{"logits": [NaN], "accepted": 0, "verified": 1}',
        '{"logits": [], "accepted": 0, "verified": 0}',
        f'{{"logits": [1{"0" * 400}], "accepted": 0, "verified": 1}}',
        "[" * 100_000,
        '{"logits": [1.0], "accepted": 0.5, "verified": 1}',
        '{"logits": [1.0, 2.0, 3.0], "accepted": 0, "verified": 1}',
    ],
)
def test_bad_lines_are_named(tmp_path, line):
    path = tmp_path / "log.jsonl"
    path.write_text(log_line([1.0, 2.0], 1, 2) + line + "\n")
    with pytest.raises(ConfigError, match="line 2"):
        read_logs([path])


def test_a_line_separator_inside_a_string_ends_no_line(tmp_path):
    path = tmp_path / "log"
    path.write_text('{"logits": [0.5], "accepted": 1, "verified": 1, "note": "a\u2028b"}\n', encoding="utf-8")
    assert len(read_logs([path]).accepted) == 1


def test_missing_and_empty_logs_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_logs([tmp_path / "none"])
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ConfigError, match="no line"):
        read_logs([tmp_path / "empty"])


def test_temperatures_of_wrong_length_or_kind_are_refused():
    assert check_temperatures(2, 3) == (2.0, 2.0, 2.0)
    assert check_temperatures([1.5], 2) == (1.5, 1.5)
    assert check_temperatures([0.0, 3.0], 2) == (MIN_TEMPERATURE, 3.0)
    with pytest.raises(ConfigError, match="2 of them"):
        check_temperatures([1.0, 1.0], 5)
    for bad in (math.nan, math.inf, -1.0):
        with pytest.raises(ConfigError, match="finite"):
            check_temperatures(bad, 1)
    with pytest.raises(ConfigError, match="5"):
        OnlineCalibrator(5, [1.0, 1.0])


def test_unreadable_temperature_files_are_refused(tmp_path):
    path = tmp_path / "t.json"
    for content in ("{", "[]", '{"other": 1}', '{"temperatures": []}', "[" * 100_000):
        path.write_text(content)
        with pytest.raises(ConfigError, match=r"t\.json"):
            load_temperatures(path, 2)
    for content in ('["1", 2]', "[NaN, 1]", "[-1, 1]", f"[1{'0' * 400}, 1]"):
        path.write_text(f'{{"temperatures": {content}}}')
        with pytest.raises(ConfigError, match=r"t\.json") as caught:
            load_temperatures(path, 2)
        assert "finite number" in str(caught.value)


def test_online_calibrator_follows_the_drafter():
    online = OnlineCalibrator(3, window=3000)
    assert online.refit() == (1.0, 1.0, 1.0)
    data = _observations(3000)
    for logits, accepted, verified in zip(*(part.tolist() for part in _parts(data)), strict=True):
        online.observe(logits, accepted, verified)
    assert online.refit() == pytest.approx(TRUE, rel=0.35)
    for logits in data.logits.tolist():
        online.observe(logits, 0, 1)  # from now on nothing is ever accepted
    assert online.refit()[1:] == online.temperatures[1:] == pytest.approx(TRUE[1:], rel=0.35)
