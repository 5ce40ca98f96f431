"""One request as the scheduler sees it: its tokens, how far it is computed, and the memory it holds."""

from __future__ import annotations

import enum
import time
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from deepinfer.errors import RequestError
from deepinfer.kvcache.state_slots import NULL_SLOT
from deepinfer.scheduler.prefix_state import PrefixState

FINISH_LENGTH = "length"
FINISH_ABORT = "abort"
FINISH_ERROR = "error"


class Status(enum.Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"  # holds no memory
    RUNNING = "running"  # holds a state slot and blocks: between prefill chunks, or decoding
    FINISHED = "finished"


@dataclass(eq=False, repr=False, slots=True, kw_only=True)
class Sequence:
    """State of one request. Created by the engine; from ``Scheduler.add`` on only the scheduler changes it.

    Positions: rows ``[0, num_computed)`` are written and committed, the next ``num_in_flight`` rows are in plans that
    are not committed yet, and the next row to schedule is at ``num_scheduled``. ``num_pending`` tokens beyond
    ``token_ids`` are being sampled by those plans.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    max_tokens: int | None = None
    """Most output tokens; None leaves ``max_model_len`` as the only limit."""
    max_model_len: int | None = None
    """Most rows, prompt and output together. None, or more than the scheduler's limit, means the scheduler's limit."""
    priority: int = 0
    """Lower runs first; equal ones run in arrival order."""
    arrival_time_s: float = field(default_factory=time.monotonic)
    """When the request reached the engine, on the monotonic clock."""

    arrival: int = -1
    """Arrival number, set by ``Scheduler.add``."""
    status: Status = Status.WAITING
    token_ids: list[int] = field(init=False)
    """Prompt and output; never holds a placeholder."""
    num_prefill: int = field(init=False)
    """Rows below this position count as prefill: the prompt, and after a preemption also the output so far."""
    num_computed: int = 0
    num_in_flight: int = 0
    num_pending: int = 0
    block_table: list[int] = field(default_factory=list)
    state_slot: int = NULL_SLOT
    state_generation: int = 0
    """Generation of the state slot when this sequence got it."""
    epoch: int = 0
    """Goes up when the sequence loses its memory: rows planned in an older epoch are ignored when they come back."""
    last_step: int = -1
    """Id of the newest plan that holds rows of this epoch."""
    num_bypassed: int = 0
    """How many later sequences started before this one since it began to wait."""
    num_row_misses: int = 0
    """Steps in which there was memory for this sequence but not enough rows (whole-prompt prefill only)."""
    num_preemptions: int = 0
    finish_reason: str | None = None
    error: str | None = None
    """What went wrong, for a sequence that ended for a reason other than its own."""
    prefix: PrefixState = field(default_factory=PrefixState)
    """What the prefix cache holds for it, and the floors of its rows."""
    _table: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Check what any caller can get wrong.

        Raises:
            RequestError: empty prompt, or a limit below 1.
        """
        if not self.prompt_ids:
            raise RequestError(
                "prompt", self.prompt_ids, why="a prompt holds at least one token", fix="send a token, for example BOS"
            )
        for name in ("max_tokens", "max_model_len"):
            limit = getattr(self, name)
            if limit is not None and limit < 1:
                raise RequestError(
                    name, limit, why="a request generates at least one token", fix="use 1 or more, or None"
                )
        self.token_ids = list(self.prompt_ids)
        self.num_prefill = len(self.token_ids)

    def __repr__(self) -> str:
        return (
            f"<Sequence {self.request_id} {self.status.value}: {len(self.prompt_ids)}+{self.num_output} tokens, "
            f"{self.num_computed}+{self.num_in_flight} rows, {len(self.block_table)} blocks, slot {self.state_slot}>"
        )

    @property
    def order(self) -> tuple[int, int]:
        """Sort key of both queues: earlier comes first, is served first, and is preempted last."""
        return self.priority, self.arrival

    @property
    def num_tokens(self) -> int:
        """Known tokens, prompt and output."""
        return len(self.token_ids)

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - len(self.prompt_ids)

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[len(self.prompt_ids) :]

    @property
    def num_scheduled(self) -> int:
        """Position of the next row to schedule."""
        return self.num_computed + self.num_in_flight

    @property
    def is_prefilling(self) -> bool:
        """Whether the next row to schedule is a prompt (or recomputed) token."""
        return self.num_computed + self.num_in_flight < self.num_prefill

    @property
    def is_at_limit(self) -> bool:
        """Whether no further row can run, as far as is known.

        Rows in flight give one token at least, which counts for ``max_tokens``, and one each at most, which counts for
        ``max_model_len``: beyond it there is no place for a row.
        """
        known, pending = len(self.token_ids), self.num_pending
        if self.max_tokens is not None and known - len(self.prompt_ids) + (pending > 0) >= self.max_tokens:
            return True
        return self.max_model_len is not None and known + pending > self.max_model_len

    def table(self) -> tuple[int, ...]:
        """The block table as a tuple, rebuilt only after it changed length."""
        if len(self._table) != len(self.block_table):
            self._table = tuple(self.block_table)
        return self._table

    def append_tokens(self, tokens: Items[int]) -> None:
        """Add sampled tokens. Only the scheduler calls this, at commit."""
        assert not tokens or min(tokens) >= 0, f"{self.request_id}: sampled token {min(tokens)} is no token id"
        self.token_ids += tokens

    def drop_memory(self) -> tuple[list[int], int]:
        """Forget what was computed. Returns blocks and slot, which the caller has to return to their pools."""
        blocks, slot = self.block_table, self.state_slot
        self.block_table, self._table = [], ()
        self.state_slot, self.state_generation = NULL_SLOT, 0
        self.num_computed = self.num_in_flight = self.num_pending = 0
        self.num_prefill = len(self.token_ids)
        self.epoch += 1
        self.last_step = -1
        return blocks, slot

    def slice_ids(self, start: int, stop: int, placeholder: int) -> tuple[int, ...]:
        """Ids of rows ``[start, stop)``; those that are still being sampled are ``placeholder``."""
        known = tuple(self.token_ids[start:stop])
        return known + (placeholder,) * (stop - start - len(known))

    def check(self, block_tokens: int) -> None:
        """Raise AssertionError if the counters, the status and the memory contradict one another."""
        name = self.request_id
        assert tuple(self.token_ids[: len(self.prompt_ids)]) == tuple(self.prompt_ids), f"{name}: prompt changed"
        assert min(self.num_computed, self.num_in_flight, self.num_pending) >= 0, f"{name}: negative counter"
        assert (self.finish_reason is not None) == (self.status is Status.FINISHED), f"{name}: {self.finish_reason=}"
        if self.status is not Status.RUNNING:
            assert not self.block_table, f"{name}: {self.status} but holds blocks {self.block_table}"
            assert self.state_slot == NULL_SLOT, f"{name}: {self.status} but holds slot {self.state_slot}"
            assert self.num_scheduled == 0, f"{name}: {self.status} with {self.num_scheduled} rows"
            assert self.num_pending == 0, f"{name}: {self.status} with {self.num_pending} tokens being sampled"
            return
        assert self.state_slot != NULL_SLOT, f"{name}: running without a state slot"
        rows, blocks = self.num_scheduled, len(self.block_table)
        assert rows <= self.num_tokens + self.num_pending, f"{name}: {rows=} beyond {self.num_tokens=}"
        assert blocks * block_tokens >= rows, f"{name}: {blocks=} do not cover {rows=}"
        assert self.num_computed < self.num_tokens, f"{name}: {self.num_computed=} of {self.num_tokens=}"
        if not self.is_prefilling:
            behind = self.num_tokens + self.num_pending - rows
            assert behind == 1, f"{name}: decoding {behind} tokens behind the newest"
        assert self._table in ((), tuple(self.block_table)) or len(self._table) < blocks, f"{name}: stale table"
