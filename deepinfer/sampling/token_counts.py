"""How often each token occurred, kept incrementally for the penalties of one request."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from deepinfer.sampling.params import SamplingParams


class TokenCounts:
    """Distinct tokens of a prompt and an output with their number of occurrences in the output.

    Sparse: a request uses a small part of the vocabulary, so a step moves a few kilobytes per row rather than a dense
    row of counts. The owner calls :meth:`add` and :meth:`remove` as tokens are generated and taken back.

    Args:
        vocab_size: prompt ids outside ``[0, vocab_size)`` (image placeholders) are not counted.
        prompt_ids: tokens that count as seen from the start.
    """

    def __init__(self, vocab_size: int, prompt_ids: Sequence[int] = ()) -> None:
        prompt = np.unique(np.asarray(prompt_ids, dtype=np.int64))
        prompt = prompt[(prompt >= 0) & (prompt < vocab_size)]
        self._size = len(prompt)
        self._slot_of = {int(token): slot for slot, token in enumerate(prompt)}
        capacity = max(64, 2 * self._size)
        self._ids = np.zeros(capacity, dtype=np.int64)
        self._ids[: self._size] = prompt
        self._counts = np.zeros(capacity, dtype=np.int32)
        self._num_prompt = self._size

    def add(self, token_id: int) -> None:
        """Count one more occurrence in the output."""
        slot = self._slot_of.get(token_id)
        if slot is None:
            slot = self._size
            if slot == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._slot_of[token_id] = slot
            self._ids[slot] = token_id
            self._size += 1
        self._counts[slot] += 1

    def remove(self, token_id: int) -> None:
        """Take one occurrence back."""
        slot = self._slot_of[token_id]
        assert self._counts[slot] > 0, f"{token_id=} is not in the output"
        self._counts[slot] -= 1

    def snapshot(self, pending: Sequence[int] = ()) -> tuple[np.ndarray, np.ndarray]:
        """All tokens seen so far, as private copies.

        Args:
            pending: tokens that a row assumes to be in the output already, such as the drafts before it.
        Returns:
            ids int64 and occurrences in the output int32, both ``[distinct]``; prompt tokens can have 0.
        """
        for token in pending:
            self.add(token)
        seen = self._counts[: self._size] > 0
        seen[: self._num_prompt] = True
        ids, counts = self._ids[: self._size][seen], self._counts[: self._size][seen]
        for token in pending:
            self.remove(token)
        return ids, counts


def counts_for(params: SamplingParams, vocab_size: int, prompt_ids: Sequence[int]) -> TokenCounts | None:
    """The counts that the penalties of ``params`` need: None without penalties; only repetition looks at the prompt."""
    if not params.uses_penalties:
        return None
    return TokenCounts(vocab_size, prompt_ids if params.repetition_penalty != 1.0 else ())
