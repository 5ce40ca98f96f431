"""Where the time of a step goes, by phase. Host clocks only: on an asynchronous device they time the launch."""

from __future__ import annotations

import time


class _Phase:
    """One stretch of a phase. A class of its own: a generator's context manager costs several times as much, and a step
    with one sequence on a GPU has about a millisecond for everything."""

    __slots__ = ("_begin", "_name", "_timer")

    def __init__(self, timer: StepTimer, name: str) -> None:
        self._timer, self._name = timer, name

    def __enter__(self) -> None:
        self._begin = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        seconds, counts, name = self._timer.seconds, self._timer.counts, self._name
        seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - self._begin
        counts[name] = counts.get(name, 0) + 1


class StepTimer:
    """Accumulates seconds by phase name. Phases do not nest."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.counts: dict[str, int] = {}

    def phase(self, name: str) -> _Phase:
        """Time the body of a ``with`` block under ``name``, also one that raises."""
        return _Phase(self, name)

    def milliseconds(self, name: str) -> float:
        """Total of one phase so far."""
        return 1e3 * self.seconds.get(name, 0.0)

    def reset(self) -> None:
        """Forget everything measured so far."""
        self.seconds.clear()
        self.counts.clear()
