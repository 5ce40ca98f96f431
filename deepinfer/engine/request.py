"""One user call inside the engine: its prompt, its parameters and the outputs that grow for it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from deepinfer.engine.output_builder import FINISH_ERROR, OutputBuilder
from deepinfer.engine.outputs import RequestMetrics, RequestOutput, TokenLogprobs
from deepinfer.sampling.params import SamplingParams
from deepinfer.sampling.state import SamplingState
from deepinfer.structured.matcher import GrammarMatcher


@dataclass(slots=True)
class Branch:
    """One of the ``n`` outputs of a request, scheduled as a sequence of its own."""

    sequence_id: str
    builder: OutputBuilder
    sampling: SamplingState
    grammar: GrammarMatcher | None = None
    """Where the output stands in its grammar; advanced when tokens are committed."""


@dataclass(slots=True)
class Request:
    """State of a request from its submission to its last token. Owned by the engine."""

    request_id: str
    prompt: str | None
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    cache_salt: str = ""
    """Cached prefixes are shared among requests with the same salt only."""
    branches: list[Branch] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """Filled front to back while the prompt is computed; the first entry is None."""
    num_cached_tokens: int = 0
    """Prompt tokens that the first output found in the prefix cache."""
    error: str | None = None
    metrics: RequestMetrics = field(default_factory=lambda: RequestMetrics(time.monotonic()))

    def __post_init__(self) -> None:
        if self.params.num_prompt_logprobs is not None:
            self.prompt_logprobs = [None]

    @property
    def finished(self) -> bool:
        return all(branch.builder.output.finished for branch in self.branches)

    def fail(self, error: str, reason: str = FINISH_ERROR) -> None:
        """End all outputs that still run. What was generated stays."""
        self.error = error
        for branch in self.branches:
            branch.builder.finish(reason)

    def to_output(self, numerics: str) -> RequestOutput:
        """The request as its caller sees it now."""
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=list(self.prompt_ids),
            outputs=[branch.builder.output for branch in self.branches],
            prompt_logprobs=self.prompt_logprobs,
            num_cached_tokens=self.num_cached_tokens,
            metrics=self.metrics,
            error=self.error,
            numerics=numerics,
        )
