"""A pretend device for the prefix cache: knows which prefix every entry and every window key stands for.

An entry or key is a pair (hash of all tokens up to its position, is it that of a cold run?). Rows assert that what
they read exists and belongs to their own prefix, and are cold only if all that they read is. The token behind a prefix
is a function of the prefix alone, so outputs do not depend on the cache, and prompts can be built from outputs.
"""

from __future__ import annotations

import random
import zlib
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from deepinfer.config.scheduler import SchedulerConfig
from deepinfer.kvcache.block_pool import BlockPool
from deepinfer.kvcache.checkpoints import Checkpoints
from deepinfer.kvcache.prefix_index import PrefixIndex
from deepinfer.kvcache.state_slots import StateSlots
from deepinfer.messages import Chunk, StepPlan
from deepinfer.scheduler.prefix_lookup import HitFinder
from deepinfer.scheduler.prefix_planner import PrefixPlanner
from deepinfer.scheduler.prefix_state import PrefixState
from deepinfer.scheduler.scheduler import Scheduler
from deepinfer.scheduler.sequence import Sequence

HISTORY_LEN = 3
VOCAB = 50_000
BACKTRACKING = 6
JUNK = (-1, False)
"""What a rejected draft leaves behind."""

Record = tuple[int, bool]


class Text:
    """True tokens of a sequence, and the hash of every prefix of them."""

    def __init__(self, tokens: Iterable[int]) -> None:
        self.tokens: list[int] = []
        self._hashes = [0]
        for token in tokens:
            self.append(token)

    def append(self, token: int) -> None:
        self.tokens.append(token)
        self._hashes.append(zlib.crc32(token.to_bytes(8, "little"), self._hashes[-1]))

    def through(self, position: int) -> int:
        """Hash of the tokens up to and with ``position``."""
        return self._hashes[position + 1]

    def next_token(self) -> int:
        """What the pretend model puts behind the text."""
        return zlib.crc32(b"next", self._hashes[-1]) % VOCAB


@dataclass
class Rings:
    """One state slot: encoder and decoder window keys by ring place, with the position that each stands for."""

    encoder: dict[int, tuple[int, Record]] = field(default_factory=dict)
    decoder: dict[int, tuple[int, Record]] = field(default_factory=dict)

    def copy(self) -> Rings:
        return Rings(dict(self.encoder), dict(self.decoder))


class PrefixDevice:
    """Runs plans: writes what rows write, and checks what they read."""

    def __init__(self, block_tokens: int, window: int, rng: random.Random) -> None:
        self.block_tokens, self.window, self.rng = block_tokens, window, rng
        self.ring_length = window + BACKTRACKING
        self.cells: dict[tuple[int, int], Record] = {}
        self.slots: dict[int, Rings] = {}
        self.places: dict[int, Rings] = {}
        self.checks = True
        """Whether rows look at what they read: it takes time that grows with the square of the length."""
        self.num_prefill_rows = 0
        self.cold: dict[str, bool] = {}
        """Whether every sampled row of a request was that of a cold run."""

    def run(self, plan: StepPlan, tokens: dict[str, list[int]]) -> dict[str, list[int]]:
        """Tokens that each sampling chunk gives. ``tokens``: those that exist so far, by request."""
        for copy in plan.restores:
            self.slots[copy.slot] = self.places[copy.place].copy()
        found = {}
        for chunk in plan.chunks:
            emitted = self._run_chunk(chunk, Text(tokens[chunk.request_id]))
            if chunk.num_sampled:
                found[chunk.request_id] = emitted
        for copy in plan.saves:
            self.places[copy.place] = self.slots[copy.slot].copy()
        return found

    def _run_chunk(self, chunk: Chunk, text: Text) -> list[int]:
        is_decode = not chunk.is_prefill
        start = len(text.tokens) - 1 if is_decode else chunk.start
        assert chunk.start >= start, "a plan may be ahead of the truth, never behind it"
        accepted = self.rng.randint(1, chunk.num_rows) if is_decode else 0
        for offset in range(chunk.num_rows):
            position = start + offset
            if is_decode and offset >= accepted:
                self._write(chunk, position, JUNK, JUNK)
                continue
            if is_decode and offset > 0:
                text.append(text.next_token())  # an accepted draft is the token that the model would choose
            given = chunk.token_ids[offset]
            assert is_decode or given == text.tokens[position], f"{chunk.request_id}: wrong token at {position}"
            self._row(chunk, position, text)
        self.num_prefill_rows += 0 if is_decode else chunk.num_rows
        if not chunk.num_sampled:
            return []
        text.append(text.next_token())
        return text.tokens[start + 1 :] if is_decode else text.tokens[-1:]

    def _row(self, chunk: Chunk, position: int, text: Text) -> None:
        mine = text.through(position)
        encoder_is_cold = self._entries_are_cold(chunk, position, text)
        encoder_is_cold &= self._window(chunk, position, text, chunk.window_floor, is_decoder=False)
        decoder_is_cold = encoder_is_cold
        if position >= chunk.decoder_floor:
            floor = max(chunk.window_floor, chunk.decoder_floor)
            decoder_is_cold &= self._window(chunk, position, text, floor, is_decoder=True)
        self._write(chunk, position, (mine, encoder_is_cold), (mine, decoder_is_cold))
        if position >= len(text.tokens) - 1 and chunk.num_sampled:
            name = chunk.request_id
            self.cold[name] = self.cold.get(name, True) and decoder_is_cold

    def _entries_are_cold(self, chunk: Chunk, position: int, text: Text) -> bool:
        cold = True
        for at in range(position if self.checks else 0):
            record = self.cells.get(self._cell(chunk, at))
            assert record is not None, f"{chunk.request_id}: entry {at} was never written"
            assert record[0] == text.through(at), f"{chunk.request_id}: entry {at} is another prefix's"
            cold &= record[1]
        return cold

    def _window(self, chunk: Chunk, position: int, text: Text, floor: int, is_decoder: bool) -> bool:
        rings = self.slots.setdefault(chunk.state_slot, Rings())
        ring, name = rings.decoder if is_decoder else rings.encoder, chunk.request_id
        first = max(0, position - self.window + 1)
        # A floor that the sequence would have in a cold run too (truncation) does not make it less cold.
        cold = not (first < chunk.window_floor)
        for at in range(max(first, floor), position if self.checks else 0):
            found = ring.get(at % self.ring_length)
            assert found is not None, f"{name}: window key {at} is missing for row {position}"
            assert found[0] == at, f"{name}: row {position} reads window key {found[0]} for {at}"
            assert found[1][0] == text.through(at), f"{name}: window key {at} is another prefix's"
            cold &= found[1][1]
        return cold

    def _write(self, chunk: Chunk, position: int, encoder: Record, decoder: Record) -> None:
        rings = self.slots.setdefault(chunk.state_slot, Rings())
        rings.encoder[position % self.ring_length] = (position, encoder)
        if position >= chunk.decoder_floor:
            rings.decoder[position % self.ring_length] = (position, decoder)
        cell = self._cell(chunk, position)
        if position < chunk.entry_floor:
            assert cell in self.cells, f"{chunk.request_id}: entry {position} of the hit does not exist"
            return
        self.cells[cell] = encoder

    def _cell(self, chunk: Chunk, position: int) -> tuple[int, int]:
        return chunk.block_table[position // self.block_tokens], position % self.block_tokens


class PrefixSimulation:
    """Scheduler with prefix cache, device and stop conditions in one loop; everything is checked after every call."""

    def __init__(
        self,
        config: SchedulerConfig,
        num_blocks: int,
        *,
        policy: str = "exact",
        block_tokens: int = 8,
        window: int = 8,
        num_places: int = 8,
        seed: int = 0,
    ) -> None:
        self.config = config
        self.pool = BlockPool(num_blocks, block_tokens)
        self.slots = StateSlots(config.max_num_seqs + 3)
        self.prefix: PrefixPlanner | None = None
        if policy != "off":
            index = PrefixIndex(self.pool)
            finder = HitFinder(index, policy == "bounded", window, config.decoder_keep_tokens)
            places = Checkpoints(index, num_places)
            self.prefix = PrefixPlanner(finder, places, (), BACKTRACKING, config.chunked_prefill)
        self.scheduler = Scheduler(config, self.pool, self.slots, HISTORY_LEN, self.prefix)
        self.device = PrefixDevice(block_tokens, window, random.Random(seed))
        self.flying: deque[StepPlan] = deque()
        self.sequences: dict[str, Sequence] = {}
        self.checks = True
        self.is_waiting_for_copies = lambda: False

    def add(self, name: str, prompt: list[int], max_tokens: int, **wishes: object) -> Sequence:
        state = PrefixState(**wishes)  # type: ignore[arg-type]
        sequence = Sequence(request_id=name, prompt_ids=tuple(prompt), max_tokens=max_tokens, prefix=state)
        self.scheduler.add(sequence)
        self.sequences[name] = sequence
        return sequence

    def check(self) -> None:
        if self.checks:
            self.scheduler.check()

    def turn(self) -> StepPlan:
        if len(self.flying) == self.config.pipeline_depth:
            self.commit()
        plan = self.scheduler.schedule()
        self.check()
        assert plan.num_rows <= self.config.max_num_batched_tokens
        if plan.chunks:
            self.flying.append(plan)
        if self.flying and (len(self.flying) == self.config.pipeline_depth or not plan.chunks):
            self.commit()
        else:
            is_alive = plan.chunks or not self.scheduler.has_work() or self.is_waiting_for_copies()
            assert is_alive, "there is work, and nothing runs: the scheduler hangs"
        return plan

    def commit(self) -> None:
        plan = self.flying.popleft()
        tokens = {chunk.request_id: list(self.sequences[chunk.request_id].token_ids) for chunk in plan.chunks}
        self.scheduler.commit(plan, self.device.run(plan, tokens))
        self.check()

    def run_until_idle(self, max_turns: int = 20_000) -> int:
        for turn in range(max_turns):
            if not self.scheduler.has_work():
                assert self.pool.num_free == self.pool.num_usable
                assert self.slots.num_free == self.slots.num_usable
                return turn
            self.turn()
        raise AssertionError(f"not idle after {max_turns} turns: {self.scheduler.num_waiting=}")

    def generate(self, name: str, prompt: list[int], max_tokens: int = 3, **wishes: object) -> Sequence:
        """One request, alone."""
        sequence = self.add(name, prompt, max_tokens, **wishes)
        self.run_until_idle()
        return sequence

    def assert_output_is_right(self, name: str) -> None:
        sequence = self.sequences[name]
        text = Text(sequence.prompt_ids)
        for _ in range(sequence.num_output):
            text.append(text.next_token())
        assert sequence.token_ids == text.tokens, name
