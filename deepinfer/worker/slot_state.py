"""What the device remembers of each sequence between two steps: its newest token, its drafts, where it stands.

A step can be planned before the one before it has come back. The plan then says which sequence runs and how many rows
it may take; where it really stands, and with which tokens, is filled in here. Chained steps (see
:class:`~deepinfer.worker.worker.Worker`) run before their tokens have come back: then only positions are known here,
and the tokens are filled in on the device (:mod:`deepinfer.worker.device_tokens`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from deepinfer.messages import PLACEHOLDER_TOKEN, Chunk


class SlotState:
    """Arrays by state slot. Written when a step is sampled, read when the next one is launched.

    Args:
        num_slots: state slots. num_drafts: most drafts of a sequence. history_len: ids that the n-gram hash looks back.
    """

    def __init__(self, num_slots: int, num_drafts: int, history_len: int) -> None:
        self.next_position = np.zeros(num_slots, np.int64)
        """Position of the newest token, which has been sampled but not computed."""
        self.newest = np.full(num_slots, PLACEHOLDER_TOKEN, np.int64)
        self.history = np.full((num_slots, history_len), PLACEHOLDER_TOKEN, np.int64)
        """Ids before the newest token, oldest first; a placeholder before the start of the sequence."""
        self.drafts = np.full((num_slots, num_drafts), PLACEHOLDER_TOKEN, np.int64)
        self.num_drafts = np.zeros(num_slots, np.int64)
        self.confidence = np.zeros((num_slots, num_drafts), np.float32)
        """That each draft is accepted, given that those before it are."""
        self.num_unread = np.zeros(num_slots, np.int64)
        """Tokens that were sampled and have not come back yet; ``newest`` and ``history`` lag behind by as many."""
        self.generation = np.zeros(num_slots, np.int64)
        """Counts the prompt chunks of a slot: what was sampled before one does not concern the sequence behind it."""

    def drafts_for(self, chunk: Chunk) -> int:
        """Drafts that a decoding chunk can verify: those that exist, as far as its rows reach."""
        return min(int(self.num_drafts[chunk.state_slot]), chunk.num_rows - 1)

    def resolve(self, chunk: Chunk, num_rows: int) -> Chunk:
        """The chunk as it really runs, with ``num_rows`` rows. Prefill chunks pass unchanged."""
        slot = chunk.state_slot
        if chunk.is_prefill:
            self.generation[slot] += 1
            self.num_unread[slot] = 0
            return chunk
        if self.num_unread[slot]:
            assert num_rows == 1, f"{chunk.request_id}: drafts behind a token that has not come back"
            return replace(
                chunk,
                start=int(self.next_position[slot]),
                token_ids=(PLACEHOLDER_TOKEN,),
                history=(),
                num_sampled=1,
            )
        newest = int(self.newest[slot])
        known = chunk.token_ids[0]
        assert known in (PLACEHOLDER_TOKEN, newest), f"{chunk.request_id}: plan has token {known}, device {newest}"
        ids = (newest, *self.drafts[slot, : num_rows - 1].tolist())
        assert min(ids) >= 0, f"{chunk.request_id}: a placeholder would reach the model in {ids}"
        return replace(
            chunk,
            start=int(self.next_position[slot]),
            token_ids=ids,
            history=tuple(token for token in self.history[slot].tolist() if token >= 0),
            num_sampled=num_rows,
        )

    def advance(self, chunk: Chunk, emitted: Sequence[int]) -> None:
        """Record what a resolved chunk emitted. Its drafts are gone until :meth:`propose`."""
        slot = chunk.state_slot
        computed = chunk.num_rows - chunk.num_sampled + len(emitted)
        self.next_position[slot] = chunk.start + computed
        self.newest[slot] = emitted[-1]
        self.num_drafts[slot] = 0
        self._remember(slot, chunk.history + chunk.token_ids[:computed])

    def advance_unread(self, chunk: Chunk) -> int:
        """Record that a resolved chunk emitted one token, which has not come back. Returns the slot's generation."""
        slot = chunk.state_slot
        self.next_position[slot] = chunk.end
        self.num_drafts[slot] = 0
        if not self.num_unread[slot]:
            self._remember(slot, chunk.history + chunk.token_ids)
            self.newest[slot] = PLACEHOLDER_TOKEN
        self.num_unread[slot] += 1
        return int(self.generation[slot])

    def read(self, chunk: Chunk, generation: int, token: int) -> None:
        """The token of :meth:`advance_unread` has come back; those before it have, too."""
        slot = chunk.state_slot
        if self.generation[slot] != generation:
            return  # the slot was given to another sequence meanwhile
        if self.newest[slot] != PLACEHOLDER_TOKEN:
            self._remember(slot, (*self.history[slot].tolist(), int(self.newest[slot])))
        self.newest[slot] = token
        self.num_unread[slot] -= 1

    def _remember(self, slot: int, tokens: Sequence[int]) -> None:
        """The ids before the newest token are the last of these."""
        length = self.history.shape[1]
        if length:
            self.history[slot] = ((PLACEHOLDER_TOKEN,) * length + tuple(tokens))[-length:]

    def propose(self, slot: int, drafts: Sequence[int], confidence: Sequence[float]) -> None:
        """Record the drafts behind the newest token of a slot."""
        self.num_drafts[slot] = len(drafts)
        self.drafts[slot, : len(drafts)] = drafts
        self.confidence[slot, : len(drafts)] = confidence

    def force(self, slot: int, tokens: Sequence[int]) -> None:
        """Tokens that are certain to follow: the first drafts of a slot, whatever was proposed."""
        count = len(tokens)
        if not count:
            return
        if self.drafts[slot, :count].tolist() != list(tokens):
            self.num_drafts[slot] = count  # what was proposed behind other tokens means nothing
        self.num_drafts[slot] = max(count, int(self.num_drafts[slot]))
        self.drafts[slot, :count] = tokens
        self.confidence[slot, :count] = 1.0
