"""An engine without a model: runs plans on a pretend device that notices every wrong row, block, slot and token."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from deepinfer.config.scheduler import SchedulerConfig
from deepinfer.kvcache.block_pool import BlockPool
from deepinfer.kvcache.state_slots import StateSlots
from deepinfer.messages import PLACEHOLDER_TOKEN, Chunk, StepPlan
from deepinfer.scheduler.scheduler import Scheduler
from deepinfer.scheduler.sequence import Sequence

HISTORY_LEN = 3
VOCAB = 50_000


def sampled_token(request_id: str, position: int) -> int:
    """The token that the pretend model puts at ``position``: a function of request and position only."""
    return zlib.crc32(f"{request_id}/{position}".encode()) % VOCAB


def make_prompt(request_id: str, length: int) -> tuple[int, ...]:
    return tuple(zlib.crc32(f"{request_id}:{index}".encode()) % VOCAB for index in range(length))


@dataclass
class Device:
    """Stores what rows write and checks what they read."""

    block_tokens: int
    cells: dict[tuple[int, int], tuple[str, int, int]] = field(default_factory=dict)
    """(block, offset) -> (request, position, token) of the last write."""
    slots: dict[int, tuple[str, int]] = field(default_factory=dict)
    """State slot -> (request, next position)."""
    newest: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Request -> (position, token) that the step before sampled."""
    rows_run: dict[str, int] = field(default_factory=dict)
    starts: dict[str, int] = field(default_factory=dict)
    """How often a request was computed from position 0."""

    def run(self, plan: StepPlan) -> dict[str, list[int]]:
        sampled: dict[str, tuple[int, int]] = {}
        for chunk in plan.chunks:
            self._run_chunk(chunk)
            if chunk.num_sampled:
                sampled[chunk.request_id] = (chunk.end, sampled_token(chunk.request_id, chunk.end))
        self.newest = sampled
        return {request_id: [token] for request_id, (_position, token) in sampled.items()}

    def _run_chunk(self, chunk: Chunk) -> None:
        name = chunk.request_id
        assert chunk.state_slot > 0
        assert min(chunk.block_table) > 0
        if chunk.start == 0:
            self.slots[chunk.state_slot] = (name, 0)
            self.starts[name] = self.starts.get(name, 0) + 1
        # In order and exactly once: the state of this slot has seen precisely the rows before this chunk.
        assert self.slots[chunk.state_slot] == (name, chunk.start), (self.slots[chunk.state_slot], chunk)
        self.slots[chunk.state_slot] = (name, chunk.end)
        for position in range(chunk.start):
            owner, written, _token = self.cells[self._cell(chunk, position)]
            assert (owner, written) == (name, position), f"{name} reads {owner}'s row {written} at {position}"
        for offset, token in enumerate(chunk.token_ids):
            position = chunk.start + offset
            if token == PLACEHOLDER_TOKEN:
                at, token = self.newest[name]
                assert at == position, f"{name}: placeholder at {position}, the step before sampled {at}"
            assert 0 <= token < VOCAB
            self.cells[self._cell(chunk, position)] = (name, position, token)
        self.rows_run[name] = self.rows_run.get(name, 0) + chunk.num_rows
        expected = [self.cells[self._cell(chunk, p)][2] for p in range(max(0, chunk.start - HISTORY_LEN), chunk.start)]
        assert list(chunk.history) == expected, f"{name}: history {chunk.history} before {chunk.start}"

    def _cell(self, chunk: Chunk, position: int) -> tuple[int, int]:
        return chunk.block_table[position // self.block_tokens], position % self.block_tokens


class Simulation:
    """Scheduler, device and stop conditions in one loop, with every invariant checked after every call."""

    def __init__(self, config: SchedulerConfig, num_blocks: int, block_tokens: int, num_slots: int = 0) -> None:
        self.config = config
        self.pool = BlockPool(num_blocks, block_tokens)
        self.slots = StateSlots(num_slots or config.max_num_seqs + 3)
        self.scheduler = Scheduler(config, self.pool, self.slots, HISTORY_LEN)
        self.device = Device(block_tokens)
        self.flying: deque[StepPlan] = deque()
        self.plans: list[StepPlan] = []
        self.sequences: dict[str, Sequence] = {}
        self.stop_after: dict[str, int] = {}
        """Output length at which the engine sees a stop token."""

    def add(self, request_id: str, length: int, stop_after: int, **limits: int) -> Sequence:
        sequence = Sequence(request_id=request_id, prompt_ids=make_prompt(request_id, length), **limits)
        self.scheduler.add(sequence)
        self.scheduler.check()
        self.sequences[request_id] = sequence
        self.stop_after[request_id] = stop_after
        return sequence

    def abort(self, request_id: str) -> bool:
        found = self.scheduler.abort(request_id)
        self.scheduler.check()
        return found

    def schedule(self) -> StepPlan:
        plan = self.scheduler.schedule()
        self.scheduler.check()
        self._check_plan(plan)
        if plan.chunks:
            self.flying.append(plan)
            self.plans.append(plan)
        return plan

    def commit(self) -> None:
        plan = self.flying.popleft()
        tokens = self.device.run(plan)
        grown = self.scheduler.commit(plan, tokens)
        self.scheduler.check()
        for sequence in grown:
            if sequence.num_output >= self.stop_after[sequence.request_id]:
                assert self.scheduler.finish(sequence.request_id, "stop")
                self.scheduler.check()

    def turn(self) -> StepPlan:
        """One turn of the engine loop: plan a step, then commit the oldest one once the pipeline is full."""
        if len(self.flying) == self.config.pipeline_depth:
            self.commit()
        plan = self.schedule()
        if self.flying and (len(self.flying) == self.config.pipeline_depth or not plan.chunks):
            self.commit()
        else:
            alive = plan.chunks or not self.scheduler.has_work()
            assert alive, "nothing to run, nothing to commit, yet there is work: the scheduler hangs"
        return plan

    def turn_until(self, condition: Callable[[], object], max_turns: int = 1000) -> StepPlan:
        """Turn until ``condition()`` is true. Returns the last plan."""
        for _ in range(max_turns):
            plan = self.turn()
            if condition():
                return plan
        raise AssertionError(f"condition not met after {max_turns} turns")

    def run_until_idle(self, max_turns: int = 20_000) -> int:
        for turn in range(max_turns):
            if not self.scheduler.has_work():
                return turn
            self.turn()
        raise AssertionError(f"not idle after {max_turns} turns: {self.scheduler.num_waiting=}")

    def assert_everything_returned(self) -> None:
        assert not self.scheduler.has_work()
        assert self.pool.num_free == self.pool.num_usable
        assert self.slots.num_free == self.slots.num_usable

    def assert_output_is_right(self, request_id: str) -> None:
        sequence = self.sequences[request_id]
        first = len(sequence.prompt_ids)
        expected = [sampled_token(request_id, first + index) for index in range(sequence.num_output)]
        assert sequence.output_ids == expected, request_id

    def _check_plan(self, plan: StepPlan) -> None:
        assert plan.num_rows <= self.config.max_num_batched_tokens
        names = [chunk.request_id for chunk in plan.chunks]
        assert len(set(names)) == len(names), f"two chunks of one request: {names}"
        assert not set(names) & set(plan.preempted), "a preempted request still runs"
        kinds = [chunk.is_prefill for chunk in plan.chunks]
        assert kinds == sorted(kinds), "decode rows come first"
        for chunk in plan.chunks:
            assert chunk.num_rows >= 1
            assert len(chunk.block_table) * self.pool.block_tokens >= chunk.end
            assert chunk.end <= self.config.max_model_len
        mine = {block: chunk.request_id for chunk in plan.chunks for block in chunk.block_table}
        assert len(mine) == sum(len(chunk.block_table) for chunk in plan.chunks), "two requests share a block"
        slots = {chunk.state_slot: chunk.request_id for chunk in plan.chunks}
        for other in self.flying:
            for chunk in other.chunks:
                assert slots.get(chunk.state_slot, chunk.request_id) == chunk.request_id, "slot handed on in flight"
                for block in chunk.block_table:
                    assert mine.get(block, chunk.request_id) == chunk.request_id, f"{block=} handed on in flight"
