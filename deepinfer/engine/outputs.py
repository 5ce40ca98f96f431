"""What a request gives back, in the shape that users of vLLM know."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class Logprob(NamedTuple):
    """Log-probability of one token at one position."""

    logprob: float
    rank: int
    """1 + number of strictly more likely tokens."""
    decoded_token: str


TokenLogprobs = dict[int, Logprob]
"""By token id: the chosen (or given) token always, and the alternatives that were asked for."""


@dataclass(slots=True)
class CompletionOutput:
    """One output of a request."""

    index: int
    """0 to ``n - 1``."""
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    """One entry per token, or None if none were asked for."""
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    """None while running; then ``stop`` (EOS, a stop token or a stop string), ``length``, ``abort``,
    ``prompt_length_exceeded`` or ``error``; or why there is no grammar for structured output: ``invalid_schema``,
    ``schema_timeout``, ``schema_too_large`` or ``schema_cancelled``. The request's ``error`` has the details."""
    stop_reason: int | str | None = None
    """The stop string or stop token id that ended the output; None for EOS and all other reasons."""
    num_preemptions: int = 0
    """How often the output lost its memory and was computed again."""
    num_steps: int = 0
    """Steps that gave tokens; ``len(token_ids) / num_steps`` tokens per step."""
    num_drafts_verified: int = 0
    num_drafts_accepted: int = 0
    """Drafts among the tokens."""

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """Times on the monotonic clock, in seconds; None until the event."""

    arrival_s: float
    first_token_s: float | None = None
    finished_s: float | None = None

    @property
    def time_to_first_token_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s


@dataclass(slots=True)
class RequestOutput:
    """Everything about one request. ``error`` says in words what ended it early; outputs hold what was generated."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """One entry per prompt token, None for the first; None altogether if none were asked for."""
    num_cached_tokens: int = 0
    """Prompt tokens that the prefix cache held, of the first output. With ``exact`` their rows did not run; with
    ``bounded`` the last window of them ran again."""
    metrics: RequestMetrics | None = None
    error: str | None = None
    numerics: str = "faithful"
    """Numerics mode of the engine that computed it."""

    @property
    def finished(self) -> bool:
        return all(output.finished for output in self.outputs)


@dataclass(frozen=True, slots=True)
class StreamDelta:
    """What one step added to one output. The texts of all deltas joined are the output's text."""

    request_id: str
    index: int
    """Which of the ``n`` outputs."""
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: str | None
    stop_reason: int | str | None
    error: str | None = None
