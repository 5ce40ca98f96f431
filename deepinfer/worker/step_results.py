"""What a step is between the halves of the worker, and what the engine gets of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from deepinfer.messages import StepPlan
from deepinfer.sampling.sampler import SamplerOutput
from deepinfer.sampling.state import SamplingState
from deepinfer.structured.matcher import GrammarMatcher
from deepinfer.worker.model_runner import StepResult


@dataclass(frozen=True, slots=True)
class Launched:
    """A step whose forward has been started."""

    plan: StepPlan
    """As it really runs: placeholders filled in, rows of verification divided."""
    result: StepResult
    forward_ms: float = 0.0


class RowOwner(NamedTuple):
    """The sequence that a chunk samples for."""

    sampling: SamplingState
    grammar: GrammarMatcher | None = None
    """State after all committed tokens; left as it was found."""


class SequenceTokens(NamedTuple):
    """What one sequence got out of a step."""

    token_ids: list[int]
    """The accepted drafts and one token more, unless that one is bad."""
    first_row: int
    """Row of the sampler's report for the first of them."""
    num_drafts: int
    """Drafts that were verified."""
    confidence: list[float]
    """Of all drafts that were proposed, verified or not; meaningless if none were verified."""
    is_bad: bool
    """The token behind ``token_ids`` has no distribution: not finite, or everything is masked."""

    @property
    def num_accepted(self) -> int:
        return len(self.token_ids) - (not self.is_bad)


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Milliseconds."""

    rows_ms: float
    """Forward and choice of tokens: what grows with the rows."""
    draft_ms: float
    hides_host: bool
    """Whether the host's own work took place meanwhile."""


@dataclass(frozen=True, slots=True)
class StepTokens:
    """Result of a step, on the host."""

    by_sequence: dict[str, SequenceTokens]
    report: SamplerOutput | None
    """Log-probabilities per row; None if nothing was sampled."""
    survivals: dict[str, list[float]]
    """Of the drafts that were proposed in this step: probability that each and all before it are accepted."""
    times: StepTimes | None = None
    """None where nobody could measure them."""
