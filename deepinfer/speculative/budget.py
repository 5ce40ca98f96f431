"""How many rows a verification step should have: most expected tokens per millisecond (engine spec 4.4).

Torch-free. The *survival* of draft k of a request is the probability that it and all drafts before it stand: the
product of their confidences, so it never rises along a request. A step of B rows verifies the B - R most likely drafts
of its R requests and emits R + (sum of their survivals) tokens on average.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class StepCost(Protocol):
    """What a step takes."""

    def estimate_ms(self, num_rows: int, num_requests: int) -> float | None:
        """Milliseconds of a step of so many rows with so many requests to sample; None if no step can be that large."""
        ...


@dataclass(frozen=True, slots=True)
class Budget:
    """The choice for one step."""

    total_rows: int
    """Rows of all requests that verify, one each at least; drafts verified are ``total_rows - requests``."""
    expected_tokens: float
    cost_ms: float | None
    """None if no cost is known."""


def choose_budget(
    survivals: Sequence[Sequence[float]], cost: StepCost, *, other_rows: int = 0, max_rows: int | None = None
) -> Budget:
    """Find the number of rows with the most expected tokens per time.

    Every number is looked at, since cost curves have steps: behind a plateau there may be something better. Of equal
    ratios the fewer rows win. If no step is large enough for one row per request, each gets one, as it has to.

    Args:
        survivals: per request, one for each draft that may be verified, not rising, in [0, 1]. For a rejection sampler
            these must not come from the drafts that the step verifies; see
            :class:`~deepinfer.speculative.stale_rates.StaleRates`.
        cost: of a whole step.
        other_rows: rows that run in the same step whatever is chosen, such as prompt chunks.
        max_rows: limit of the rows chosen here; at least one per request is chosen all the same.
    """
    num_requests = len(survivals)
    ranked = sorted((value for request in survivals for value in request), reverse=True)
    if max_rows is not None:
        del ranked[max(0, max_rows - num_requests) :]
    expected = float(num_requests)
    first_ms = cost.estimate_ms(num_requests + other_rows, num_requests)
    best = Budget(num_requests, expected, first_ms)
    best_rate = expected / first_ms if first_ms else 0.0
    for total_rows, survival in enumerate(ranked, num_requests + 1):
        expected += survival
        cost_ms = cost.estimate_ms(total_rows + other_rows, num_requests)
        if cost_ms is not None and expected / cost_ms > best_rate:
            best, best_rate = Budget(total_rows, expected, cost_ms), expected / cost_ms
    return best
