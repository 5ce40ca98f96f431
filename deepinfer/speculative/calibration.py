"""Sequential temperature scaling of draft confidences (engine spec 4.2). Torch-free.

The confidence of slot k is ``sigmoid(logit / T_k)``; the schedule uses products of them. So T_1, T_2, ... are fitted in
this order: each minimises the expected calibration error of the product up to its slot on observed drafts, the earlier
ones being fixed. A row says something about slot k if at least k of its drafts were verified. (A rejection before slot
k settles what would have happened there, but taking such rows and not the accepted ones beside them would be a biased
choice.)
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from deepinfer.errors import ConfigError
from deepinfer.speculative.confidence_log import ConfidenceData, read_logs
from deepinfer.speculative.temperatures import MAX_LOGIT, check_temperatures

NUM_BINS = 15
MIN_ROWS = 50
"""With fewer rows a slot keeps temperature 1: noise is no evidence."""
_GRID = np.geomspace(0.1, 10.0, 61)
_REFINEMENT = np.geomspace(1 / 1.08, 1.08, 17)  # a little more than a step of the grid to both sides


@dataclass(frozen=True, slots=True)
class Calibration:
    """Fitted temperatures and what they achieve on the data they were fitted to."""

    temperatures: tuple[float, ...]
    errors_before: tuple[float, ...]
    """Expected calibration error of the survival up to each slot at temperature 1; NaN without data."""
    errors_after: tuple[float, ...]
    num_rows: tuple[int, ...]
    """Rows that slot k was fitted to."""


def confidences(logits: np.ndarray, temperatures: Sequence[float]) -> np.ndarray:
    """``sigmoid(clamp(logits / T))``; float64 ``[rows, slots]``."""
    scaled = np.clip(logits / np.asarray(temperatures), -MAX_LOGIT, MAX_LOGIT)
    return 1.0 / (1.0 + np.exp(-scaled))


def expected_calibration_error(predicted: np.ndarray, happened: np.ndarray, num_bins: int = NUM_BINS) -> float:
    """Mean distance of predicted and observed frequency over bins of equal width, weighted by their rows.

    Args:
        predicted: ``[rows]`` in [0, 1].
        happened: bool ``[rows]``.
    Returns:
        In [0, 1]; NaN without rows.
    """
    if not len(predicted):
        return float("nan")
    bins = np.minimum((predicted * num_bins).astype(np.int64), num_bins - 1)
    difference = np.bincount(bins, weights=predicted - happened, minlength=num_bins)
    return float(np.abs(difference).sum() / len(predicted))


def fit_temperatures(data: ConfidenceData, *, min_rows: int = MIN_ROWS) -> Calibration:
    """Fit one temperature per slot."""
    temperatures: list[float] = []
    before, after, counts = [], [], []
    prefix = np.ones(len(data.logits))  # calibrated survival up to the slot before
    plain = np.ones(len(data.logits))
    for slot in range(data.num_slots):
        is_seen = data.verified > slot
        logits, earlier = data.logits[is_seen, slot], prefix[is_seen]
        happened = data.accepted[is_seen] > slot
        enough = len(logits) >= min_rows
        temperature = _best_temperature(logits, earlier, happened) if enough else 1.0
        prefix = prefix * confidences(data.logits[:, slot], [temperature])
        plain = plain * confidences(data.logits[:, slot], [1.0])
        temperatures.append(temperature)
        before.append(expected_calibration_error(plain[is_seen], happened))
        after.append(expected_calibration_error(prefix[is_seen], happened))
        counts.append(len(logits))
    return Calibration(tuple(temperatures), tuple(before), tuple(after), tuple(counts))


def _best_temperature(logits: np.ndarray, earlier: np.ndarray, happened: np.ndarray) -> float:
    """The temperature with the least error of ``earlier * sigmoid(logits / T)``; of equals the one nearest to 1."""

    def badness(temperature: float) -> tuple[float, float]:
        survival = earlier * confidences(logits, [temperature])
        return expected_calibration_error(survival, happened), abs(float(np.log(temperature)))

    coarse = min(_GRID, key=badness)
    return float(min([1.0, *(coarse * _REFINEMENT)], key=badness))


def calibrate(log_paths: Sequence[Path], output_path: Path, num_slots: int | None = None) -> Calibration:
    """The command `deepinfer calibrate`: logs in, a JSON file of temperatures out (written as a whole or not at all).

    Raises:
        ConfigError: see :func:`~deepinfer.speculative.confidence_log.read_logs`; or no draft has enough observations.
    """
    found = fit_temperatures(read_logs(log_paths, num_slots))
    if all(rows < MIN_ROWS for rows in found.num_rows):
        raise ConfigError(
            f"the logs hold {max(found.num_rows)} observations of a draft",
            why=f"a temperature is fitted to at least {MIN_ROWS}",
            fix="let an engine run for longer with --confidence-log",
        )
    content = {
        "temperatures": list(found.temperatures),
        "errors_before": [_finite(error) for error in found.errors_before],
        "errors_after": [_finite(error) for error in found.errors_after],
        "num_rows": list(found.num_rows),
    }
    temporary = output_path.with_name(output_path.name + ".tmp")
    temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, output_path)
    return found


def _finite(error: float) -> float | None:
    return None if np.isnan(error) else error


class OnlineCalibrator:
    """Keeps temperatures up to date while the engine runs.

    Temperatures decide how fast the engine is, never what it says. :meth:`refit` takes some ten milliseconds: call it
    where nobody waits, such as at the interval of the statistics.

    Args:
        num_slots: drafts per step.
        temperatures: to begin with; one for all, or one per slot.
        window: rows that are remembered.
    Raises:
        ConfigError: a wrong number of temperatures.
    """

    def __init__(self, num_slots: int, temperatures: float | Sequence[float] = 1.0, *, window: int = 4096) -> None:
        self.num_slots = num_slots
        self.temperatures = check_temperatures(temperatures, num_slots)
        self._rows: deque[tuple[tuple[float, ...], int, int]] = deque(maxlen=window)

    def observe(self, logits: Sequence[float], accepted: int, verified: int) -> None:
        """One request of one step; arguments as in :mod:`deepinfer.speculative.confidence_log`."""
        assert len(logits) == self.num_slots, f"{len(logits)} logits of {self.num_slots} slots"
        assert 0 <= accepted <= verified <= self.num_slots, f"{accepted=}, {verified=}, {self.num_slots=}"
        self._rows.append((tuple(logits), accepted, verified))

    def refit(self) -> tuple[float, ...]:
        """Fit to the remembered rows. Slots with too few rows keep the temperature they have."""
        if self._rows:
            found = fit_temperatures(ConfidenceData.of(self._rows, self.num_slots))
            pairs = zip(found.temperatures, self.temperatures, found.num_rows, strict=True)
            self.temperatures = tuple(new if rows >= MIN_ROWS else old for new, old, rows in pairs)
        return self.temperatures
