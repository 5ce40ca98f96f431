"""The log that confidences are calibrated from: one JSON object per request and step. Torch-free.

``{"logits": [1.5, 0.2], "accepted": 1, "verified": 2}``: the confidence logits of the draft's slots before any
temperature, how many drafts were verified, and how many of these were accepted.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from deepinfer.errors import ConfigError


def log_line(logits: Sequence[float], accepted: int, verified: int) -> str:
    """One line of a log, with its newline."""
    return json.dumps({"logits": [round(x, 6) for x in logits], "accepted": accepted, "verified": verified}) + "\n"


class ConfidenceLog:
    """Appends observations of a running engine to a file.

    The engine keeps confidences in float32, after calibration; logits are found again from them. Beyond about +-16 a
    float32 sigmoid is 0 or 1, which is as good as certain for any use of the log.

    Args:
        path: made if it does not exist. temperatures: those that the confidences were calibrated with.
    Raises:
        ConfigError: the file cannot be opened.
    """

    def __init__(self, path: Path, temperatures: Sequence[float]) -> None:
        self._temperatures = tuple(temperatures)
        try:
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"the confidence log is {str(path)!r}",
                why=f"it cannot be written ({error.strerror})",
                fix="name a file that can be written, or leave it out",
            ) from error

    def observe(self, confidence: Sequence[float], accepted: int, verified: int) -> None:
        """One request of one step.

        Args:
            confidence: of every slot of the draft, in [0, 1].
            accepted, verified: drafts.
        """
        pairs = zip(confidence, self._temperatures, strict=True)
        self._file.write(log_line([t * _logit(c) for c, t in pairs], accepted, verified))

    def close(self) -> None:
        """Write what is pending and close the file. Safe to call twice."""
        self._file.close()


def _logit(confidence: float) -> float:
    inside = min(max(confidence, 2.0**-24), 1 - 2.0**-24)
    return math.log(inside) - math.log1p(-inside)


@dataclass(frozen=True, slots=True)
class ConfidenceData:
    """Observations of a drafter, one row per request and step."""

    logits: np.ndarray
    """float64 ``[rows, slots]``, before any temperature."""
    accepted: np.ndarray
    """int64 ``[rows]``."""
    verified: np.ndarray
    """int64 ``[rows]``; ``accepted <= verified <= slots``."""

    @property
    def num_slots(self) -> int:
        return self.logits.shape[1]

    @classmethod
    def of(cls, rows: Sequence[tuple[Sequence[float], int, int]], num_slots: int) -> ConfidenceData:
        """From (logits, accepted, verified); the logits of a row have to be ``num_slots`` numbers."""
        logits = np.asarray([row[0] for row in rows], dtype=np.float64).reshape(len(rows), num_slots)
        accepted = np.asarray([row[1] for row in rows], dtype=np.int64)
        return cls(logits, accepted, np.asarray([row[2] for row in rows], dtype=np.int64))


def read_logs(paths: Iterable[Path], num_slots: int | None = None) -> ConfidenceData:
    """Read logs of one drafter.

    Args:
        num_slots: drafts per step; None takes the number in the first line.
    Raises:
        ConfigError: a file cannot be read, a line is malformed or has another number of slots (the message has file and
            line), or there is no line at all.
    """
    rows: list[tuple[list[float], int, int]] = []
    paths = list(paths)
    for path in paths:
        try:
            lines = path.read_text(encoding="utf-8").split("\n")  # splitlines would cut inside strings
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"a confidence log is {str(path)!r}", why=f"it cannot be read ({error})", fix="name a log of the engine"
            ) from error
        for number, line in enumerate(lines, 1):
            if line.strip():
                rows.append(_parse(line, f"{path}, line {number}", num_slots))
                num_slots = len(rows[0][0])
    if not rows or num_slots is None:
        raise ConfigError(
            f"the confidence logs {[str(path) for path in paths]} have no line",
            why="temperatures are fitted to observed drafts",
            fix="log some thousand steps first, with fixed draft lengths",
        )
    return ConfidenceData.of(rows, num_slots)


def _parse(line: str, where: str, num_slots: int | None) -> tuple[list[float], int, int]:
    try:
        record: Any = json.loads(line)
        logits, accepted, verified = record["logits"], record["accepted"], record["verified"]
        is_valid = (
            bool(logits)
            and all(isinstance(x, (int, float)) and abs(x) <= sys.float_info.max for x in logits)
            and type(accepted) is int
            and type(verified) is int
            and 0 <= accepted <= verified <= len(logits)
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        is_valid = False
    if not is_valid:
        raise ConfigError(
            f"{where} is {line[:80]!r}",
            why="a line is an object with finite 'logits' and 0 <= 'accepted' <= 'verified' <= the number of logits",
            fix="leave the line out, or log again",
        )
    if num_slots is not None and len(logits) != num_slots:
        raise ConfigError(
            f"{where} has {len(logits)} logits",
            why=f"a draft of {num_slots} tokens has {num_slots}",
            fix="calibrate each draft length with its own logs",
        )
    return logits, accepted, verified
