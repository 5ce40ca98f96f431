"""``SpeculationStatistics``: what a window of steps achieved by drafting (engine spec 4.7). Torch-free."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SpeculationReport:
    """Numbers of one window. Rates are NaN where nothing was counted."""

    accepted: tuple[int, ...]
    """Per slot: accepted drafts."""
    verified: tuple[int, ...]
    """Per slot: verified drafts."""
    num_requests: int
    """Sum over steps of the requests that were verified; each emitted one token besides its accepted drafts."""
    confidence_error: float
    """Mean of |confidence - estimated acceptance| over verified drafts."""
    confidence_bias: float
    """Mean of confidence - estimated acceptance: above 0 the drafter is too sure of itself."""

    @property
    def acceptance_rates(self) -> tuple[float, ...]:
        """Per slot: accepted over verified. A draft counts as not accepted if one before it was rejected."""
        return tuple(_ratio(a, v) for a, v in zip(self.accepted, self.verified, strict=True))

    @property
    def acceptance_rate(self) -> float:
        return _ratio(sum(self.accepted), sum(self.verified))

    @property
    def mean_verified(self) -> float:
        """Drafts verified per request and step."""
        return _ratio(sum(self.verified), self.num_requests)

    @property
    def mean_emitted(self) -> float:
        """Tokens per request and step."""
        return _ratio(sum(self.accepted) + self.num_requests, self.num_requests)

    @property
    def num_rows(self) -> int:
        """Rows that the target ran to verify."""
        return sum(self.verified) + self.num_requests

    def line(self) -> str:
        """For the log."""
        rates = " ".join(f"{rate:.2f}" for rate in self.acceptance_rates)
        return (
            f"speculation: {self.mean_emitted:.2f} tokens per step, {self.mean_verified:.2f} drafts verified,"
            f" accepted {self.acceptance_rate:.2f} [{rates}], confidence error {self.confidence_error:.3f}"
        )


class SpeculationStatistics:
    """Counts until :meth:`take`. Owned by the thread that commits steps.

    Args:
        num_slots: most drafts of a request in one step.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._clear()

    def _clear(self) -> None:
        self._accepted = [0] * self.num_slots
        self._verified = [0] * self.num_slots
        self._num_requests = 0
        self._num_compared = 0
        self._absolute_error = self._signed_error = 0.0

    def observe(
        self, num_accepted: int, num_verified: int, confidence: Sequence[float] = (), acceptance: Sequence[float] = ()
    ) -> None:
        """One request of one step.

        Args:
            num_accepted, num_verified: drafts.
            confidence: what the drafter expected of each verified draft, given the ones before it.
            acceptance: what verification found, as :class:`~deepinfer.speculative.verification.Verified` has it.
        """
        assert 0 <= num_accepted <= num_verified <= self.num_slots, f"{num_accepted=}, {num_verified=}"
        for slot in range(num_verified):
            self._verified[slot] += 1
            self._accepted[slot] += slot < num_accepted
        self._num_requests += 1
        for expected, found in zip(confidence[:num_verified], acceptance[:num_verified], strict=False):
            if math.isfinite(expected) and math.isfinite(found):
                self._num_compared += 1
                self._absolute_error += abs(expected - found)
                self._signed_error += expected - found

    def report(self) -> SpeculationReport:
        """The window so far."""
        return SpeculationReport(
            accepted=tuple(self._accepted),
            verified=tuple(self._verified),
            num_requests=self._num_requests,
            confidence_error=_ratio(self._absolute_error, self._num_compared),
            confidence_bias=_ratio(self._signed_error, self._num_compared),
        )

    def take(self) -> SpeculationReport:
        """The window so far; a new one begins."""
        report = self.report()
        self._clear()
        return report


def _ratio(part: float, whole: int) -> float:
    return part / whole if whole else math.nan
