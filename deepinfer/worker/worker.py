"""One process's share of a step: forward, verification, drafting. Knows tensors and sequences, but no requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from deepinfer.messages import Chunk, StepPlan
from deepinfer.sampling.batch import SamplingBatchBuilder
from deepinfer.sampling.params import SamplingParams
from deepinfer.sampling.state import SamplingState
from deepinfer.sampling.transfer import kept_on_device
from deepinfer.speculative.allocation import allocate_on_host
from deepinfer.speculative.verification import Verified, Verifier
from deepinfer.structured.masks import MaskBatch
from deepinfer.worker.device_tokens import DeviceTokens, SampledRows
from deepinfer.worker.drafter import Drafter, FollowingDrafts
from deepinfer.worker.model_runner import ModelRunner
from deepinfer.worker.slot_state import SlotState
from deepinfer.worker.step_results import Launched, RowOwner, SequenceTokens, StepTimes, StepTokens
from deepinfer.worker.step_verifier import Sampling, StepVerifier
from deepinfer.worker.unread import UnreadDrafts, UnreadStep, UnreadTokens
from deepinfer.worker.warm_up import null_prompt, null_prompts

if TYPE_CHECKING:
    from deepinfer.worker.sample_step import SampleStep  # imports Triton


class Worker:
    """Runs steps in two halves, so that a step can be launched before the one before it has been looked at.

    A *chained* step goes further: its sampler and its draft are launched right behind its forward and leave on the
    device where every sequence stands, and the next forward goes on from there. The host reads what came out while that
    one runs. See :meth:`can_chain` for when.

    Args:
        runner: model and caches. verifier: chooses tokens. batches: parameters of sampled rows.
        slots: what is remembered between steps. drafter: None without speculation.
        sample_step: graphs of sampler and acceptance, where there are any.
    """

    def __init__(
        self,
        runner: ModelRunner,
        verifier: Verifier,
        batches: SamplingBatchBuilder,
        slots: SlotState,
        drafter: Drafter | None,
        sample_step: SampleStep | None = None,
    ) -> None:
        self.runner = runner
        self.slots = slots
        self.drafter = drafter
        self.sample_step = sample_step
        self._masks = MaskBatch(runner.config.vocab_size, runner.device)
        self._verifier = StepVerifier(verifier, batches, self._masks, slots.drafts.shape[1])
        self._end: torch.cuda.Event | None = None
        """Of the last step that was launched, if that was chained."""

    def close(self) -> None:
        """End the threads that compute masks."""
        self._masks.close()
        if self.drafter is not None:
            self.drafter.close()

    def prepare(self, max_rows: int, decoder_keep: int, show_progress: bool) -> None:
        """Compile kernels, capture the graphs of all sizes and run two prompts, so that no request waits for that.

        Args:
            max_rows: of a step. decoder_keep: rows of a prompt that the decoder layers run on; 0: all.
        """
        if self.runner.device_tokens is None:
            return
        prompts = null_prompts(max_rows, decoder_keep, self.runner.row_limits)
        self.runner.compile_kernels(prompts, show_progress)
        self.runner.capture_graphs(show_progress)
        if self.sample_step is not None:
            self.sample_step.prepare(show_progress)
        else:
            self.runner.compile_sampler(show_progress)
        if self.drafter is not None:
            self.drafter.capture_graphs(show_progress)
        self.runner.capture_prompts(show_progress)  # last: without memory for these, steps are only launched
        for num_rows in sorted({min(48, max_rows), max_rows}):
            plan = StepPlan(0, (null_prompt(num_rows, decoder_keep),))
            owner = RowOwner(SamplingState(SamplingParams(), [0], vocab_size=self.runner.config.vocab_size))
            launched = self.launch(plan)
            if self.can_chain(plan.chunks, [owner]):
                self.read(self.sample_unread(launched, [owner]))
            else:
                self.sample(launched, [owner])
        self._end = None

    def launch(self, plan: StepPlan, verify_rows: int | None = None) -> Launched:
        """Start the forward of a plan with at least one chunk.

        Args:
            verify_rows: rows of all decoding sequences together; None lets each use all that the plan gives it.
        """
        chunks = self.slots.resolve(plan.chunks, self._divide(plan.chunks, verify_rows))
        resolved = replace(plan, chunks=chunks)
        timer = self.runner.timer
        before = timer.milliseconds("forward")
        result = self.runner.run(resolved)
        return Launched(resolved, result, timer.milliseconds("forward") - before)

    def _divide(self, chunks: Sequence[Chunk], verify_rows: int | None) -> list[int]:
        """Rows of every chunk. A limited number goes to the drafts that are most likely to be accepted."""
        if not self.slots.drafts.shape[1]:
            return [len(chunk.token_ids) for chunk in chunks]
        drafts = self.slots.drafts_for(chunks)
        rows = [chunk.num_rows if chunk.is_prefill else 1 + count for chunk, count in zip(chunks, drafts, strict=True)]
        decoding = [place for place, chunk in enumerate(chunks) if not chunk.is_prefill]
        if verify_rows is None or verify_rows >= sum(rows[place] for place in decoding):
            return rows
        survivals = []
        for place in decoding:
            confidence = self.slots.confidence[chunks[place].state_slot, : rows[place] - 1]
            survivals.append(confidence.cumprod().tolist())
        total = max(len(decoding), verify_rows)
        for place, count in zip(decoding, allocate_on_host(survivals, total), strict=True):
            rows[place] = count
        return rows

    # ---- a step whose results the host waits for -------------------------------------------------------------------

    @torch.inference_mode()
    def sample(self, step: Launched, states: Sequence[RowOwner | None], wants_drafts: bool = True) -> StepTokens:
        """Choose the tokens of a launched step and draft what may follow them.

        Args:
            states: owners, one per chunk that samples, in plan order; None for a sequence that has ended meanwhile:
                it gets nothing.
            wants_drafts: False leaves drafting out, so the next step of these sequences verifies nothing.
        """
        self._end = None
        sampling = Sampling.of(step, states)
        if sampling is None:
            return StepTokens({}, None, {})
        drafter = self.drafter if wants_drafts else None
        timer = self.runner.timer
        begin = timer.milliseconds("sample"), timer.milliseconds("draft")
        with timer.phase("sample"):
            distributions = None
            if self._verifier.needs_distributions and self.drafter is not None:
                distributions = self.drafter.stored_distributions(sampling.slots)
            unread = UnreadStep.of(self._verifier.verify(sampling, distributions=distributions))
        following = None
        if drafter is not None and _can_follow(drafter, sampling.owners):
            with timer.phase("draft"):
                following = UnreadDrafts.of(*_follow(drafter, sampling, unread.on_device))
        with timer.phase("sample"):
            verified = unread.wait()
            found = self._take_in(sampling.chunks, verified)
        survivals: dict[str, list[float]] = {}
        if drafter is not None:
            with timer.phase("draft"):
                alive = [place for place, chunk in enumerate(sampling.chunks) if not found[chunk.request_id].is_bad]
                if following is not None:
                    drafts, confidence = (each.numpy()[alive] for each in following.wait())
                else:
                    drafts, confidence = self._draft(drafter, sampling, alive, found)
                chunks = [sampling.chunks[place] for place in alive]
                self.slots.propose([chunk.state_slot for chunk in chunks], drafts, confidence)
                survivals = _survivals(chunks, confidence)
        self._jump_ahead(sampling, found)
        sample_ms, draft_ms = timer.milliseconds("sample") - begin[0], timer.milliseconds("draft") - begin[1]
        times = StepTimes(step.forward_ms + sample_ms, draft_ms, hides_host=False)
        return StepTokens(found, verified.rows, survivals, times)

    def _take_in(self, chunks: Sequence[Chunk], verified: Verified) -> dict[str, SequenceTokens]:
        """Host view of a verified step; the slots advance."""
        found = _sequence_tokens(chunks, verified, self.slots.confidence)
        for chunk in chunks:
            tokens = found[chunk.request_id]
            # A sequence with a bad row ends at the commit. A step that was planned ahead may still run rows of it:
            # they get a token that the model knows, and what they give is dropped.
            self.slots.advance(chunk, [*tokens.token_ids, 0] if tokens.is_bad else tokens.token_ids)
        return found

    def _draft(
        self, drafter: Drafter, sampling: Sampling, alive: Sequence[int], found: dict[str, SequenceTokens]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Draft behind tokens that the host has. Returns ids and confidence, both ``[alive, num_drafts]``."""
        if not alive:
            none = np.empty((0, drafter.num_drafts))
            return none, none
        chunks = [sampling.chunks[place] for place in alive]
        owners = [sampling.owners[place] for place in alive]
        where = [chunk.state_slot for chunk in chunks]
        proposed, confidence = drafter.propose(
            [owner.sampling for owner in owners],
            [owner.grammar for owner in owners],
            where,
            (self.slots.next_position[where] - 1).tolist(),
            [found[chunk.request_id].token_ids for chunk in chunks],
        )
        return proposed.cpu().numpy(), confidence.cpu().numpy()

    def _jump_ahead(self, sampling: Sampling, found: dict[str, SequenceTokens]) -> None:
        """Where a grammar allows one token only, take it as a draft that is sure to stand, drafted or not.

        A draft model under the grammar's masks proposes the same tokens; without one they cost no sampling at all.
        """
        most = self.slots.drafts.shape[1]
        for chunk, owner in zip(sampling.chunks, sampling.owners, strict=True):
            tokens = found[chunk.request_id]
            if owner.grammar is None or tokens.is_bad or not most:
                continue
            taken = [token for token in tokens.token_ids if owner.grammar.accept(token)]
            forced = owner.grammar.forced_tokens(most) if len(taken) == len(tokens.token_ids) else []
            owner.grammar.rollback(len(taken))
            self.slots.force(chunk.state_slot, forced)

    # ---- a chained step --------------------------------------------------------------------------------------------

    def can_chain(
        self, chunks: Sequence[Chunk], states: Sequence[RowOwner | None], verify_rows: int | None = None
    ) -> bool:
        """Whether a step may be sampled before the results of the step before it have been read.

        Its number of rows has to be known without them (every draft is verified), and so does everything that sampler
        and draft need: parameters that look at the output so far (penalties, grammars) do not qualify, nor do forced
        tokens where the host does not know positions, nor the stored distributions of the rejection verifier.

        Args:
            states: owners of the chunks that sample. verify_rows: as for :meth:`launch`.
        """
        if self.runner.device_tokens is None:
            return False
        owners = [owner for owner in states if owner is not None]
        if any(owner.grammar is not None or not owner.sampling.ignores_output for owner in owners):
            return False
        if self.drafter is None:
            return True
        if self._verifier.needs_distributions or any(owner.sampling.params.golden_token_ids for owner in owners):
            return False
        if verify_rows is not None:
            decoding = [chunk for chunk in chunks if not chunk.is_prefill]
            if verify_rows < len(decoding) + sum(self.slots.drafts_for(decoding)):
                return False  # which drafts are verified depends on their confidence
        return _can_follow(self.drafter, owners)

    @torch.inference_mode()
    def sample_unread(
        self, step: Launched, states: Sequence[RowOwner | None], wants_drafts: bool = True
    ) -> UnreadTokens | None:
        """Launch sampler and draft of a chained step. The next step may be launched at once; :meth:`read` waits.

        Args:
            states, wants_drafts: as for :meth:`sample`. Sequences of the step before it may turn out to have ended
                there: what their rows give is dropped by whoever commits.
        Returns:
            None if nothing is sampled.
        """
        after, self._end = self._end, None
        sampling, tokens = Sampling.of(step, states), self.runner.device_tokens
        if sampling is None:
            return None
        assert tokens is not None
        drafter, drafts = self.drafter if wants_drafts else None, None
        timer = self.runner.timer
        begin = timer.milliseconds("sample"), timer.milliseconds("draft")
        with timer.phase("sample"):
            verified, sampled = self._choose(sampling, tokens)
            unread = UnreadStep.of(verified)
        if drafter is not None:
            with timer.phase("draft"):
                following = _follow(drafter, sampling, verified, sampled)
                tokens.propose(_on_device(sampling.slots, sampling), following.token_ids)
                drafts = UnreadDrafts.of(*following)
        generations = self.slots.advance_unread(sampling.chunks, 0 if drafter is None else drafter.num_drafts)
        launched = timer.milliseconds("sample") - begin[0], timer.milliseconds("draft") - begin[1]
        found = UnreadTokens(
            sampling.chunks, generations, unread, drafts, after, step.forward_ms + launched[0], launched[1]
        )
        self._end = found.end
        return found

    def _choose(self, sampling: Sampling, tokens: DeviceTokens) -> tuple[Verified, SampledRows]:
        """Launch sampler and acceptance, and leave on the device where every sequence stands."""
        if self.sample_step is not None and self.sample_step.takes(sampling):
            found = self.sample_step.sample(sampling)
            if found is not None:
                return found
        sampled = self._verifier.sampled_rows(sampling, tokens)
        verified = self._verifier.verify(sampling, sampled)
        slots = _on_device(sampling.slots, sampling)
        tokens.advance(slots, verified, sampled.firsts, sampling.rows, sampling.step.result.ngram_ids)
        return verified, sampled

    def read(self, unread: UnreadTokens | None) -> StepTokens:
        """Wait for the results of a chained step."""
        if unread is None:
            return StepTokens({}, None, {})
        chunks, survivals = unread.chunks, dict[str, list[float]]()
        slots = [chunk.state_slot for chunk in chunks]
        timer = self.runner.timer
        with timer.phase("wait"):
            verified = unread.step.wait()
        with timer.phase("sample"):
            found = _sequence_tokens(chunks, verified, self.slots.confidence)
            emitted, bad = verified.token_ids.numpy().clip(0), verified.is_bad.numpy()
            is_own = self.slots.read(slots, unread.generations, emitted, verified.num_accepted.numpy())
        if unread.drafts is not None:
            with timer.phase("wait"):
                drafts, confidence = (each.numpy() for each in unread.drafts.wait())
            with timer.phase("draft"):
                self.slots.read_drafts(slots, is_own, ~bad, drafts, confidence)
                alive = np.flatnonzero(~bad)
                survivals = _survivals([chunks[place] for place in alive], confidence[alive])
        return StepTokens(found, verified.rows, survivals, unread.times())


def _on_device(slots: Sequence[int], sampling: Sampling) -> torch.Tensor:
    return kept_on_device(np.array(slots, dtype=np.int64), sampling.rows.device)


def _can_follow(drafter: Drafter, owners: Sequence[RowOwner]) -> bool:
    return drafter.can_follow([owner.sampling for owner in owners], [owner.grammar for owner in owners])


def _follow(
    drafter: Drafter, sampling: Sampling, verified: Verified, sampled: SampledRows | None = None
) -> FollowingDrafts:
    """Launch the draft right behind the verification, whose result the host has not seen."""
    owners = [owner.sampling for owner in sampling.owners]
    return drafter.follow(owners, sampling.slots, sampling.firsts, verified, sampled)


def _sequence_tokens(chunks: Sequence[Chunk], verified: Verified, confidence: np.ndarray) -> dict[str, SequenceTokens]:
    """What each chunk got. ``verified`` is on the host, ``confidence`` by slot of the drafts that it verified."""
    rates = confidence[[chunk.state_slot for chunk in chunks]].tolist()
    first_rows, bad = verified.first_row.tolist(), verified.is_bad.tolist()
    tokens, accepted = verified.token_ids.tolist(), verified.num_accepted.tolist()
    found = {}
    for place, chunk in enumerate(chunks):
        # Accepted drafts are good, so only the last token can be bad.
        emitted = tokens[place][: accepted[place] + (not bad[place])]
        num_drafts = 0 if chunk.is_prefill else chunk.num_sampled - 1
        found[chunk.request_id] = SequenceTokens(emitted, first_rows[place], num_drafts, rates[place], bad[place])
    return found


def _survivals(chunks: Sequence[Chunk], confidence: np.ndarray) -> dict[str, list[float]]:
    """Probability that each draft and all before it are accepted, by sequence."""
    survivals = confidence.astype(np.float64).cumprod(axis=1).tolist()
    return {chunk.request_id: values for chunk, values in zip(chunks, survivals, strict=True)}
