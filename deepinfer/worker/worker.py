"""One process's share of a step: forward, verification, drafting. Knows tensors and sequences, but no requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from deepinfer.messages import Chunk, StepPlan
from deepinfer.sampling.batch import SamplingBatchBuilder
from deepinfer.sampling.sampler import SamplerOutput
from deepinfer.sampling.state import SamplingState
from deepinfer.sampling.transfer import to_device
from deepinfer.speculative.allocation import allocate_on_host
from deepinfer.speculative.drafts import NO_DRAFT, Drafts
from deepinfer.speculative.verification import Verified, Verifier
from deepinfer.structured.masks import MaskBatch, MaskRows
from deepinfer.structured.matcher import GrammarMatcher
from deepinfer.worker.drafter import Drafter
from deepinfer.worker.model_runner import ModelRunner, StepResult
from deepinfer.worker.slot_state import SlotState
from deepinfer.worker.unread import UnreadDrafts, UnreadStep, UnreadTokens


@dataclass(frozen=True, slots=True)
class Launched:
    """A step whose forward has been started."""

    plan: StepPlan
    """As it really runs: placeholders filled in, rows of verification divided."""
    result: StepResult
    forward_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class RowOwner:
    """The sequence that a chunk samples for."""

    sampling: SamplingState
    grammar: GrammarMatcher | None = None
    """State after all committed tokens; left as it was found."""


@dataclass(frozen=True, slots=True)
class SequenceTokens:
    """What one sequence got out of a step."""

    token_ids: list[int]
    """The accepted drafts and one token more, unless that one is bad."""
    first_row: int
    """Row of the sampler's report for the first of them."""
    num_drafts: int
    """Drafts that were verified."""
    confidence: list[float]
    """Of all drafts that were proposed, verified or not; meaningless if none were verified."""
    is_bad: bool
    """The token behind ``token_ids`` has no distribution: not finite, or everything is masked."""

    @property
    def num_accepted(self) -> int:
        return len(self.token_ids) - (not self.is_bad)


@dataclass(frozen=True, slots=True)
class StepTokens:
    """Result of a step, on the host."""

    by_sequence: dict[str, SequenceTokens]
    report: SamplerOutput | None
    """Log-probabilities per row; None if nothing was sampled."""
    survivals: dict[str, list[float]]
    """Of the drafts that were proposed in this step: probability that each and all before it are accepted."""
    sample_ms: float = 0.0
    draft_ms: float = 0.0


class Worker:
    """Runs steps in two halves, so that a step can be launched before the one before it has been looked at.

    A *chained* step goes further: its sampler is launched right behind its forward and leaves the tokens on the device,
    where the next forward finds them. The host reads them while that one runs. See :meth:`can_chain` for when.

    Args:
        runner: model and caches. verifier: chooses tokens. batches: parameters of sampled rows.
        slots: what is remembered between steps. drafter: None without speculation.
    """

    def __init__(
        self,
        runner: ModelRunner,
        verifier: Verifier,
        batches: SamplingBatchBuilder,
        slots: SlotState,
        drafter: Drafter | None,
    ) -> None:
        self.runner = runner
        self.slots = slots
        self.drafter = drafter
        self._verifier = verifier
        self._batches = batches
        self._masks = MaskBatch(runner.config.vocab_size, runner.device)

    def close(self) -> None:
        """End the threads that compute masks."""
        self._masks.close()
        if self.drafter is not None:
            self.drafter.close()

    def capture_graphs(self, show_progress: bool) -> None:
        """Capture the graphs of all sizes of steps, where there are any, so that no request waits for that."""
        self.runner.capture_graphs(show_progress)
        if self.drafter is not None:
            self.drafter.capture_graphs(show_progress)

    def launch(self, plan: StepPlan, verify_rows: int | None = None) -> Launched:
        """Start the forward of a plan with at least one chunk.

        Args:
            verify_rows: rows of all decoding sequences together; None lets each use all that the plan gives it.
        """
        rows = self._divide(plan, verify_rows)
        chunks = tuple(self.slots.resolve(chunk, count) for chunk, count in zip(plan.chunks, rows, strict=True))
        resolved = replace(plan, chunks=chunks)
        timer = self.runner.timer
        before = timer.milliseconds("forward")
        result = self.runner.run(resolved)
        return Launched(resolved, result, timer.milliseconds("forward") - before)

    def _divide(self, plan: StepPlan, verify_rows: int | None) -> list[int]:
        """Rows of every chunk. A limited number goes to the drafts that are most likely to be accepted."""
        rows = [chunk.num_rows if chunk.is_prefill else 1 + self.slots.drafts_for(chunk) for chunk in plan.chunks]
        decoding = [place for place, chunk in enumerate(plan.chunks) if not chunk.is_prefill]
        if verify_rows is None or not decoding:
            return rows
        survivals = []
        for place in decoding:
            confidence = self.slots.confidence[plan.chunks[place].state_slot, : rows[place] - 1]
            survivals.append(confidence.cumprod().tolist())
        total = max(len(decoding), min(verify_rows, sum(rows[place] for place in decoding)))
        for place, count in zip(decoding, allocate_on_host(survivals, total), strict=True):
            rows[place] = count
        return rows

    @torch.inference_mode()
    def sample(self, step: Launched, states: Sequence[RowOwner | None], wants_drafts: bool = True) -> StepTokens:
        """Choose the tokens of a launched step and draft what may follow them.

        Args:
            states: owners, one per chunk that samples, in plan order; None for a sequence that has ended meanwhile:
                it gets nothing.
            wants_drafts: False leaves drafting out, so the next step of these sequences verifies nothing.
        """
        chunks, owners, rows = self._sampled_rows(step, states)
        if not chunks:
            return StepTokens({}, None, {})
        timer = self.runner.timer
        begin = timer.milliseconds("sample"), timer.milliseconds("draft")
        with timer.phase("sample"):
            unread = UnreadStep.of(self._verify(step, chunks, owners, rows))
        following = None
        if self.drafter is not None and wants_drafts and self._can_follow(owners):
            with timer.phase("draft"):
                following = self._follow(chunks, owners, unread.on_device)
        with timer.phase("sample"):
            verified = unread.wait()
            found = self._take_in(chunks, verified)
        survivals: dict[str, list[float]] = {}
        if self.drafter is not None and wants_drafts:
            alive = [place for place, chunk in enumerate(chunks) if not found[chunk.request_id].is_bad]
            with timer.phase("draft"):
                if following is not None:
                    drafts, confidence = following.wait()
                    survivals = self._propose(
                        [chunks[place] for place in alive],
                        [drafts[place] for place in alive],
                        [confidence[place] for place in alive],
                    )
                else:
                    tokens = [found[chunks[place].request_id].token_ids for place in alive]
                    survivals = self._draft(
                        [chunks[place] for place in alive], [owners[place] for place in alive], tokens
                    )
        self._jump_ahead(chunks, owners, found)
        sample_ms, draft_ms = timer.milliseconds("sample") - begin[0], timer.milliseconds("draft") - begin[1]
        return StepTokens(found, verified.rows, survivals, sample_ms, draft_ms)

    def can_chain(self, chunks: Sequence[Chunk], states: Sequence[RowOwner | None]) -> bool:
        """Whether a step may be sampled before the tokens of the step before it have been read.

        Its rows have to be known without them (no drafts), and so does everything that its sampler needs: parameters
        that look at the output so far (penalties, grammars) do not qualify.
        """
        if self.runner.device_tokens is None or self.drafter is not None:
            return False
        if any(not chunk.is_prefill and self.slots.drafts_for(chunk) for chunk in chunks):
            return False
        return all(owner is None or (owner.grammar is None and owner.sampling.ignores_output) for owner in states)

    @torch.inference_mode()
    def sample_unread(self, step: Launched, states: Sequence[RowOwner | None]) -> UnreadTokens | None:
        """Launch the sampler of a chained step. The next step may be launched at once; :meth:`read` waits.

        Args:
            states: as for :meth:`sample`. Sequences of the step before it may turn out to have ended there: what their
                rows give is dropped by whoever commits.
        Returns:
            None if nothing is sampled.
        """
        chunks, owners, rows = self._sampled_rows(step, states)
        if not chunks:
            return None
        tokens = self.runner.device_tokens
        assert tokens is not None
        with self.runner.timer.phase("sample"):
            verified = self._verify(step, chunks, owners, rows)
            slots = to_device(np.array([chunk.state_slot for chunk in chunks], dtype=np.int64), rows.device)
            ngrams = None if step.result.ngram_ids is None else step.result.ngram_ids[rows]
            tokens.advance(slots, verified.token_ids[:, 0].clamp_min(0), ngrams)
            generations = tuple(self.slots.advance_unread(chunk) for chunk in chunks)
            unread = UnreadStep.of(verified)
        return UnreadTokens(tuple(chunks), generations, unread)

    def read(self, unread: UnreadTokens | None) -> StepTokens:
        """Wait for the tokens of a chained step."""
        if unread is None:
            return StepTokens({}, None, {})
        with self.runner.timer.phase("sample"):
            verified = unread.step.wait()
            found = {}
            tokens, bad = verified.token_ids[:, 0].tolist(), verified.is_bad.tolist()
            places = zip(unread.chunks, unread.generations, tokens, bad, strict=True)
            for row, (chunk, generation, token, is_bad) in enumerate(places):
                found[chunk.request_id] = SequenceTokens([] if is_bad else [token], row, 0, [], is_bad)
                self.slots.read(chunk, generation, max(token, 0))
        return StepTokens(found, verified.rows, {})

    def _sampled_rows(
        self, step: Launched, states: Sequence[RowOwner | None]
    ) -> tuple[list[Chunk], list[RowOwner], Tensor]:
        """Chunks that sample and are alive, their owners, and the rows of the step that they sample."""
        chunks: list[Chunk] = []
        owners: list[RowOwner] = []
        places: list[int] = []
        end = 0
        sampling = [chunk for chunk in step.plan.chunks if chunk.num_sampled]
        for chunk, owner in zip(sampling, states, strict=True):
            begin, end = end, end + chunk.num_sampled
            if owner is not None:
                chunks.append(chunk)
                owners.append(owner)
                places += range(begin, end)
        rows = step.result.sample_rows
        return (
            chunks,
            owners,
            rows if len(places) == end else rows[to_device(np.asarray(places, dtype=np.int64), rows.device)],
        )

    def _verify(self, step: Launched, chunks: list[Chunk], owners: list[RowOwner], rows: Tensor) -> Verified:
        states, positions, pending = [], [], []
        for chunk, owner in zip(chunks, owners, strict=True):
            first = chunk.end - chunk.num_sampled  # position of the first sampled row
            drafts = chunk.token_ids[chunk.num_rows - chunk.num_sampled + 1 :]
            for offset in range(chunk.num_sampled):
                states.append(owner.sampling)
                positions.append(first + offset + 1)
                pending.append(drafts[:offset])
        uses_pending = any(owner.sampling.params.uses_penalties for owner in owners)
        batch = self._batches.build(states, positions, pending if uses_pending else None)
        masks = self._masks.compute(_mask_rows(chunks, owners))
        if masks is not None:
            batch = batch.with_grammar(masks)
        device = step.result.trunk.device
        logits = step.result.row_logits(rows)
        counts = to_device(np.array([chunk.num_sampled for chunk in chunks], dtype=np.int64), device)
        return self._verifier.verify(logits, batch, self._drafts_of(chunks, device), counts)

    def _drafts_of(self, chunks: list[Chunk], device: torch.device) -> Drafts:
        """The drafts that the rows of ``chunks`` verify, with their distributions where the verifier needs them."""
        ids = np.full((len(chunks), self.slots.drafts.shape[1]), NO_DRAFT, np.int64)
        for place, chunk in enumerate(chunks):
            if not chunk.is_prefill:
                ids[place, : chunk.num_rows - 1] = chunk.token_ids[1:]
        distributions = None
        if self._verifier.needs_distributions and self.drafter is not None:
            distributions = self.drafter.stored_distributions([chunk.state_slot for chunk in chunks])
        return Drafts(to_device(ids, device), distributions)

    def _take_in(self, chunks: list[Chunk], verified: Verified) -> dict[str, SequenceTokens]:
        """Host view of a verified step; the slots advance."""
        found = {}
        first_rows, bad = verified.first_row.tolist(), verified.is_bad.tolist()
        tokens, accepted = verified.token_ids.tolist(), verified.num_accepted.tolist()
        for place, chunk in enumerate(chunks):
            emitted = tokens[place][: accepted[place] + 1]
            num_drafts = 0 if chunk.is_prefill else chunk.num_sampled - 1
            found[chunk.request_id] = SequenceTokens(
                emitted[:-1] if bad[place] else emitted,  # accepted drafts are good, so only the last can be bad
                first_rows[place],
                num_drafts,
                self.slots.confidence[chunk.state_slot].tolist(),
                bad[place],
            )
            # A sequence with a bad row ends at the commit. A step that was planned ahead may still run rows of it:
            # they get a token that the model knows, and what they give is dropped.
            self.slots.advance(chunk, [*emitted[:-1], 0] if bad[place] else emitted)
        return found

    def _jump_ahead(self, chunks: list[Chunk], owners: list[RowOwner], found: dict[str, SequenceTokens]) -> None:
        """Where a grammar allows one token only, take it as a draft that is sure to stand, drafted or not.

        A draft model under the grammar's masks proposes the same tokens; without one they cost no sampling at all.
        """
        most = self.slots.drafts.shape[1]
        for chunk, owner in zip(chunks, owners, strict=True):
            tokens = found[chunk.request_id]
            if owner.grammar is None or tokens.is_bad or not most:
                continue
            taken = [token for token in tokens.token_ids if owner.grammar.accept(token)]
            forced = owner.grammar.forced_tokens(most) if len(taken) == len(tokens.token_ids) else []
            owner.grammar.rollback(len(taken))
            self.slots.force(chunk.state_slot, forced)

    def _draft(self, chunks: list[Chunk], owners: list[RowOwner], tokens: list[list[int]]) -> dict[str, list[float]]:
        """Propose drafts behind the newest tokens. Returns survivals by sequence."""
        assert self.drafter is not None
        if not chunks:
            return {}
        where = [chunk.state_slot for chunk in chunks]
        anchors = (self.slots.next_position[where] - 1).tolist()
        grammars = [owner.grammar for owner in owners]
        sampling = [owner.sampling for owner in owners]
        proposed, confidence = self.drafter.propose(sampling, grammars, where, anchors, tokens)
        return self._propose(chunks, proposed.tolist(), confidence.tolist())

    def _can_follow(self, owners: list[RowOwner]) -> bool:
        assert self.drafter is not None
        return self.drafter.can_follow([owner.sampling for owner in owners], [owner.grammar for owner in owners])

    def _follow(self, chunks: list[Chunk], owners: list[RowOwner], verified: Verified) -> UnreadDrafts:
        """Launch the draft right behind the verification, whose result the host has not seen."""
        assert self.drafter is not None
        return self.drafter.follow(
            [owner.sampling for owner in owners],
            [chunk.state_slot for chunk in chunks],
            [chunk.end - chunk.num_sampled for chunk in chunks],
            verified,
        )

    def _propose(
        self, chunks: list[Chunk], drafts: list[list[int]], confidence: list[list[float]]
    ) -> dict[str, list[float]]:
        """Record the drafts of these sequences. Returns survivals by sequence."""
        survivals = {}
        for chunk, ids, rates in zip(chunks, drafts, confidence, strict=True):
            self.slots.propose(chunk.state_slot, ids, rates)
            rates_so_far, survival = 1.0, []
            for rate in rates:
                rates_so_far *= rate
                survival.append(rates_so_far)
            survivals[chunk.request_id] = survival
        return survivals


def _mask_rows(chunks: Sequence[Chunk], owners: Sequence[RowOwner]) -> list[MaskRows]:
    """The sampled rows that a grammar constrains, numbered as they are sampled."""
    found, row = [], 0
    for chunk, owner in zip(chunks, owners, strict=True):
        if owner.grammar is not None:
            drafts = chunk.token_ids[chunk.num_rows - chunk.num_sampled + 1 :]
            found.append(MaskRows(owner.grammar, row, drafts))
        row += chunk.num_sampled
    return found
