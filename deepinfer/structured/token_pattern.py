"""Finding a sequence of token ids in a stream of ids (Knuth, Morris and Pratt 1977): one integer of state."""

from __future__ import annotations

from collections.abc import Sequence


class TokenPattern:
    """An immutable automaton; its state is how many ids of the pattern the end of the stream spells.

    Args:
        ids: what to find, at least one id.
    """

    def __init__(self, ids: Sequence[int]) -> None:
        assert ids, "an empty pattern is found everywhere"
        self.ids = tuple(ids)
        self._fallback = [0] * len(self.ids)
        matched = 0
        for index in range(1, len(self.ids)):
            while matched and self.ids[index] != self.ids[matched]:
                matched = self._fallback[matched - 1]
            matched += self.ids[index] == self.ids[matched]
            self._fallback[index] = matched

    def __len__(self) -> int:
        return len(self.ids)

    def advance(self, state: int, token: int) -> int:
        """State after one more id; ``len(self)`` means found. From a found state it goes on as in a longer stream."""
        if state == len(self.ids):
            state = self._fallback[-1]
        while state and self.ids[state] != token:
            state = self._fallback[state - 1]
        return state + (self.ids[state] == token)
