"""How many rows of verification a step gets: confidence against cost (engine spec 4.3 to 4.5)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from deepinfer.messages import Chunk, StepPlan
from deepinfer.observe.step_timer import StepTimer
from deepinfer.speculative.budget import choose_budget
from deepinfer.speculative.cost_refinement import RefinedCost
from deepinfer.speculative.stale_rates import StaleRates


class VerificationPlanner:
    """Chooses the total; which drafts get the rows is decided where the newest confidences are, in the worker.

    The budget looks at confidences of the drafts that were verified a step before, never at those that the step will
    verify: with rejection sampling the latter would bias the output, and when steps are launched ahead they are not on
    the host anyway.

    Args:
        cost: estimates the time of a step; refined by every step that runs.
        timer: where forward and sampling times are read from.
    """

    def __init__(self, cost: RefinedCost, timer: StepTimer) -> None:
        self.cost = cost
        self._rates = StaleRates()
        self._timer = timer
        self._seen_s = (0.0, 0.0)

    def total_rows(self, plan: StepPlan) -> int | None:
        """Rows that all decoding sequences of ``plan`` share; None if there are none."""
        decoding = [chunk for chunk in plan.chunks if not chunk.is_prefill]
        if not decoding:
            return None
        survivals = [self._rates.for_budget(chunk.request_id, chunk.num_rows - 1) for chunk in decoding]
        prefill_rows = plan.num_rows - sum(chunk.num_rows for chunk in decoding)
        return choose_budget(survivals, self.cost, other_rows=prefill_rows).total_rows

    def drafted(self, chunks: Sequence[Chunk], alive: Collection[str]) -> None:
        """A step drafts for these sequences; those that have ended are forgotten."""
        for chunk in chunks:
            if chunk.request_id in alive:
                self._rates.schedule(chunk.request_id)
            else:
                self._rates.forget(chunk.request_id)

    def committed(self, survivals: Mapping[str, Sequence[float]], num_rows: int, alive: Collection[str]) -> None:
        """A step has come back with survivals of its new drafts; its times refine the cost."""
        for sequence_id, values in survivals.items():
            if sequence_id in alive:
                self._rates.process(sequence_id, values)
            else:
                self._rates.forget(sequence_id)
        seconds = self._timer.seconds
        forward_s = seconds.get("forward", 0.0)
        sampling_s = seconds.get("sample", 0.0) + seconds.get("draft", 0.0)
        before_forward, before_sampling = self._seen_s
        self._seen_s = forward_s, sampling_s
        if forward_s > before_forward:  # otherwise the timer was set back meanwhile
            self.cost.observe(
                num_rows,
                len(survivals),
                1e3 * (forward_s - before_forward),
                1e3 * max(0.0, sampling_s - before_sampling),
            )

    def forget(self, sequence_id: str) -> None:
        """The sequence has ended or lost its memory, and its drafts with it."""
        self._rates.forget(sequence_id)
