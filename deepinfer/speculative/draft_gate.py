"""``DraftGate``: whether drafting pays at all, found out by doing both. Torch-free.

A budget says how many drafts are worth verifying once they exist. Making them costs time too, and where few are
accepted (hard text, a weak draft, many requests) the best number of drafts is none. So now and then some steps run
without drafts, or with them, and whichever gave more tokens per millisecond goes on. The decision for a step looks at
steps that are over, never at the drafts that it is about, so it biases no sampler.
"""

from __future__ import annotations

import statistics
from collections import deque

_FIRST = 8
"""Steps before the first comparison."""
_PROBE = 4
"""Steps of a try, without the transition to it, which says nothing."""
_SHORTEST, _LONGEST = 64, 2048
"""Steps between two tries; more whenever a try changes nothing, so that tries cost little in the long run."""
_CLEARLY_WORSE = 0.8
_WINDOW = 24
_GAIN = 1.02
"""Times better that the other way has to be."""


class _Side:
    """Recent steps of one way to run."""

    def __init__(self) -> None:
        self.steps: deque[tuple[int, float]] = deque(maxlen=_WINDOW)

    @property
    def tokens_per_ms(self) -> float:
        """Mean tokens over the median time, which an interrupted step doesn't move."""
        tokens = statistics.fmean(tokens for tokens, _ in self.steps)
        return tokens / statistics.median(ms for _, ms in self.steps)


class _Bucket:
    """The comparison for similar numbers of requests. A phase lasts until it has seen enough steps of its kind."""

    def __init__(self, best: bool) -> None:
        self.best = best
        self.is_probing = False
        self.missing = _FIRST
        self.interval = _SHORTEST
        self.sides = {False: _Side(), True: _Side()}

    @property
    def wants(self) -> bool:
        return self.best is not self.is_probing

    def observe(self, drafted: bool, num_tokens: int, step_ms: float) -> None:
        self.sides[drafted].steps.append((num_tokens, step_ms))
        if drafted is self.wants:
            self.missing -= 1
            if self.missing == 0:
                self._turn()

    def _turn(self) -> None:
        if not self.is_probing:
            self.sides[not self.best].steps.clear()
            self.is_probing, self.missing = True, _PROBE
            return
        self.is_probing = False
        gain = self.sides[not self.best].tokens_per_ms / self.sides[self.best].tokens_per_ms
        if gain > _GAIN:
            self.best, self.interval = not self.best, _SHORTEST * (4 if gain * _CLEARLY_WORSE > 1 else 1)
        else:
            self.interval = min(self.interval * (4 if gain < _CLEARLY_WORSE else 2), _LONGEST)
        self.missing = self.interval


class DraftGate:
    """Says before every step whether it shall draft. Owned by the thread that plans steps."""

    def __init__(self) -> None:
        self._buckets: dict[int, _Bucket] = {}
        self._latest = True  # what is best where somebody looked last: a good guess for other numbers of requests
        self._drafted_before = False

    def wants(self, num_requests: int) -> bool:
        """Whether the next step with so many requests shall draft."""
        return self._bucket(num_requests).wants

    def observe(self, num_requests: int, drafted: bool, num_tokens: int, step_ms: float) -> None:
        """A step without prompt rows has come back.

        Args:
            drafted: whether it made drafts. It says something if the step before it, whose drafts it verified, agrees.
            num_tokens: emitted over all requests. step_ms: of the whole step.
        """
        bucket = self._bucket(num_requests)
        if drafted is self._drafted_before and step_ms > 0:
            bucket.observe(drafted, num_tokens, step_ms)
        self._drafted_before = drafted
        self._latest = bucket.best

    def _bucket(self, num_requests: int) -> _Bucket:
        key = num_requests.bit_length()
        if key not in self._buckets:
            self._buckets[key] = _Bucket(self._latest)
        return self._buckets[key]
