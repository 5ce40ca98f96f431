"""What the host remembers of each sequence between two steps: its newest token, its drafts, where it stands.

A step can be planned before the one before it has come back. The plan then says which sequence runs and how many rows
it may take; where it really stands, and with which tokens, is filled in here. Chained steps (see
:class:`~deepinfer.worker.worker.Worker`) run before the tokens of the step before have come back: then the chunk is
left open, with a guess of where it starts, and the device completes it (:mod:`deepinfer.worker.device_tokens`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from deepinfer.messages import PLACEHOLDER_TOKEN, Chunk


class SlotState:
    """Arrays by state slot. Written when a step is sampled, read when the next one is launched.

    Args:
        num_slots: state slots. num_drafts: most drafts of a sequence. history_len: ids that the n-gram hash looks back.
    """

    def __init__(self, num_slots: int, num_drafts: int, history_len: int) -> None:
        self.next_position = np.zeros(num_slots, np.int64)
        """Position of the newest token, which has been sampled but not computed. This and what follows is as of the
        last step that has come back, but for ``num_drafts``."""
        self.newest = np.full(num_slots, PLACEHOLDER_TOKEN, np.int64)
        self.history = np.full((num_slots, history_len), PLACEHOLDER_TOKEN, np.int64)
        """Ids before the newest token, oldest first; a placeholder before the start of the sequence."""
        self.drafts = np.full((num_slots, num_drafts), PLACEHOLDER_TOKEN, np.int64)
        self.confidence = np.zeros((num_slots, num_drafts), np.float32)
        """That each draft is accepted, given that those before it are."""
        self.num_drafts = np.zeros(num_slots, np.int64)
        """Drafts that the next step can verify, whether or not they have come back."""
        self.num_unread = np.zeros(num_slots, np.int64)
        """Steps of the sequence that were sampled and have not come back yet."""
        self.generation = np.zeros(num_slots, np.int64)
        """Counts the prompt chunks of a slot: what was sampled before one does not concern the sequence behind it."""

    def drafts_for(self, chunks: Sequence[Chunk]) -> list[int]:
        """Drafts that each decoding chunk can verify: those that exist, as far as its rows reach."""
        existing = self.num_drafts[[chunk.state_slot for chunk in chunks]].tolist()
        return [min(most, chunk.num_rows - 1) for chunk, most in zip(chunks, existing, strict=True)]

    def resolve(self, chunks: Sequence[Chunk], counts: Sequence[int]) -> tuple[Chunk, ...]:
        """The chunks as they really run, with so many rows. Prefill chunks pass unchanged."""
        slots = [chunk.state_slot for chunk in chunks]
        unread, stands = self.num_unread[slots].tolist(), self.next_position[slots].tolist()
        newest, drafts, history = list[int](), list[list[int]](), list[list[int]]()
        if not all(unread):
            newest, drafts = self.newest[slots].tolist(), self.drafts[slots].tolist()
            history = self.history[slots].tolist()
        placeholders = (PLACEHOLDER_TOKEN,) * max(counts)
        resolved = []
        for place, (chunk, count) in enumerate(zip(chunks, counts, strict=True)):
            if chunk.is_prefill:
                self.generation[chunk.state_slot] += 1
                self.num_unread[chunk.state_slot] = 0
                resolved.append(chunk)
            elif unread[place]:
                # Each step gives one token at least, so this is where the sequence stands or a little before.
                guess = stands[place] + unread[place]
                resolved.append(_at(chunk, guess, placeholders[:count], ()))
            else:
                known = chunk.token_ids[0]
                assert known in (PLACEHOLDER_TOKEN, newest[place]), (
                    f"{chunk.request_id}: plan has token {known}, device {newest[place]}"
                )
                ids = (newest[place], *drafts[place][: count - 1])
                assert min(ids) >= 0, f"{chunk.request_id}: a placeholder would reach the model in {ids}"
                before = tuple([token for token in history[place] if token >= 0])
                resolved.append(_at(chunk, stands[place], ids, before))
        return tuple(resolved)

    def advance(self, chunk: Chunk, emitted: Sequence[int]) -> None:
        """Record what a resolved chunk emitted. Its drafts are gone until :meth:`propose`."""
        slot = chunk.state_slot
        computed = chunk.num_rows - chunk.num_sampled + len(emitted)
        self.next_position[slot] = chunk.start + computed
        self.newest[slot] = emitted[-1]
        self.num_drafts[slot] = 0
        self._remember(slot, chunk.history + chunk.token_ids[:computed])

    def advance_unread(self, chunks: Sequence[Chunk], num_drafts: int) -> np.ndarray:
        """Record that resolved chunks were sampled, and what they gave has not come back.

        Args:
            num_drafts: drafts that are made behind it, for each.
        Returns:
            generations of the slots, for :meth:`read`.
        """
        slots = [chunk.state_slot for chunk in chunks]
        for chunk, count in zip(chunks, self.num_unread[slots].tolist(), strict=True):
            if not count:  # everything before the first sampled row is known
                slot, before = chunk.state_slot, chunk.num_rows - chunk.num_sampled
                self.next_position[slot] = chunk.start + before
                self.newest[slot] = chunk.token_ids[before]
                self._remember(slot, chunk.history + chunk.token_ids[:before])
        self.num_unread[slots] += 1
        self.num_drafts[slots] = num_drafts
        return self.generation[slots]

    def read(
        self, slots: Sequence[int], generations: np.ndarray, token_ids: np.ndarray, num_accepted: np.ndarray
    ) -> np.ndarray:
        """What was emitted behind :meth:`advance_unread` has come back; so has what was emitted before.

        Args:
            token_ids: ``[slots, n]`` the accepted drafts and one token more. num_accepted: ``[slots]``.
        Returns:
            ``[slots]`` whether the slot still belongs to that sequence.
        """
        where = np.asarray(slots)
        is_own = self.generation[where] == generations
        own, emitted, accepted = where[is_own], token_ids[is_own], num_accepted[is_own]
        length = self.history.shape[1]
        known = np.concatenate((self.history[own], self.newest[own, None], emitted), axis=1)
        row, behind = np.arange(len(own))[:, None], accepted[:, None] + 1
        self.history[own] = known[row, behind + np.arange(length)]
        self.newest[own] = known[row[:, 0], behind[:, 0] + length]
        self.next_position[own] += behind[:, 0]
        self.num_unread[own] -= 1
        return is_own

    def _remember(self, slot: int, tokens: Sequence[int]) -> None:
        """The ids before the newest token are the last of these."""
        length = self.history.shape[1]
        if length:
            self.history[slot] = ((PLACEHOLDER_TOKEN,) * length + tuple(tokens))[-length:]

    def propose(self, slots: Sequence[int], drafts: np.ndarray, confidence: np.ndarray) -> None:
        """Record the drafts behind the newest tokens; both arrays are ``[slots, num_drafts]``."""
        if slots:
            self.num_drafts[slots] = drafts.shape[1]
            self.drafts[slots] = drafts
            self.confidence[slots] = confidence

    def read_drafts(
        self, slots: Sequence[int], is_own: np.ndarray, is_good: np.ndarray, drafts: np.ndarray, confidence: np.ndarray
    ) -> None:
        """The drafts behind :meth:`advance_unread` have come back.

        Args:
            is_own: from :meth:`read`. is_good: ``[slots]``; behind a bad row nothing can be drafted.
        """
        where = np.asarray(slots)
        self.num_drafts[where[is_own & ~is_good]] = 0
        self.drafts[where[is_own]] = drafts[is_own]
        self.confidence[where[is_own]] = confidence[is_own]

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


def _at(chunk: Chunk, start: int, token_ids: tuple[int, ...], history: tuple[int, ...]) -> Chunk:
    """A decoding chunk elsewhere, all of its rows sampled."""
    # Not ``_replace``, which takes twice as long: every sequence comes through here in every step.
    return Chunk(
        chunk.request_id,
        start,
        token_ids,
        history,
        chunk.block_table,
        chunk.state_slot,
        len(token_ids),
        chunk.is_prefill,
        chunk.window_floor,
        chunk.entry_floor,
        chunk.decoder_floor,
    )
