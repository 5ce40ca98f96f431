"""Stop strings: end a streamed text at the earliest completed stop string and never show a part of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from deepinfer.errors import RequestError
from deepinfer.tokenizer.valid_text import require_text


@dataclass(frozen=True, slots=True)
class StopStep:
    """What one token (or the end of the sequence) brought."""

    text: str
    """Text to emit now."""
    stop: str | None
    """The stop string that was completed, else None."""
    num_tokens: int
    """Tokens fed so far; after a match, up to and including the token that completed the stop string."""
    num_released_tokens: int
    """Leading tokens whose whole text has been emitted: their ids and logprobs may be streamed beside the text. All of
    ``num_tokens`` after a match or a flush."""


class _Automaton:
    """Aho-Corasick automaton over the stop strings: one state per distinct prefix, root 0.

    ``depth[state]`` is the length of the longest suffix of the text read so far that begins some stop string, which is
    exactly what has to be held back. ``found[state]`` is the longest stop string that ends here.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._children: list[dict[str, int]] = [{}]
        self._fallback = [0]  # state of the longest proper suffix that is a prefix too
        self.depth = [0]
        self.found: list[str | None] = [None]
        for stop in stops:
            state = 0
            for character in stop:
                state = self._children[state].get(character) or self._add_state(state, character)
            self.found[state] = stop
        self._link()

    def _add_state(self, parent: int, character: str) -> int:
        state = len(self.depth)
        self._children.append({})
        self._fallback.append(0)
        self.depth.append(self.depth[parent] + 1)
        self.found.append(None)
        self._children[parent][character] = state
        return state

    def _link(self) -> None:
        """Breadth first, so that the fallback of a state is complete before its children need it."""
        queue = deque(self._children[0].values())
        while queue:
            state = queue.popleft()
            for character, child in self._children[state].items():
                self._fallback[child] = self.next(self._fallback[state], character)
                if self.found[child] is None:  # a stop that ends here and starts later: shorter, so second choice
                    self.found[child] = self.found[self._fallback[child]]
                queue.append(child)

    def next(self, state: int, character: str) -> int:
        """State after ``character``; constant time per character of a text, amortised."""
        while state and character not in self._children[state]:
            state = self._fallback[state]
        return self._children[state].get(character, 0)


class StopMatcher:
    """Watches the text of one sequence for stop strings, token by token.

    The stop string that is *completed* first wins, whatever the order of the list. Where two are completed by the same
    character, one is a suffix of the other, and the longer one (the one that starts first) wins. The result depends
    only on the text, not on how it is cut into tokens. Text that may still turn out to be the beginning of a stop
    string is held back; with ``include_stop`` it belongs to the output anyway, so nothing is.

    Args:
        stops: non-empty strings; an empty list never matches.
        include_stop: emit the stop string too.
    Raises:
        RequestError: an entry that is empty or no Unicode text; names ``stop[index]``.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        if isinstance(stops, str):
            raise RequestError("stop", stops, why="it is one string, not a list of them", fix="send a list")
        for index, stop in enumerate(stops):
            if not require_text(stop, f"stop[{index}]"):
                raise RequestError(
                    f"stop[{index}]", stop, why="an empty string is found everywhere", fix="leave it out"
                )
        self._automaton = _Automaton(stops)
        self._include_stop = include_stop
        self._state = 0
        self._held = ""
        self._num_tokens = 0
        self._num_released = 0
        self._num_emitted = 0  # characters
        self._num_read = 0  # characters
        self._token_ends: deque[int] = deque()  # text length after each token that is not released yet
        self.stop: str | None = None

    def push(self, delta: str) -> StopStep:
        """Feed the text that one token made certain (may be empty, see :class:`IncrementalDetokenizer`).

        Call it once per token, in order, and not after a match: what follows a stop string is discarded.
        """
        assert self.stop is None, f"text after the stop string {self.stop!r}"
        self._num_tokens += 1
        matched = self._scan(delta)
        if matched is not None:
            return matched
        self._num_read += len(delta)
        self._token_ends.append(self._num_read)
        return self._emit(self._held + delta)

    def flush(self, rest: str = "") -> StopStep:
        """The end of the sequence: the held-back text, or nothing after a match.

        Args:
            rest: what the detokenizer's own flush returned; counts towards the last token.
        """
        if self.stop is None:
            matched = self._scan(rest)
            if matched is not None:
                return matched
            self._held += rest
        text, self._held = self._held, ""
        self._num_released = self._num_tokens
        return StopStep(text, self.stop, self._num_tokens, self._num_released)

    def _scan(self, delta: str) -> StopStep | None:
        for index, character in enumerate(delta):
            self._state = self._automaton.next(self._state, character)
            self.stop = self._automaton.found[self._state]
            if self.stop is not None:
                return self._matched(self.stop, self._held + delta[: index + 1])
        return None

    def _matched(self, stop: str, text: str) -> StopStep:
        self._held = ""
        self._num_released = self._num_tokens
        if not self._include_stop:
            text = text[: len(text) - len(stop)]
        return StopStep(text, stop, self._num_tokens, self._num_released)

    def _emit(self, text: str) -> StopStep:
        num_held = 0 if self._include_stop else self._automaton.depth[self._state]
        cut = len(text) - num_held
        self._held = text[cut:]
        self._num_emitted += cut
        while self._token_ends and self._token_ends[0] <= self._num_emitted:
            self._token_ends.popleft()
            self._num_released += 1
        return StopStep(text[:cut], None, self._num_tokens, self._num_released)
