"""``CostTable``: what a step of so many rows takes, measured at start-up (engine spec 4.3). Torch-free.

A step runs as a recorded graph of a fixed size, so its cost is that of the smallest size that covers its rows: a
staircase. Without graphs (on a CPU) a step has exactly its rows, and its cost is read off the line between two sizes.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from deepinfer.errors import ConfigError

NUM_WARMUPS = 1
NUM_TIMED = 5


@dataclass(frozen=True, slots=True)
class CostTable:
    """Milliseconds by number of rows."""

    sizes: tuple[int, ...]
    """Rows, rising."""
    times_ms: tuple[float, ...]
    """Of a forward of that many rows."""
    is_staircase: bool = True
    """A step runs at one of the sizes; otherwise at its own number of rows."""

    def __post_init__(self) -> None:
        is_rising = all(low < high for low, high in zip(self.sizes, self.sizes[1:], strict=False))
        if not self.sizes or self.sizes[0] < 1 or not is_rising or len(self.sizes) != len(self.times_ms):
            raise ConfigError(
                f"the cost table has sizes {self.sizes[:8]} and {len(self.times_ms)} times",
                why="it has to have a time for each of one or more rising sizes >= 1",
                fix="measure it again",
            )
        if not all(math.isfinite(time) and time > 0 for time in self.times_ms):
            raise ConfigError(
                f"the cost table has times {self.times_ms[:8]}",
                why="a step takes a finite time above 0",
                fix="measure it again",
            )

    @classmethod
    def of(cls, rows_and_ms: Iterable[tuple[int, float]], *, is_staircase: bool = True) -> CostTable:
        """From pairs in any order."""
        pairs = sorted((int(rows), float(ms)) for rows, ms in rows_and_ms)
        return cls(tuple(rows for rows, _ in pairs), tuple(ms for _, ms in pairs), is_staircase)

    @classmethod
    def measure(cls, sizes: Sequence[int], measure: Callable[[int], float], *, is_staircase: bool = True) -> CostTable:
        """Time every size, the largest first, so that memory is taken once.

        Args:
            sizes: rows.
            measure: runs one forward of that many rows and returns its seconds; it waits for the device itself.
        """
        return cls.of(
            ((size, _timed_ms(measure, size)) for size in sorted(sizes, reverse=True)), is_staircase=is_staircase
        )

    def cover(self, num_rows: int) -> int | None:
        """The smallest size with at least so many rows; None if there is none."""
        index = bisect.bisect_left(self.sizes, num_rows)
        return self.sizes[index] if index < len(self.sizes) else None

    def charged_rows(self, num_rows: int) -> int | None:
        """Rows that run for a step of ``num_rows``; None if it is too large."""
        size = self.cover(num_rows)
        return size if self.is_staircase or size is None else num_rows

    def time_ms(self, num_rows: int) -> float | None:
        """Cost of a step of ``num_rows``; None if it is too large."""
        index = bisect.bisect_left(self.sizes, num_rows)
        if index == len(self.sizes):
            return None
        size, size_ms = self.sizes[index], self.times_ms[index]
        if self.is_staircase or size == num_rows or index == 0:
            return size_ms
        low, low_ms = self.sizes[index - 1], self.times_ms[index - 1]
        return low_ms + (size_ms - low_ms) * (num_rows - low) / (size - low)


def _timed_ms(measure: Callable[[int], float], size: int) -> float:
    """Mean of the runs without the fastest and the slowest, in milliseconds."""
    for _ in range(NUM_WARMUPS):
        measure(size)
    seconds = sorted(measure(size) for _ in range(NUM_TIMED))[1:-1]
    return 1e3 * sum(seconds) / len(seconds)
