"""Counters of the engine and the line that it logs now and then."""

from __future__ import annotations

import logging
import time

from deepinfer.config.engine import ObserveConfig
from deepinfer.engine.request import Request
from deepinfer.messages import StepPlan
from deepinfer.scheduler.scheduler import Scheduler
from deepinfer.speculative.confidence_log import ConfidenceLog
from deepinfer.speculative.statistics import SpeculationStatistics
from deepinfer.worker.step_results import SequenceTokens

logger = logging.getLogger(__name__)


class EngineStatistics:
    """Totals since the start; the log line shows the rates since the line before."""

    def __init__(self, config: ObserveConfig, num_drafts: int = 0, log: ConfidenceLog | None = None) -> None:
        self._config = config
        self._confidence_log = log
        self.num_steps = 0
        self.num_prefill_tokens = 0
        self.num_decode_tokens = 0
        self.num_finished: dict[str, int] = {}
        """Outputs by finish reason."""
        self.speculation = SpeculationStatistics(num_drafts)
        self._since = time.monotonic()
        self._seen = (0, 0, 0)

    def step(self, plan: StepPlan, scheduler: Scheduler) -> None:
        """Count a committed step."""
        if not plan.chunks:
            return
        self.num_steps += 1
        num_prefill = sum([len(chunk.token_ids) for chunk in plan.chunks if chunk.is_prefill])
        self.num_prefill_tokens += num_prefill
        self.num_decode_tokens += plan.num_rows - num_prefill
        if self._config.logs_statistics and self.num_steps % self._config.logging_interval_steps == 0:
            self._log(scheduler)

    def verified(self, num_accepted: int, found: SequenceTokens, end: int | None = None) -> None:
        """Count the drafts of one sequence in one committed step.

        Args:
            end: tokens up to the one that ended the output. Drafts behind it were verified against a text that nobody
                asked for, so confidences are not to be calibrated with them.
        """
        if not self.speculation.num_slots:
            return
        if found.num_drafts and self._confidence_log is not None:
            verified = found.num_drafts if end is None else min(found.num_drafts, end)
            self._confidence_log.observe(found.confidence, min(found.num_accepted, verified), verified)
        outcome = [float(slot < found.num_accepted) for slot in range(found.num_drafts)]
        self.speculation.observe(min(num_accepted, found.num_drafts), found.num_drafts, found.confidence, outcome)

    def close(self) -> None:
        """Close the log of confidences."""
        if self._confidence_log is not None:
            self._confidence_log.close()

    def finished(self, request: Request) -> None:
        """Count a finished request's outputs."""
        for branch in request.branches:
            reason = branch.builder.output.finish_reason or "?"
            self.num_finished[reason] = self.num_finished.get(reason, 0) + 1

    def _log(self, scheduler: Scheduler) -> None:
        now = time.monotonic()
        elapsed_s = max(now - self._since, 1e-9)
        steps, prefill, decode = self._seen
        logger.info(
            "prompt %.0f tokens/s, generation %.0f tokens/s, %.1f steps/s, running %d, waiting %d, KV blocks %.0f %%, "
            "preemptions %d%s",
            (self.num_prefill_tokens - prefill) / elapsed_s,
            (self.num_decode_tokens - decode) / elapsed_s,
            (self.num_steps - steps) / elapsed_s,
            scheduler.num_running,
            scheduler.num_waiting,
            100 * scheduler.usage,
            scheduler.num_preemptions,
            "" if scheduler.prefix is None else ", " + scheduler.prefix.statistics.take().line(),
        )
        if self.speculation.num_slots:
            logger.info("%s", self.speculation.take().line())
        self._since = now
        self._seen = (self.num_steps, self.num_prefill_tokens, self.num_decode_tokens)
