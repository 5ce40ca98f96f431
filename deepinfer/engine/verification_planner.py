"""Whether a step drafts, and how many rows verify: confidence against cost (engine spec 4.3 to 4.5)."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from deepinfer.messages import Chunk, StepPlan
from deepinfer.observe.step_timer import StepTimer
from deepinfer.speculative.budget import choose_budget
from deepinfer.speculative.cost_refinement import RefinedCost
from deepinfer.speculative.draft_gate import DraftGate
from deepinfer.speculative.stale_rates import StaleRates
from deepinfer.worker.step_results import Launched, StepTokens

_HOST_PHASES = ("schedule", "batch", "commit")


class VerificationPlanner:
    """Chooses the total; which drafts get the rows is decided where the newest confidences are, in the worker.

    The budget looks at confidences of the drafts that were verified a step before, never at those that the step will
    verify: with rejection sampling the latter would bias the output, and when steps are launched ahead they are not on
    the host anyway.

    Args:
        cost: estimates the time of a step; refined by every step that runs. None verifies every draft that is made.
        timer: where times of the host's own work are read from.
    """

    def __init__(self, cost: RefinedCost | None, timer: StepTimer) -> None:
        self.cost = cost
        self.gate = DraftGate()
        self._rates = StaleRates()
        self._timer = timer
        self._seen_host_ms = 0.0

    def total_rows(self, plan: StepPlan) -> int | None:
        """Rows that all decoding sequences of ``plan`` share; None if there are none."""
        decoding = [chunk for chunk in plan.chunks if not chunk.is_prefill]
        if not decoding or self.cost is None:
            return None
        survivals = [self._rates.for_budget(chunk.request_id, chunk.num_rows - 1) for chunk in decoding]
        prefill_rows = plan.num_rows - sum(chunk.num_rows for chunk in decoding)
        return choose_budget(survivals, self.cost, other_rows=prefill_rows).total_rows

    def wants_drafts(self, chunks: Sequence[Chunk], alive: Collection[str]) -> bool:
        """Whether a step that is about to be sampled shall draft; sequences that have ended are forgotten."""
        wants = self.gate.wants(len(chunks))
        for chunk in chunks:
            if wants and chunk.request_id in alive:
                self._rates.schedule(chunk.request_id)
            else:
                self._rates.forget(chunk.request_id)
        return wants

    def committed(self, step: Launched, tokens: StepTokens, alive: Collection[str]) -> None:
        """A step has come back with survivals of its new drafts; its times refine what is known of costs."""
        for sequence_id, values in tokens.survivals.items():
            if sequence_id in alive:
                self._rates.process(sequence_id, values)
            else:
                self._rates.forget(sequence_id)
        host_ms = self._host_ms()
        num_requests, times = len(tokens.by_sequence), tokens.times
        if not num_requests or times is None:
            return
        # What grows with the rows is the forward and the choice of tokens; the rest goes by requests.
        fixed_ms = times.draft_ms + (0.0 if times.hides_host else host_ms)
        rows_ms = times.rows_ms
        if self.cost is not None:
            self.cost.observe(step.plan.num_rows, num_requests, rows_ms, fixed_ms)
        if not any(chunk.is_prefill for chunk in step.plan.chunks):
            emitted = sum(len(each.token_ids) for each in tokens.by_sequence.values())
            self.gate.observe(num_requests, bool(tokens.survivals), emitted, rows_ms + fixed_ms)

    def _host_ms(self) -> float:
        """Milliseconds of the host's own work since the last call."""
        now = 1e3 * sum(self._timer.seconds.get(name, 0.0) for name in _HOST_PHASES)
        before, self._seen_host_ms = self._seen_host_ms, now
        return max(0.0, now - before)  # somebody may have set the timer back

    def forget(self, sequence_id: str) -> None:
        """The sequence has ended or lost its memory, and its drafts with it."""
        self._rates.forget(sequence_id)
