"""Where the time of a step goes, by phase. Host clocks only: on an asynchronous device they time the launch."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class StepTimer:
    """Accumulates seconds by phase name. Phases do not nest."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.counts: dict[str, int] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the body of a ``with`` block under ``name``."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin
            self.counts[name] = self.counts.get(name, 0) + 1

    def milliseconds(self, name: str) -> float:
        """Total of one phase so far."""
        return 1e3 * self.seconds.get(name, 0.0)

    def reset(self) -> None:
        """Forget everything measured so far."""
        self.seconds.clear()
        self.counts.clear()
