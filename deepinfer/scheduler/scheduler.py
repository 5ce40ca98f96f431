"""The scheduler: decides which rows of which sequences run in the next step. See docs/scheduling.md for the policy."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as Items

from deepinfer.config.scheduler import SchedulerConfig
from deepinfer.errors import RequestError
from deepinfer.kvcache.block_pool import BlockPool
from deepinfer.kvcache.state_slots import StateSlots
from deepinfer.messages import StateCopy, StepPlan
from deepinfer.scheduler.admission import headroom_blocks, may_look_further, refuse_impossible, row_limit
from deepinfer.scheduler.budget import ROW_PATIENCE_STEPS, decode_rows, first_chunk_rows, prefill_share
from deepinfer.scheduler.chunk_builder import build_chunk, commit_chunk
from deepinfer.scheduler.invariants import check_in_flight, check_memory, check_queues
from deepinfer.scheduler.memory import SequenceMemory
from deepinfer.scheduler.preemption import blocks_ending_soon, latest_behind
from deepinfer.scheduler.prefix_lookup import MISS, Hit, blocks_from_free
from deepinfer.scheduler.prefix_planner import MAX_PREFIX_WAITERS, PlannedSave, PrefixPlanner
from deepinfer.scheduler.sequence import FINISH_ABORT, FINISH_ERROR, FINISH_LENGTH, Sequence, Status
from deepinfer.scheduler.step_draft import StepDraft, UncommittedPlan


class Scheduler:
    """Owns the queues and, through them, all blocks and state slots of requests.

    One step is ``plan = schedule()``, the worker runs ``plan``, ``commit(plan, new_tokens)``, and then ``finish()`` for
    each sequence that met a stop condition. With ``pipeline_depth=2``, ``schedule()`` may be called once more before
    the commit; plans are committed in the order in which they were made. A plan without chunks needs neither a worker
    nor a commit. A step that failed is closed by finishing its requests and committing it with no tokens.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        pool: BlockPool,
        slots: StateSlots,
        history_len: int,
        prefix: PrefixPlanner | None = None,
    ) -> None:
        """Compose a scheduler over pools that nobody else allocates from.

        Args:
            config: limits and policy.
            pool: KV blocks.
            slots: state slots; fewer usable ones than ``max_num_seqs`` lower the number of running sequences.
            history_len: tokens before a chunk that the worker needs, ``max_ngram - 1``.
            prefix: the prefix cache over ``pool``; None computes every prompt whole.
        """
        assert history_len >= 0, f"{history_len=}"
        self.config = config
        self.history_len = history_len
        self.prefix = prefix
        self.num_preemptions = 0
        self._memory = SequenceMemory(pool, slots)
        self._live: dict[str, Sequence] = {}
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._uncommitted: deque[UncommittedPlan] = deque()
        self._ended: list[Sequence] = []
        self._next_arrival = 0
        self._next_step = 0

    # ---- requests in and out -------------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence.

        Raises:
            PromptTooLongError: it can never run here.
            RequestError: its id belongs to a live request.
        """
        if sequence.request_id in self._live:
            raise RequestError(
                "request_id", sequence.request_id, why="a live request has this id", fix="choose another id or wait"
            )
        refuse_impossible(sequence, self.config, self._memory.pool)
        assert sequence.arrival == -1, f"{sequence.request_id} was added before"
        sequence.max_model_len = row_limit(sequence, self.config)
        if self.config.decoder_keep_tokens:
            sequence.prefix.decoder_floor = max(0, len(sequence.prompt_ids) - self.config.decoder_keep_tokens)
        if self.prefix is not None:
            self.prefix.admit(sequence)
        sequence.arrival = self._next_arrival
        self._next_arrival += 1
        self._live[sequence.request_id] = sequence
        insort(self._waiting, sequence, key=_order)

    def abort(self, request_id: str) -> bool:
        """End a request in whatever state it is. Returns False if no live request has this id."""
        return self.finish(request_id, FINISH_ABORT)

    def finish(self, request_id: str, reason: str, error: str | None = None) -> bool:
        """End a request that met a stop condition. Rows of it that are in flight will be ignored.

        Returns:
            False if no live request has this id.
        """
        sequence = self._live.get(request_id)
        if sequence is None:
            return False
        self._end(sequence, reason, error)
        return True

    def take_ended(self) -> list[Sequence]:
        """Sequences that the scheduler ended on its own since the last call: at a limit, or too long for the pool."""
        ended, self._ended = self._ended, []
        return ended

    # ---- one step ------------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Plan the next step. The plan has no chunks when nothing can run before a commit or a new request."""
        depth = self.config.pipeline_depth
        assert len(self._uncommitted) < depth, f"{len(self._uncommitted)} plans are uncommitted, {depth=}"
        step = StepDraft(self.config.max_num_batched_tokens)
        if self.prefix is not None:
            self.prefix.begin_step()
        decoding, prefilling = self._split_running()
        self._select_decodes(step, decoding)
        prefilling = [sequence for sequence in prefilling if sequence.status is Status.RUNNING]
        if prefilling or self._waiting:
            seats = self.config.max_num_seqs - len(self._running)
            share = prefill_share(self.config, step.rows_left, len(prefilling), min(seats, len(self._waiting)))
            self._select_prefills(step, prefilling, share)
            self._admit(step, share)
            self._spend_surplus(step)
        return self._launch(step)

    def commit(self, plan: StepPlan, new_tokens: Mapping[str, Items[int]]) -> list[Sequence]:
        """Take in the results of the oldest uncommitted plan.

        Args:
            plan: as :meth:`schedule` returned it.
            new_tokens: per request id, the tokens that its chunk gave: at least one and at most ``num_sampled``.
                Entries of requests that ended or were preempted since are ignored, and so are chunks without samples.
        Returns:
            The sequences that got tokens, in batch order. The engine checks stop conditions of these.
        """
        if not plan.chunks:
            return []
        assert self._uncommitted, f"step {plan.step_id} is committed twice or was never planned"
        record = self._uncommitted.popleft()
        assert record.plan is plan, f"step {plan.step_id} committed before step {record.plan.step_id}"
        grown = []
        computed_before = {save.sequence: save.sequence.num_computed for save in record.saves}
        for chunk, (sequence, epoch) in zip(plan.chunks, record.owners, strict=True):
            if sequence.epoch != epoch:
                continue
            if commit_chunk(sequence, chunk, new_tokens):
                grown.append(sequence)
            if self.prefix is not None:
                self.prefix.commit(sequence)
        for save in record.saves:
            assert self.prefix is not None
            self.prefix.settle(save, computed_before[save.sequence])
        self._memory.settle(record)
        return grown

    # ---- state for the engine, metrics and tests -----------------------------------------------------------------

    def has_work(self) -> bool:
        """Whether there are live requests or plans to commit."""
        return bool(self._live or self._uncommitted)

    def get(self, request_id: str) -> Sequence | None:
        """The live sequence of this id."""
        return self._live.get(request_id)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_uncommitted(self) -> int:
        """Plans that were handed out and not committed yet."""
        return len(self._uncommitted)

    @property
    def usage(self) -> float:
        """Share of the KV blocks in use, in [0, 1]."""
        return self._memory.pool.usage

    def check(self) -> None:
        """Raise AssertionError if an invariant of queues, counters or memory is broken."""
        check_queues(self._waiting, self._running, self._live)
        check_in_flight(self._running, self._uncommitted)
        pinned = None if self.prefix is None or self.prefix.tier is None else self.prefix.tier.pinned()
        check_memory(self._memory, self._running, self._uncommitted, pinned)
        if self.prefix is not None:
            self.prefix.check()
        for sequence in self._waiting:
            sequence.check(self._memory.pool.block_tokens)

    # ---- passes of schedule() ------------------------------------------------------------------------------------

    def _split_running(self) -> tuple[list[Sequence], list[Sequence]]:
        """Running sequences that can decode and those in prefill. Ends those at a limit that the engine left alive."""
        decoding, prefilling, over = [], [], []
        for sequence in self._running:
            if sequence.is_prefilling:
                prefilling.append(sequence)
            elif not sequence.is_at_limit:
                decoding.append(sequence)
            elif sequence.num_pending == 0:
                over.append(sequence)
        for sequence in over:
            self._end(sequence, FINISH_LENGTH)
            self._ended.append(sequence)
        return decoding, prefilling

    def _select_decodes(self, step: StepDraft, decoding: list[Sequence]) -> None:
        reserved = self._rows_reserved_for_head()
        for sequence in decoding:
            rows = min(decode_rows(self.config, sequence), step.rows_left - reserved)
            if rows < 1:
                break
            start = sequence.num_scheduled
            if sequence.status is Status.RUNNING and self._take_blocks(sequence, start + 1, step):
                if rows > 1:
                    # Drafts take memory only where there is plenty: they never cost another sequence its own.
                    spare = max(0, self._memory.pool.num_free - len(decoding))
                    if self._memory.missing_blocks(sequence, start + rows) > spare:
                        rows = min(rows, self._memory.rows_in_table(sequence, start))
                    self._memory.grow(sequence, start + rows)
                step.add(sequence, rows)

    def _select_prefills(self, step: StepDraft, prefilling: list[Sequence], share: int) -> None:
        """Next chunks of prompts in progress, each up to its share."""
        for sequence in prefilling:
            if sequence.status is not Status.RUNNING:  # preempted for a sequence before it
                continue
            # The first in order has to progress, whatever it costs the others; the rest take what is free.
            is_first = sequence is self._running[0]
            if is_first and not self._take_blocks(sequence, sequence.num_scheduled + 1, step):
                continue
            self._add_chunk(step, sequence, min(share, step.rows_left))

    def _admit(self, step: StepDraft, share: int) -> None:
        """Start waiting sequences in order, looking past a bounded number of those without room."""
        if step.preempted:
            return
        pool, skipped, index = self._memory.pool, list[Sequence](), 0
        prefilling = [sequence for sequence in self._running if sequence.is_prefilling]
        promised = sum(self._memory.missing_blocks(sequence, sequence.num_prefill) for sequence in prefilling)
        is_only, num_prefix_waiters = not prefilling, 0
        while index < len(self._waiting) and step.rows_left > 0 and self._has_seat():
            sequence = self._waiting[index]
            hit = MISS if self.prefix is None else self.prefix.finder.find(sequence)
            if self.prefix is not None and self.prefix.should_wait(sequence, hit):
                # It waits of its own accord, so it neither blocks those behind it nor ages by them.
                index, num_prefix_waiters = index + 1, num_prefix_waiters + 1
                if num_prefix_waiters >= MAX_PREFIX_WAITERS:
                    return
                continue
            room = pool.num_free - promised - headroom_blocks(pool, len(self._running))
            has_blocks = blocks_from_free(pool, sequence, hit) <= room
            rows = first_chunk_rows(self.config, sequence, share, step, is_only, hit.resume)
            if has_blocks and rows:
                del self._waiting[index]
                self._start(step, sequence, rows, hit)
                promised += self._memory.missing_blocks(sequence, sequence.num_prefill)
                is_only = False
                for other in skipped:
                    other.num_bypassed += 1
            else:
                skipped.append(sequence)
                sequence.num_row_misses += has_blocks
                index += 1
            if not may_look_further(skipped, self.config):
                return

    def _spend_surplus(self, step: StepDraft) -> None:
        """Rows that shares left over go to the earliest prompts."""
        for sequence in self._running:
            if step.rows_left == 0:
                return
            if sequence.is_prefilling:
                self._add_chunk(step, sequence, step.rows_left)

    def _launch(self, step: StepDraft) -> StepPlan:
        """Turn the draft into a plan and count its rows as in flight."""
        step_id = self._next_step
        chunks = tuple([build_chunk(sequence, rows, step_id, self.history_len) for sequence, rows in step.rows.items()])
        restores: tuple[StateCopy, ...] = ()
        saves: tuple[PlannedSave, ...] = ()
        if self.prefix is not None:
            restores, saves = self.prefix.copies(tuple(step.rows), chunks)
        copies = tuple([StateCopy(save.sequence.state_slot, save.place) for save in saves])
        plan = StepPlan(step_id, chunks, tuple(step.preempted), restores, copies)
        if chunks:
            self._next_step += 1
            owners = tuple([(sequence, sequence.epoch) for sequence in step.rows])
            self._uncommitted.append(UncommittedPlan(plan, owners, saves))
        return plan

    # ---- one sequence --------------------------------------------------------------------------------------------

    def _add_chunk(self, step: StepDraft, sequence: Sequence, max_rows: int) -> None:
        """Add prefill rows, as many as the prompt, ``max_rows`` and the free blocks allow."""
        start = step.next_row(sequence)
        reach = self._memory.rows_within_reach(sequence, start)
        rows = min(step.prefill_left(sequence), max_rows, reach)
        if self.prefix is not None:
            rows = self.prefix.within_boundary(sequence, start, rows)
        if rows > 0:
            self._memory.grow(sequence, start + rows)
            step.add(sequence, rows)

    def _take_blocks(self, sequence: Sequence, end: int, step: StepDraft) -> bool:
        """Make the block table cover ``end`` rows, at the cost of later sequences if need be.

        Returns False if the sequence can't have the blocks in this step: they come back at a commit, or all holders are
        before it, or nobody else runs and the pool is too small, in which case the sequence is ended.
        """
        missing = self._memory.missing_blocks(sequence, end)
        if missing <= 0:
            return True
        while missing > self._memory.pool.num_free:
            coming = self._memory.num_coming + blocks_ending_soon(self._running, sequence)
            if missing <= self._memory.pool.num_free + coming:
                return False
            victim = latest_behind(self._running, sequence)
            if victim is not None:
                self._preempt(victim, step)
            elif coming or len(self._running) > 1 or sequence.num_in_flight:
                return False  # the tokens in flight still count, so the end comes after their commit
            else:
                self._end_too_long(sequence)
                return False
        self._memory.grow(sequence, end)
        return True

    def _start(self, step: StepDraft, sequence: Sequence, rows: int, hit: Hit) -> None:
        sequence.status = Status.RUNNING
        sequence.num_bypassed = sequence.num_row_misses = 0
        insort(self._running, sequence, key=_order)
        self._memory.open(sequence)
        if self.prefix is not None:
            self.prefix.open(sequence, hit)
            rows = self.prefix.within_boundary(sequence, hit.resume, rows)
        self._memory.grow(sequence, hit.resume + rows)
        step.add(sequence, rows)

    def _preempt(self, sequence: Sequence, step: StepDraft) -> None:
        """Take a sequence's memory. It waits in its place and will compute prompt and output so far again."""
        step.remove(sequence)
        step.preempted.append(sequence.request_id)
        self._running.remove(sequence)
        self._close(sequence)
        sequence.status = Status.WAITING
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        insort(self._waiting, sequence, key=_order)

    def _end(self, sequence: Sequence, reason: str, error: str | None = None) -> None:
        del self._live[sequence.request_id]
        if self.prefix is not None and reason == FINISH_ERROR:
            self.prefix.distrust(sequence)
        if sequence.status is Status.RUNNING:
            self._running.remove(sequence)
            self._close(sequence)
        else:
            self._waiting.remove(sequence)
            if self.prefix is not None:
                self.prefix.close(sequence)
        sequence.status = Status.FINISHED
        sequence.finish_reason = reason
        sequence.error = error

    def _close(self, sequence: Sequence) -> None:
        """Take all memory of a running sequence."""
        if self.prefix is not None:
            self.prefix.close(sequence)
        self._memory.close(sequence, self._holder(sequence))

    def _end_too_long(self, sequence: Sequence) -> None:
        pool = self._memory.pool
        self._end(
            sequence,
            FINISH_LENGTH,
            f"{sequence.num_tokens} tokens fill the whole KV cache ({pool.num_usable} blocks of {pool.block_tokens} "
            "tokens), so no further token can be computed. Give the KV cache more memory or lower max_model_len.",
        )
        self._ended.append(sequence)

    def _holder(self, sequence: Sequence) -> UncommittedPlan | None:
        """The newest uncommitted plan with rows of the sequence."""
        if sequence.num_in_flight == 0:
            return None
        return next(record for record in reversed(self._uncommitted) if record.plan.step_id == sequence.last_step)

    def _has_seat(self) -> bool:
        return len(self._running) < self.config.max_num_seqs and self._memory.slots.num_free > 0

    def _rows_reserved_for_head(self) -> int:
        """Rows that decode leaves to a whole prompt that found too few rows for long enough (without chunks only)."""
        if self.config.chunked_prefill or not self._waiting or not self._has_seat():
            return 0
        head, pool = self._waiting[0], self._memory.pool
        room = pool.num_free - headroom_blocks(pool, len(self._running))
        if head.num_row_misses < ROW_PATIENCE_STEPS or pool.blocks_for(head.num_prefill) > room:
            return 0
        return head.num_prefill


def _order(sequence: Sequence) -> tuple[int, int]:
    return sequence.order
