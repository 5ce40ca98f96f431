"""``GrammarMatcher``: where one sequence stands in its grammar (engine spec 6.3).

``free`` (until everything of the start rule was generated) -> ``forced`` (after a bound token) -> ``grammar`` ->
``finished`` (after EOS). All of it can be undone token by token, across the borders.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from deepinfer.structured import native
from deepinfer.structured.grammar_cache import CompiledGrammar
from deepinfer.structured.start_rule import StartRule
from deepinfer.structured.vocabulary import Vocabulary

Words = NDArray[np.int32]
"""Masks: int32 ``[..., ceil(vocab / 32)]``; bit ``i % 32`` of word ``i // 32`` is 1 where token i is allowed."""


class Mode(enum.Enum):
    FREE = "free"
    FORCED = "forced"
    GRAMMAR = "grammar"
    FINISHED = "finished"


class _State(NamedTuple):
    mode: Mode
    pattern: int = 0
    """Index of the pattern that is waited for."""
    matched: int = 0
    """Ids of it that were just generated."""


class GrammarMatcher:
    """State of one sequence. For one thread at a time.

    Args:
        compiled: the grammar; shared.
        vocabulary: what it was compiled for.
        start: when it starts.
        max_rollback: tokens that can be undone.
    """

    def __init__(
        self,
        compiled: CompiledGrammar,
        vocabulary: Vocabulary,
        start: StartRule | None = None,
        *,
        max_rollback: int = 64,
    ) -> None:
        self.compiled = compiled
        self.vocabulary = vocabulary
        self.start = start or StartRule()
        self.max_rollback = max_rollback
        self._native = native.bindings().GrammarMatcher(compiled.handle, None, False, -1, None)
        self._state = _State(Mode.FREE if self.start.patterns else Mode.GRAMMAR)
        self._undo: list[tuple[_State, bool]] = []
        self._scratch: Words = np.zeros((1, vocabulary.num_words), dtype=np.int32)
        self.num_tokens = 0

    @property
    def mode(self) -> Mode:
        return self._state.mode

    @property
    def is_constrained(self) -> bool:
        """Whether not every token may come next."""
        return self._state.mode in (Mode.FORCED, Mode.GRAMMAR)

    @property
    def is_finished(self) -> bool:
        """Whether EOS was accepted where the grammar allows it."""
        return self._state.mode is Mode.FINISHED

    @property
    def can_end(self) -> bool:
        """Whether the text so far is complete: EOS may come, and stopping here leaves a valid text."""
        return self.is_finished or (self.mode is Mode.GRAMMAR and bool(self._native.is_completed()))

    def accept(self, token: int) -> bool:
        """Advance by one token; False if it is not allowed, and then nothing changes."""
        state, used_grammar = self._state, False
        match state.mode:
            case Mode.FREE:
                after = self._after_free(state, token)
            case Mode.FORCED:
                if token != self._forced_token:
                    return False
                after = self._after_match(state.pattern, state.matched + 1, Mode.FORCED)
            case Mode.GRAMMAR:
                if not self._accept_in_grammar(token):
                    return False
                used_grammar = True
                after = _State(Mode.FINISHED) if token == self.vocabulary.eos_id else state
            case Mode.FINISHED:
                after = state
        self._undo.append((state, used_grammar))
        if len(self._undo) > 2 * self.max_rollback:
            del self._undo[: self.max_rollback]
        self._state = after
        self.num_tokens += 1
        return True

    def _accept_in_grammar(self, token: int) -> bool:
        # The library would print a warning for a token without text, and drafts can be any.
        has_text = 0 <= token < self.vocabulary.size and bool(self.vocabulary.token_bytes[token])
        if not has_text and token != self.vocabulary.eos_id:
            return False
        return bool(self._native.accept_token(int(token), False))

    def _after_free(self, state: _State, token: int) -> _State:
        pattern = self.start.patterns[state.pattern]
        matched = pattern.advance(state.matched, token)
        is_last = state.pattern == len(self.start.patterns) - 1
        is_bound = is_last and token == self.start.bound_token_id
        # A bound token that is no part of the trigger is followed by the whole trigger; one within it by the rest.
        return self._after_match(state.pattern, matched, Mode.FORCED if is_bound else Mode.FREE)

    def _after_match(self, index: int, matched: int, mode: Mode) -> _State:
        if matched < len(self.start.patterns[index]):
            return _State(mode, index, matched)
        if index + 1 < len(self.start.patterns):
            return _State(Mode.FREE, index + 1)
        return _State(Mode.GRAMMAR)

    @property
    def _forced_token(self) -> int:
        return self.start.patterns[self._state.pattern].ids[self._state.matched]

    def rollback(self, num_tokens: int) -> None:
        """Undo the last tokens, at most ``max_rollback`` and not more than were accepted."""
        assert 0 <= num_tokens <= min(self.max_rollback, len(self._undo)), f"{num_tokens=} of {len(self._undo)}"
        if not num_tokens:
            return
        undone = self._undo[-num_tokens:]
        del self._undo[-num_tokens:]
        in_grammar = sum(used for _state, used in undone)
        if in_grammar:
            self._native.rollback(in_grammar)
        self._state = undone[0][0]
        self.num_tokens -= num_tokens

    def fill_mask(self, row: Words) -> bool:
        """Write which tokens may come next.

        Args:
            row: int32 ``[ceil(vocab / 32)]`` or ``[1, ceil(vocab / 32)]``, contiguous.
        Returns:
            False if every token may come: then the row is not written, and the logits need no mask.
        """
        if not self.is_constrained:
            return False
        bits = row.reshape(1, -1)
        if self.mode is Mode.FORCED:
            bits[:] = 0
            bits.view(np.uint32)[0, self._forced_token // 32] = np.uint32(1 << (self._forced_token % 32))
            return True
        if not self._native.fill_next_token_bitmask(bits, 0, False):
            bits[:] = -1
        spare = self.vocabulary.size % 32
        if spare:  # bits past the vocabulary belong to no token
            bits.view(np.uint32)[0, -1] &= np.uint32((1 << spare) - 1)
        return True

    def allows(self, token: int) -> bool:
        """Whether a token may come next. Changes nothing."""
        if not self.accept(token):
            return False
        self.rollback(1)
        return True

    def forced_tokens(self, max_tokens: int) -> list[int]:
        """The next tokens as long as exactly one is allowed, at most ``max_tokens``. Changes nothing.

        Only single choices of *tokens* count. That the next characters are certain is not enough: they can be cut into
        tokens in several ways, and choosing one of them is up to the model.
        """
        found: list[int] = []
        while len(found) < min(max_tokens, self.max_rollback):
            if not self.fill_mask(self._scratch):
                break
            token = _single_bit(self._scratch[0])
            if token is None:
                break
            accepted = self.accept(token)
            assert accepted, f"the mask allows {token=}, the matcher does not"
            found.append(token)
        self.rollback(len(found))
        return found

    def copy(self) -> GrammarMatcher:
        """A matcher at the beginning of the same grammar."""
        return GrammarMatcher(self.compiled, self.vocabulary, self.start, max_rollback=self.max_rollback)

    def replay(self, output_ids: Iterable[int]) -> int:
        """Start over and accept ``output_ids``: the state after a preemption or in another engine.

        Returns:
            How many were accepted; fewer than given if one does not fit.
        """
        self._native.reset()
        self._state = _State(Mode.FREE if self.start.patterns else Mode.GRAMMAR)
        self._undo.clear()
        self.num_tokens = 0
        for token in output_ids:
            if not self.accept(token):
                break
        return self.num_tokens

    def check(self) -> None:
        """Raise AssertionError if the state contradicts itself."""
        assert len(self._undo) <= self.num_tokens, f"{len(self._undo)} undo entries, {self.num_tokens} tokens"
        if self.mode in (Mode.FREE, Mode.FORCED):
            pattern = self.start.patterns[self._state.pattern]
            assert self._state.matched < len(pattern), f"{self._state} has matched all"


def _single_bit(words: Words) -> int | None:
    """Index of the only bit that is set; None if there are others or none."""
    nonzero = np.flatnonzero(words)
    if len(nonzero) != 1:
        return None
    word = int(words[nonzero[0]]) & 0xFFFFFFFF
    return None if word & (word - 1) else 32 * int(nonzero[0]) + word.bit_length() - 1
