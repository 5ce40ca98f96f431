"""``RefinedCost``: the cost table, corrected by the steps that really ran (engine spec 4.3). Torch-free.

The table is measured with short contexts. What real steps take longer is learned as a slope, milliseconds per row: the
median over sizes of the medians over steps, never below 0. Sampling is learned separately, by the number of requests.
Medians, because a step that is interrupted by something else says nothing about the next one.
"""

from __future__ import annotations

import bisect
import statistics
from collections import deque

from deepinfer.speculative.cost_table import CostTable

_SAMPLER_WINDOW = 9
_SAMPLER_VALID_FROM = 5
_FORWARD_WINDOW = 5000
_FORWARD_VALID_FROM = 10


class RefinedCost:
    """Estimates step times; a :class:`~deepinfer.speculative.budget.StepCost`. Owned by the thread that plans steps.

    Args:
        table: from start-up.
        forward_window: forwards that are remembered over all sizes.
    """

    def __init__(self, table: CostTable, *, forward_window: int = _FORWARD_WINDOW) -> None:
        self.table = table
        self.slope_ms = 0.0
        """Milliseconds per row that steps take longer than the table says; >= 0."""
        self._order: deque[tuple[int, float]] = deque()
        self._forward_window = forward_window
        self._residuals: dict[int, list[float]] = {}  # size -> sorted values of the window
        self._sampler: dict[int, deque[float]] = {}
        self._sampler_all: deque[float] = deque(maxlen=_SAMPLER_WINDOW)
        self._sampler_medians: dict[int, float] = {}  # of the state as it is: a budget asks a thousand times per step

    def observe(self, num_rows: int, num_requests: int, forward_ms: float, sampler_ms: float) -> None:
        """Take one real step into account.

        Args:
            num_rows: rows of the step, padding not counted. Beyond the table's sizes the forward teaches nothing.
            num_requests: requests that were sampled.
            forward_ms, sampler_ms: measured.
        """
        self._sampler.setdefault(num_requests, deque(maxlen=_SAMPLER_WINDOW)).append(sampler_ms)
        self._sampler_all.append(sampler_ms)
        self._sampler_medians.clear()
        size, expected, charged = self.table.cover(num_rows), self.table.time_ms(num_rows), self._charged(num_rows)
        if size is None or expected is None:
            return
        self._remember(size, (forward_ms - expected) / charged)
        medians = [_median(values) for values in self._residuals.values() if len(values) >= _FORWARD_VALID_FROM]
        self.slope_ms = max(0.0, statistics.median(medians)) if medians else 0.0

    def estimate_ms(self, num_rows: int, num_requests: int) -> float | None:
        """Milliseconds of a step, sampling included; None if the table has nothing that large."""
        forward = self.table.time_ms(num_rows)
        if forward is None:
            return None
        return forward + self.slope_ms * self._charged(num_rows) + self.sampler_ms(num_requests)

    def sampler_ms(self, num_requests: int) -> float:
        """Median of the last steps with so many requests, else of the last steps of all; 0 before there are enough."""
        known = self._sampler_medians.get(num_requests)
        if known is None:
            known = self._sampler_medians[num_requests] = self._sampler_median(num_requests)
        return known

    def _sampler_median(self, num_requests: int) -> float:
        for window in (self._sampler.get(num_requests), self._sampler_all):
            if window is not None and len(window) >= _SAMPLER_VALID_FROM:
                return statistics.median(window)
        return 0.0

    def _charged(self, num_rows: int) -> int:
        return self.table.charged_rows(num_rows) or num_rows

    def _remember(self, size: int, residual: float) -> None:
        self._order.append((size, residual))
        bisect.insort(self._residuals.setdefault(size, []), residual)
        if len(self._order) > self._forward_window:
            old_size, old = self._order.popleft()
            values = self._residuals[old_size]
            del values[bisect.bisect_left(values, old)]


def _median(ascending: list[float]) -> float:
    middle = len(ascending) // 2
    return ascending[middle] if len(ascending) % 2 else (ascending[middle - 1] + ascending[middle]) / 2
