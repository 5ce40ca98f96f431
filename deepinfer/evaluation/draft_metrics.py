"""How well the draft does: tokens per step, acceptance by position, and whether its confidence can be believed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from deepinfer.engine.engine import Engine
from deepinfer.speculative.calibration import expected_calibration_error


@dataclass(frozen=True, slots=True)
class DraftStep:
    """One verification of one sequence. Drafts behind the end of the output are not in it."""

    survival: tuple[float, ...]
    """By slot: calibrated probability that this draft and all before it are accepted (engine spec 4.2)."""
    num_accepted: int
    num_emitted: int
    """Accepted drafts and the model's own token, up to the end of the output."""


class DraftRecorder:
    """Collects the verifications of an engine; attach it with :meth:`watch`.

    Args:
        eos_id: what ends an output. Drafts behind it are verified too, but against a text that nobody asked for.
    """

    def __init__(self, eos_id: int) -> None:
        self._eos_id = eos_id
        self._seen: set[str] = set()
        self.label = ""
        """Under which the steps to come are filed."""
        self.steps: dict[str, list[DraftStep]] = {}

    @contextmanager
    def watch(self, engine: Engine) -> Iterator[DraftRecorder]:
        """Record every step that the engine's worker takes inside the ``with`` block."""
        worker: Any = engine.worker
        original = worker.sample

        def sample(*args: Any, **kwargs: Any) -> Any:
            found = original(*args, **kwargs)
            for name, tokens in found.by_sequence.items():
                if not tokens.is_bad:
                    self.observe(name, tokens.token_ids, tokens.confidence[: tokens.num_drafts])
            return found

        worker.sample = sample
        try:
            yield self
        finally:
            worker.sample = original

    def observe(self, sequence_id: str, token_ids: Sequence[int], confidence: Sequence[float]) -> None:
        """Take in one sequence's share of a step.

        Args:
            token_ids: the accepted drafts and one more. confidence: of the verified drafts, given those before.
        """
        if sequence_id not in self._seen:  # the step of the prompt: there are no drafts yet
            self._seen.add(sequence_id)
            return
        num_accepted, num_emitted, num_slots = len(token_ids) - 1, len(token_ids), len(confidence)
        if self._eos_id in token_ids:
            end = list(token_ids).index(self._eos_id) + 1  # tokens up to EOS; the slots behind do not exist
            num_emitted, num_slots = end, min(num_slots, end)
            num_accepted = min(num_accepted, end)
        survival = tuple(np.cumprod(np.asarray(confidence[:num_slots], float)).tolist())
        self.steps.setdefault(self.label, []).append(DraftStep(survival, num_accepted, num_emitted))

    def all_steps(self) -> list[DraftStep]:
        return [step for steps in self.steps.values() for step in steps]


@dataclass(frozen=True, slots=True)
class DraftMetrics:
    """Summary of some steps; NaN where there is nothing to summarise."""

    num_steps: int
    mean_accepted_per_step: float
    """Tokens per step after that of the prompt: accepted drafts and the model's own token."""
    acceptance_by_position: tuple[float, ...]
    """Share of verified drafts at each slot that were accepted; so were all before them, then."""
    ece_by_position: tuple[float, ...]
    """Expected calibration error of the survival up to each slot."""
    ece: float
    """Mean of :attr:`ece_by_position` over all verified drafts."""


def summarize(steps: Sequence[DraftStep]) -> DraftMetrics:
    """Metrics of recorded steps."""
    num_slots = max((len(step.survival) for step in steps), default=0)
    shares, errors, counts = [], [], []
    for slot in range(num_slots):
        verified = [step for step in steps if len(step.survival) > slot]
        predicted = np.array([step.survival[slot] for step in verified])
        happened = np.array([step.num_accepted > slot for step in verified])
        shares.append(float(happened.mean()))
        errors.append(expected_calibration_error(predicted, happened))
        counts.append(len(verified))
    return DraftMetrics(
        num_steps=len(steps),
        mean_accepted_per_step=float(np.mean([step.num_emitted for step in steps])) if steps else math.nan,
        acceptance_by_position=tuple(shares),
        ece_by_position=tuple(errors),
        ece=float(np.average(errors, weights=counts)) if counts else math.nan,
    )
