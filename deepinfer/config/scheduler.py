"""Options of the scheduler: how many sequences and rows a step may hold."""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits and policy of the scheduler. Built once at start-up, then only read."""

    max_num_seqs: int = 256
    """Most sequences that hold memory (prefilling or decoding) at a time."""

    max_num_batched_tokens: int = 4096
    """Most rows in one step, decode and prefill together; at least ``max_num_seqs``."""

    max_model_len: int = 4096
    """Most tokens of one sequence, prompt and output together, that the model ever computes."""

    chunked_prefill: bool = True
    """Whether a prompt may be computed in several steps. Without it, a step has to be able to hold a whole prompt."""

    pipeline_depth: int = 1
    """Most plans that may be uncommitted at a time: 1 is synchronous, 2 plans a step while the one before it runs."""

    num_speculative_tokens: int = 0
    """Most drafts that a decoding sequence verifies in one step."""

    max_lookahead: int = 16
    """Most waiting sequences without room that are skipped per step to look for one that fits."""

    max_bypasses: int = 64
    """After so many later sequences started before it, nothing behind a waiting sequence starts any more."""

    decoder_keep_tokens: int = 0
    """Prompt tokens that the decoder layers run on; 0: all of them (spec 6.1)."""

    @property
    def async_scheduling(self) -> bool:
        """Whether a step is planned while the one before it runs."""
        return self.pipeline_depth > 1

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            self._require_int(name, at_least=1)
        for name in ("num_speculative_tokens", "max_lookahead", "max_bypasses", "decoder_keep_tokens"):
            self._require_int(name, at_least=0)
        if self.pipeline_depth not in (1, 2):
            raise ConfigError(
                f"pipeline_depth is {self.pipeline_depth!r}",
                why="a step may be planned while at most one earlier step is still running",
                fix="use 1 (synchronous) or 2 (overlapped)",
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}",
                why=f"every one of max_num_seqs={self.max_num_seqs} sequences needs a row in each step",
                fix=f"raise it to {self.max_num_seqs} or more, or lower max_num_seqs",
            )
        if not self.chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ConfigError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}",
                why=f"without chunked prefill a step has to hold a prompt of max_model_len={self.max_model_len} tokens",
                fix=f"raise it to {self.max_model_len} or more, or turn chunked_prefill on",
            )

    def _require_int(self, name: str, at_least: int) -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
            raise ConfigError(
                f"{name} is {value!r}", why=f"it has to be an integer >= {at_least}", fix="give such a number"
            )
