"""The scheduler's side of the prefix cache: hits at the start of a sequence, blocks and checkpoints as it runs."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

from deepinfer.kvcache.block_keys import BlockKey, TokenChain, root_key
from deepinfer.kvcache.checkpoints import Checkpoints
from deepinfer.kvcache.prefix_index import PrefixIndex
from deepinfer.kvcache.tier_traffic import TierTraffic
from deepinfer.messages import Chunk, StateCopy
from deepinfer.scheduler.prefix_lookup import Hit, HitFinder
from deepinfer.scheduler.prefix_statistics import PrefixStatistics
from deepinfer.scheduler.sequence import Sequence

LEADER_PATIENCE_STEPS = 8
"""A sequence whose leader stands still for so many steps starts on its own."""
FETCH_PATIENCE_STEPS = 64
"""A sequence waits for so many steps in all for blocks from a tier below, and then computes them."""

MAX_PREFIX_WAITERS = 64
"""So many sequences that wait for a prefix are looked past in one step; then nothing behind them starts."""


@dataclass(frozen=True, slots=True)
class PlannedSave:
    """A state copy in a plan, with what its commit needs to judge it."""

    sequence: Sequence
    epoch: int
    boundary: int
    """The state at this position is wanted; a multiple of the block size."""
    place: int


class PrefixPlanner:
    """Keeps cached blocks, checkpoints and running sequences in step with one another.

    Args:
        finder: looks prefixes up; with the policy.
        checkpoints: places for states in host memory; without any, exact hits begin at 0.
        namespace: parts of the key that are equal for all requests of this engine: numerics, truncation mode.
        backtracking: rows behind a boundary that may be written before the state at it is lost (spec 5.2).
        cuts_chunks: whether prompt chunks may be cut at a boundary.
    """

    def __init__(
        self,
        finder: HitFinder,
        checkpoints: Checkpoints,
        namespace: tuple[str, ...] = (),
        backtracking: int = 6,
        cuts_chunks: bool = True,
    ) -> None:
        self.finder = finder
        self.index: PrefixIndex = finder.index
        self.checkpoints = checkpoints
        self.statistics = PrefixStatistics()
        self.tier: TierTraffic | None = None
        """Set once, before the first request, when there is a tier below the device."""
        self._namespace = namespace
        self._backtracking = backtracking
        self._cuts_chunks = cuts_chunks
        self._block_tokens = self.index.pool.block_tokens
        self._promised: dict[BlockKey, Sequence] = {}
        """Blocks that a running sequence is about to compute."""

    # ---- before the start ----------------------------------------------------------------------------------------

    def admit(self, sequence: Sequence) -> None:
        """A new sequence is queued."""
        state = sequence.prefix
        state.chain = TokenChain(root_key(*self._namespace, state.salt), self._block_tokens, state.media)

    def should_wait(self, sequence: Sequence, hit: Hit) -> bool:
        """Whether a running sequence computes a longer prefix than ``hit``, so that waiting for it is faster.

        Both would share the rows of each step, so whoever computes the prefix a second time finishes later than whoever
        waits for it and computes the rest. A leader that stands still is not waited for.
        """
        state = sequence.prefix
        if state.gave_up or state.chain is None or not state.reads:
            return False
        if self._is_fetching(sequence, hit):
            return True
        leader, end = self._leader_of(sequence, len(hit.entries))
        if leader is None or self._reach(sequence, leader, end) < hit.num_cached + self._block_tokens:
            state.stop_waiting()
            return False
        if (leader.request_id, leader.num_computed) != (state.leader, state.leader_rows):
            state.leader, state.leader_rows, state.num_idle_looks = leader.request_id, leader.num_computed, 0
            return True
        state.num_idle_looks += 1
        state.gave_up = state.num_idle_looks > LEADER_PATIENCE_STEPS
        return not state.gave_up

    def begin_step(self) -> None:
        """Take in what a tier below has delivered."""
        if self.tier is not None:
            self.tier.collect()

    def _is_fetching(self, sequence: Sequence, hit: Hit) -> bool:
        """Whether more of the prefix is on its way from a tier below; waited for a bounded number of steps."""
        state, pool = sequence.prefix, self.index.pool
        chain = state.chain
        if self.tier is None or chain is None or state.num_fetch_looks >= FETCH_PATIENCE_STEPS:
            return False
        max_blocks = (sequence.num_prefill - 1) // self._block_tokens
        if not self.tier.fetch(chain, list(hit.entries), max_blocks, pool.num_free // 2):
            return False
        state.num_fetch_looks += 1
        return True

    def _leader_of(self, sequence: Sequence, index: int) -> tuple[Sequence | None, int]:
        """Who computes the blocks of ``sequence`` from block ``index`` on, and the position up to which."""
        chain = sequence.prefix.chain
        leader: Sequence | None = None
        assert chain is not None
        max_blocks = (sequence.num_prefill - 1) // self._block_tokens
        known = sequence.prefix.num_shared_blocks
        if index < known <= min(max_blocks, len(chain)):
            leader = self._promised.get(chain.key(known - 1))
            if leader is not None and leader is not sequence and leader.request_id == sequence.prefix.leader:
                return leader, known * self._block_tokens  # promises are kept from the first block to the last
            leader = None
        while index < max_blocks:
            found = self._promised.get(chain.key(index))
            if found is None or found is sequence or found.prefix.chain is None:
                break
            if leader not in (None, found) or found.prefix.chain.content(index) != chain.content(index):
                break
            leader = found
            index += 1
        sequence.prefix.num_shared_blocks = index
        return leader, index * self._block_tokens

    def _reach(self, sequence: Sequence, leader: Sequence, end: int) -> int:
        """Where ``sequence`` could start once ``leader`` has computed the shared tokens ``[0, end)``.

        An exact start needs a state, so the leader is asked to save one at the end of what is shared.
        """
        if not self.finder.is_exact(sequence):
            return end
        limit = min(end, self.finder.last_resume(sequence) // self._block_tokens * self._block_tokens)
        self._want_boundary(leader, limit)
        return max((each for each in leader.prefix.boundaries if each <= limit), default=0)

    # ---- start and end -------------------------------------------------------------------------------------------

    def open(self, sequence: Sequence, hit: Hit) -> None:
        """Give a starting sequence its cached blocks and its first position. It holds no blocks yet."""
        state, chain = sequence.prefix, sequence.prefix.chain
        assert chain is not None
        assert not sequence.block_table, f"{sequence.request_id} holds blocks already"
        if state.num_cached is None:
            state.num_cached = hit.num_cached
            self.statistics.count(sequence.num_prefill, hit)
        self.finder.forget(sequence)
        sequence.block_table.extend(self.index.take(hit.entries))
        sequence.num_computed = hit.resume
        state.entries = list(hit.entries)
        state.num_hit_blocks = len(hit.entries)
        state.entry_floor = len(hit.entries) * self._block_tokens
        state.window_floor = hit.resume if hit.is_replay else 0
        state.stop_waiting()
        if hit.checkpoint is not None:
            state.restore = self.checkpoints.use(hit.checkpoint)
        if hit.is_replay and chain.replayed_from is None:
            chain.turn(len(hit.entries))
        chain.extend(sequence.token_ids)
        for index in range(len(hit.entries), len(chain)):
            self._promised.setdefault(chain.key(index), sequence)
        self._plan_boundaries(sequence)

    def close(self, sequence: Sequence) -> None:
        """A sequence loses its memory, for whatever reason."""
        self.finder.forget(sequence)
        self._break_promises(sequence)
        sequence.prefix.reset()

    def distrust(self, sequence: Sequence) -> None:
        """A sequence failed: nobody may find the blocks that it computed, which may hold anything."""
        state = sequence.prefix
        if len(state.entries) > state.num_hit_blocks:
            self.index.forget(state.entries[state.num_hit_blocks])

    def _plan_boundaries(self, sequence: Sequence) -> None:
        """Positions inside the prompt where others may want to resume: its end, and where this one left the cache."""
        prompt_end = sequence.num_prefill - 1
        wanted = {prompt_end, sequence.prefix.entry_floor, self.finder.last_resume(sequence)}
        for position in sorted({each // self._block_tokens * self._block_tokens for each in wanted}):
            self._want_boundary(sequence, position)

    def _want_boundary(self, sequence: Sequence, position: int) -> None:
        """Have the state at ``position`` saved, if that is possible, of use and not done yet."""
        state = sequence.prefix
        is_possible = self._cuts_chunks and self.checkpoints.num_places > 0 and state.window_floor == 0
        if not is_possible or not self._saves(sequence) or position <= sequence.num_scheduled:
            return
        index = position // self._block_tokens - 1
        is_saved = index < len(state.entries) and state.entries[index].checkpoint is not None
        if not is_saved and position not in state.boundaries:
            state.boundaries = sorted([*state.boundaries, position])

    def _saves(self, sequence: Sequence) -> bool:
        """Whether somebody could resume from states of this sequence: they have to be those of a cold run."""
        chain = sequence.prefix.chain
        is_cold = chain is not None and chain.replayed_from is None
        return is_cold and self.checkpoints.num_places > 0 and self.finder.is_exact(sequence)

    # ---- while it runs -------------------------------------------------------------------------------------------

    def within_boundary(self, sequence: Sequence, next_row: int, rows: int) -> int:
        """Of ``rows`` more rows from ``next_row`` on, those that this step's chunk may have before it has to end."""
        boundaries = sequence.prefix.boundaries
        end = next((each for each in boundaries if each > sequence.num_scheduled), None)
        return rows if end is None else max(0, min(rows, end - next_row))

    def copies(
        self, sequences: Items[Sequence], chunks: Items[Chunk]
    ) -> tuple[tuple[StateCopy, ...], tuple[PlannedSave, ...]]:
        """State copies of a plan, before and behind its chunks, whose rows count as in flight already."""
        restores, saves = [], []
        for sequence, chunk in zip(sequences, chunks, strict=True):
            place, sequence.prefix.restore = sequence.prefix.restore, None
            if place is not None:
                restores.append(StateCopy(sequence.state_slot, place))
            save = self._save(sequence, chunk)
            if save is not None:
                saves.append(save)
        return tuple(restores), tuple(saves)

    def _save(self, sequence: Sequence, chunk: Chunk) -> PlannedSave | None:
        """The copy of the state to take behind ``chunk``, if a boundary is there.

        Under drafts the true rows may lie a little before those of the plan; the commit will tell. If they begin before
        the boundary, as few rows as those of a verification leave the windows before it intact.
        """
        boundary = chunk.end // self._block_tokens * self._block_tokens
        if boundary <= sequence.num_computed or not self._saves(sequence):
            return None
        if chunk.is_prefill:
            is_wanted = chunk.end == boundary and boundary in sequence.prefix.boundaries
        else:
            is_wanted = chunk.num_rows <= self._backtracking + 1
        if not is_wanted:
            return None
        place = self.checkpoints.reserve()
        return None if place is None else PlannedSave(sequence, sequence.epoch, boundary, place)

    def commit(self, sequence: Sequence) -> None:
        """Make the blocks that became full findable."""
        state, chain = sequence.prefix, sequence.prefix.chain
        if chain is None or not state.is_linked:
            return
        num_full = sequence.num_computed // self._block_tokens
        if len(state.entries) >= num_full:
            return
        chain.extend(sequence.token_ids)
        for index in range(len(state.entries), num_full):
            parent = state.entries[-1] if state.entries else None
            is_lost = parent is not None and not self.index.holds(parent.block)
            added = None if is_lost else self.index.add(chain, index, parent, sequence.block_table[index])
            if added is None:
                state.is_linked = False
                self._break_promises(sequence)
                return
            state.entries.append(added)
            if self.tier is not None:
                self.tier.offer_block(added)
            self._break_promise(sequence, chain.key(index))

    def settle(self, save: PlannedSave, computed_before: int) -> None:
        """After the commit of the plan with ``save``: keep the checkpoint if it is the state that was wanted.

        Args:
            computed_before: committed rows of the sequence before this plan: where its chunk really began.
        """
        sequence, index = save.sequence, save.boundary // self._block_tokens - 1
        state = sequence.prefix
        is_current = sequence.epoch == save.epoch and computed_before < save.boundary <= sequence.num_computed
        if not is_current or index >= len(state.entries):
            self.checkpoints.cancel(save.place)
            return
        entry = state.entries[index]
        is_new = self.checkpoints.attach(entry, save.place)
        if self.tier is not None:
            self.tier.offer_state(entry)
        if save.boundary in state.boundaries:
            state.boundaries.remove(save.boundary)
            self.checkpoints.demote_above(entry)
            return
        if not is_new:
            return
        if state.newest_output is not None:
            self.checkpoints.drop(state.newest_output)
        state.newest_output = entry

    def _break_promises(self, sequence: Sequence) -> None:
        """Nobody will find further blocks of this sequence."""
        chain = sequence.prefix.chain
        for index in range(0 if chain is None else len(chain)):
            assert chain is not None
            self._break_promise(sequence, chain.key(index))

    def _break_promise(self, sequence: Sequence, key: BlockKey) -> None:
        if self._promised.get(key) is sequence:
            del self._promised[key]

    def check(self) -> None:
        """Raise AssertionError if index, checkpoints or promises are inconsistent."""
        self.index.check()
        self.checkpoints.check()
        for key, sequence in self._promised.items():
            assert sequence.block_table, f"{sequence.request_id} promised {key.hex()[:8]} and holds no memory"
