"""Temperatures of the confidence head, one per draft slot: where they come from and what they must be. Torch-free."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deepinfer.errors import ConfigError

MIN_TEMPERATURE = 1e-5
"""Smaller ones are raised to it."""
MAX_LOGIT = 60.0
"""Confidence logits are clamped to this, after division by the temperature."""


def check_temperatures(value: float | Sequence[float], num_slots: int) -> tuple[float, ...]:
    """One temperature per slot from one for all, or from a list.

    Raises:
        ConfigError: a list of another length, or something that is no finite number >= 0.
    """
    values = [value] * num_slots if isinstance(value, (int, float)) else list(value)
    if len(values) == 1:
        values *= num_slots
    if len(values) != num_slots:
        raise ConfigError(
            f"confidence temperatures are {values[:8]}, {len(values)} of them",
            why=f"the draft proposes {num_slots} tokens, and each position has its own",
            fix=f"give one number for all, or {num_slots}; `deepinfer calibrate` fits them",
        )
    for number in values:
        is_number = isinstance(number, (int, float)) and not isinstance(number, bool)
        if not is_number or not 0 <= number <= sys.float_info.max:
            raise ConfigError(
                f"a confidence temperature is {number!r}",
                why="it divides logits, so it is a finite number >= 0",
                fix="use 1 to leave confidences as they are",
            )
    return tuple(max(float(number), MIN_TEMPERATURE) for number in values)


def load_temperatures(path: Path, num_slots: int) -> tuple[float, ...]:
    """Read what :func:`deepinfer.speculative.calibration.calibrate` wrote, for any number of drafts.

    Temperatures are fitted one after another, so a shorter block has the first of them; slots behind the last are
    like it.

    Raises:
        ConfigError: the file is missing or is no such file.
    """
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
        values = content["temperatures"]
        values = list(values) if isinstance(values, list) else [values]
        values = [*values, *values[-1:] * (num_slots - len(values))][:num_slots]
        return check_temperatures(values, num_slots)
    except ConfigError as error:
        why = f"{error.what}, but {error.why}"
    except (KeyError, TypeError):  # their texts are those of Python's containers
        why = "it is no JSON object with a list 'temperatures'"
    except (OSError, ValueError, RecursionError) as error:
        why = f"it cannot be read as JSON with a list 'temperatures' ({error})"
    raise ConfigError(
        f"the file of confidence temperatures is {str(path)!r}",
        why=why,
        fix="write it with `deepinfer calibrate`, or remove it",
    )
