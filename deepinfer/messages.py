"""Frozen messages that cross the border between scheduler and worker. No tensors, no behaviour.

A step is a ragged batch of rows. A row is one token of one sequence at an absolute position. Prefill chunks, decode
rows, draft verification and replay after a prefix hit are all chunks of rows with different flags.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

PLACEHOLDER_TOKEN = -1
"""Stands for the token that the previous step is still sampling; the worker fills it in on the device."""


class Chunk(NamedTuple):
    """Consecutive rows of one sequence in one step.

    A tuple, because every sequence has two new ones in every step: a frozen dataclass takes five times as long to make.
    """

    request_id: str
    start: int
    """Absolute position of the first row, in tokens."""
    token_ids: tuple[int, ...]
    """Ids of the rows, each in ``[0, vocab)`` or :data:`PLACEHOLDER_TOKEN`."""
    history: tuple[int, ...]
    """True ids just before ``start``, oldest first: ``min(start, max_ngram - 1)`` of them, for the n-gram hash."""
    block_table: tuple[int, ...]
    """Physical block ids in token order; covers ``start + len(token_ids)`` tokens at least."""
    state_slot: int
    """Where the sequence keeps its windows and compressor state."""
    num_sampled: int
    """The last ``num_sampled`` rows give a distribution to sample from: 0 for a prompt chunk that is not the last."""
    is_prefill: bool
    """The rows are prompt (or recomputed) tokens rather than newly generated ones."""
    window_floor: int = 0
    """Rows see no window key before this position: the first replayed row after a prefix hit (spec 6.2)."""
    entry_floor: int = 0
    """Rows before this position write no main entries and no index keys, because a prefix hit brought them. They do
    refill windows, compressor state and draft rings."""
    decoder_floor: int = 0
    """Rows before this position are left out of the decoder layers, and no window there reaches past it (spec 6.1)."""

    @property
    def num_rows(self) -> int:
        return len(self.token_ids)

    @property
    def end(self) -> int:
        """Position just after the last row."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class StateCopy:
    """A copy between the state slot of a sequence and a checkpoint in host memory: windows, compressor, draft rings."""

    slot: int
    place: int
    """Number of the checkpoint."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Everything that one forward runs, in batch order."""

    step_id: int
    chunks: tuple[Chunk, ...]
    preempted: tuple[str, ...] = ()
    """Requests that lost their blocks while this step was planned; they are waiting again."""
    restores: tuple[StateCopy, ...] = ()
    """Checkpoints that go into state slots before the first layer runs."""
    saves: tuple[StateCopy, ...] = ()
    """States that are checkpointed after the last ring was written. Plans run in order, so places may be used again."""

    @property
    def num_rows(self) -> int:
        return sum([len(chunk.token_ids) for chunk in self.chunks])
