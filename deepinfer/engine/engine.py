"""The engine: requests in, steps, outputs out. Single-threaded; one instance owns one model on one device."""

from __future__ import annotations

import itertools
import logging
import random
import time
from collections.abc import Collection
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace

from deepinfer.config.engine import EngineConfig
from deepinfer.config.model import ModelConfig
from deepinfer.engine.grammars import Grammars, compiler_limits
from deepinfer.engine.intake import check_prompt_ids, make_branches
from deepinfer.engine.output_builder import FINISH_ERROR, token_logprobs
from deepinfer.engine.outputs import RequestOutput, StreamDelta, TokenLogprobs
from deepinfer.engine.prefix_setup import prefix_state, refuse_truncated_logprobs
from deepinfer.engine.prompt_scorer import score_prompts
from deepinfer.engine.request import Branch, Request
from deepinfer.engine.speculation_setup import confidence_log
from deepinfer.engine.statistics import EngineStatistics
from deepinfer.engine.verification_planner import VerificationPlanner
from deepinfer.errors import EngineError, RequestError
from deepinfer.messages import StepPlan
from deepinfer.observe.step_timer import StepTimer
from deepinfer.sampling.params import SamplingParams
from deepinfer.sampling.sampler import SamplerOutput
from deepinfer.scheduler.admission import PromptTooLongError
from deepinfer.scheduler.scheduler import Scheduler
from deepinfer.scheduler.sequence import FINISH_ABORT, Sequence
from deepinfer.structured.spec import StructuredSpec
from deepinfer.tokenizer.tokenizer import Tokenizer
from deepinfer.tokenizer.valid_text import require_text
from deepinfer.worker.step_results import Launched, RowOwner, SequenceTokens, StepTokens
from deepinfer.worker.unread import UnreadTokens
from deepinfer.worker.worker import Worker

logger = logging.getLogger(__name__)

FINISH_PROMPT_TOO_LONG = "prompt_length_exceeded"
_GRAMMAR_WAIT_S = 0.05
"""Longest sleep of a step that has nothing to do but wait for a grammar."""


@dataclass(frozen=True, slots=True)
class InFlight:
    """A step between launch and commit."""

    plan: StepPlan
    """As the scheduler made it."""
    launched: Launched | None = None
    """The forward; None if the step failed."""
    tokens: StepTokens | None = None
    """What was sampled; None before sampling, or if the step failed."""
    is_chained: bool = False
    """Sampled on the device; ``unread`` says where the tokens arrive."""
    unread: UnreadTokens | None = None
    error: str | None = None


class Engine:
    """Runs requests through the model, a step at a time: ``schedule -> launch -> commit``.

    Args:
        tokenizer: None serves token ids only.
        worker: model, caches, sampler and draft.
        scheduler: decides which rows run.
        planner: limits verification to what is worthwhile; None verifies every draft.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        tokenizer: Tokenizer | None,
        worker: Worker,
        scheduler: Scheduler,
        planner: VerificationPlanner | None = None,
    ) -> None:
        self.config = config
        self.model_config = model_config
        self.tokenizer = tokenizer
        self.worker = worker
        self.runner = worker.runner
        self.scheduler = scheduler
        self.planner = planner
        self.timer: StepTimer = worker.runner.timer
        self.statistics = EngineStatistics(config.observe, config.speculation.num_tokens, confidence_log(config))
        self._previous: InFlight | None = None
        self._is_closed = False
        self._grammars = Grammars(tokenizer, compiler_limits(config.structured), 2 + 2 * config.speculation.num_tokens)
        self._requests: dict[str, Request] = {}
        self._branches: dict[str, tuple[Request, Branch]] = {}
        self._scoring: dict[str, Request] = {}
        self._changed: dict[str, Request] = {}
        self._seeds = random.Random(config.seed)
        self._numbers = itertools.count()
        self._serials = itertools.count()

    # ---- requests ------------------------------------------------------------------------------------------------

    def add_request(
        self,
        prompt_ids: Items[int],
        params: SamplingParams,
        *,
        prompt: str | None = None,
        request_id: str | None = None,
        cache_salt: str = "",
    ) -> str:
        """Queue a request and return its id.

        What can be said about a request on its own is said by an exception; a prompt that this engine can't hold
        becomes a finished request with its reason, like everything that goes wrong later.

        Args:
            prompt_ids: at least one id below the vocabulary size.
            prompt: its text, only echoed. request_id: default the next number.
            cache_salt: cached prefixes are shared among requests with the same salt only, such as those of a tenant.
        Raises:
            RequestError: empty prompt, an id out of range, parameters that don't fit the model, or an id in use.
        """
        self._require_open()
        ids = check_prompt_ids(prompt_ids, "prompt_token_ids", self.model_config.text.vocab_size)
        spec = self.check_params(params)
        if request_id is None:
            request_id = next(name for name in map(str, self._numbers) if name not in self._requests)
        elif request_id in self._requests:
            raise RequestError("request_id", request_id, why="a live request has this id", fix="choose another id")
        request = Request(request_id, prompt, ids, params, cache_salt=require_text(cache_salt, "cache_salt"))
        if spec is not None:
            self._grammars.submit(request_id, spec, ids)
        # Drawn only now: a request that is refused must not change the seeds of those after it.
        seed = self._seeds.getrandbits(64) if params.seq_seed is None else params.seq_seed
        make_branches(request, seed, self._serials, self.config, self.model_config, self.tokenizer)
        self._requests[request_id] = request
        if spec is None:
            self._enqueue(request)
        return request_id

    def _enqueue(self, request: Request) -> None:
        """Hand a request's outputs to the scheduler."""
        params = request.params
        try:
            for branch in request.branches:
                sequence = Sequence(
                    request_id=branch.sequence_id,
                    prompt_ids=request.prompt_ids,
                    max_tokens=params.max_tokens,
                    prefix=prefix_state(params, request.cache_salt),
                )
                self.scheduler.add(sequence)
                self._branches[branch.sequence_id] = (request, branch)
        except PromptTooLongError as error:
            request.fail(str(error), FINISH_PROMPT_TOO_LONG)
            self._note_change(request)
        if request.prompt_logprobs is not None and not request.finished:
            self._scoring[request.branches[0].sequence_id] = request

    def _admit_compiled(self) -> None:
        """Queue the requests whose grammar is ready; end those whose grammar failed."""
        if not self._grammars.num_waiting:
            return
        if not self.scheduler.has_work() and self._previous is None:
            self._grammars.wait(_GRAMMAR_WAIT_S)
        for done in self._grammars.poll({name: len(request.branches) for name, request in self._requests.items()}):
            request = self._requests[done.request_id]
            if done.failure is not None:
                request.fail(done.failure.message, done.failure.kind)
                self._note_change(request)
                continue
            for branch, matcher in zip(request.branches, done.matchers, strict=True):
                branch.grammar = matcher
            self._enqueue(request)

    def check_params(self, params: SamplingParams) -> StructuredSpec | None:
        """The grammar that a request asks for, if any. Raises RequestError if its parameters don't fit this engine."""
        params.validate_for(self.model_config.text.vocab_size, supports_structured_output=True)
        if params.stop and self.tokenizer is None:
            raise RequestError(
                "stop", params.stop, why="this engine has no tokenizer to find text with", fix="use stop_token_ids"
            )
        refuse_truncated_logprobs(params, self.config.prefill)
        return self._grammars.check(params)

    def abort(self, request_id: str) -> bool:
        """End a request in whatever state it is; its outputs so far stay. Returns False if there is none."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        self._grammars.cancel(request_id)
        for branch in request.branches:
            self._end_branch(request, branch, FINISH_ABORT)
        return True

    def get(self, request_id: str) -> RequestOutput | None:
        """A live request as it is now."""
        request = self._requests.get(request_id)
        return None if request is None else request.to_output(self.config.numerics)

    def is_finished(self, request_id: str) -> bool:
        """Whether a request has ended (and will be reported for the last time)."""
        request = self._requests.get(request_id)
        return request is None or request.finished

    def has_work(self) -> bool:
        """Whether :meth:`step` has something to do or to report."""
        return bool(self._requests) or self.scheduler.has_work() or self._previous is not None

    # ---- one step ------------------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Run one step. Returns the requests that changed, finished ones for the last time."""
        self.run_step()
        return self.take_changes()

    def run_step(self) -> None:
        """Run one step; its results wait in :meth:`take_changes` or :meth:`take_deltas`.

        With asynchronous scheduling a step is planned and launched before the step before it is committed, so results
        come one step later; the order of the calls is otherwise the same. A chained step is sampled before that, too,
        and its tokens are read when the step behind it runs: then the device never waits for the host.
        """
        self._require_open()
        self._admit_compiled()
        with self.timer.phase("schedule"):
            plan = self.scheduler.schedule()
            verify_rows = self.planner.total_rows(plan) if self.planner is not None else None
        self._take_ended()
        previous, self._previous = self._previous, None
        try:
            owners = self._chained_owners(plan, verify_rows)
            if previous is not None and previous.is_chained and owners is None:
                done, previous = previous, None
                self.commit(done)  # this plan has to know its tokens
            step = self.launch(plan, verify_rows) if plan.chunks else None
            if step is not None and owners is not None:
                step = self.sample_chained(step, owners)
            if previous is not None:
                done, previous = previous, None
                self.commit(done)
            if step is not None and owners is None:
                step = self.sample(step)
        except BaseException:
            try:
                if previous is not None:
                    self.commit(previous)
            finally:
                self._abandon(plan)
            raise
        if step is None:
            return
        if self.config.scheduler.pipeline_depth > 1 and step.error is None:
            self._previous = step
        else:
            self.commit(step)  # a failed one at once: nobody knows where its sequences stand, so no step may run them

    def drain(self) -> None:
        """Once nobody waits for anything, close the step that was launched ahead, so that its memory comes back."""
        if self._previous is not None and not self._branches:
            step, self._previous = self._previous, None
            self.commit(step)

    def _abandon(self, plan: StepPlan) -> None:
        """Close a step that was interrupted in the model: nobody knows which of its records were written."""
        for chunk in plan.chunks:
            found = self._branches.get(chunk.request_id)
            if found is not None:
                self._end_branch(*found, FINISH_ABORT)
        self.scheduler.commit(plan, {})

    def launch(self, plan: StepPlan, verify_rows: int | None = None) -> InFlight:
        """Start the forward of a plan. A failure is kept for :meth:`commit`; it ends the requests of this step only.

        Args:
            verify_rows: rows that decoding sequences share for verification; None: all that the plan has.
        """
        try:
            return InFlight(plan, self.worker.launch(plan, verify_rows))
        except Exception as error:
            return self._failed(plan, error)

    def _owners(self, plan: StepPlan) -> list[RowOwner | None]:
        """Who the chunks that sample belong to; None where that has ended."""
        owners = [self._branches.get(chunk.request_id) for chunk in plan.chunks if chunk.num_sampled]
        return [None if owner is None else RowOwner(owner[1].sampling, owner[1].grammar) for owner in owners]

    def _chained_owners(self, plan: StepPlan, verify_rows: int | None) -> list[RowOwner | None] | None:
        """:meth:`_owners` if this step can be sampled before the one before it has been read; None if not."""
        if self.config.scheduler.pipeline_depth == 1 or not plan.chunks:
            return None
        if self._scoring and any(chunk.is_prefill and chunk.request_id in self._scoring for chunk in plan.chunks):
            return None
        owners = self._owners(plan)
        return owners if self.worker.can_chain(plan.chunks, owners, verify_rows) else None

    def sample_chained(self, step: InFlight, owners: Items[RowOwner | None]) -> InFlight:
        """Launch sampler and draft of a chained step; what they give is read by :meth:`commit`."""
        if step.launched is None:
            return step
        try:
            unread = self.worker.sample_unread(step.launched, owners, self._wants_drafts(step.plan))
            return replace(step, is_chained=True, unread=unread)
        except Exception as error:
            return self._failed(step.plan, error)

    def sample(self, step: InFlight) -> InFlight:
        """Choose the tokens of a launched step. The steps before it are committed, so every state is exact."""
        if step.launched is None:
            return step
        states, wants_drafts = self._owners(step.plan), self._wants_drafts(step.plan)
        try:
            if self._scoring:
                with self.timer.phase("sample"):
                    score_prompts(step.launched.plan, step.launched.result, self._scoring, self.tokenizer)
            return replace(step, tokens=self.worker.sample(step.launched, states, wants_drafts))
        except Exception as error:
            return self._failed(step.plan, error)

    def _wants_drafts(self, plan: StepPlan) -> bool:
        """Whether a step that is about to be sampled shall draft. Ask once."""
        chunks = [chunk for chunk in plan.chunks if chunk.num_sampled]
        return self.planner is None or self.planner.wants_drafts(chunks, self._branches)

    def _read(self, step: InFlight) -> InFlight:
        """Wait for the tokens of a chained step. Whoever interrupts that ends the requests of the step."""
        try:
            return replace(step, tokens=self.worker.read(step.unread), is_chained=False, unread=None)
        except Exception as error:
            return self._failed(step.plan, error)
        except BaseException:
            self._abandon(step.plan)
            raise

    def _failed(self, plan: StepPlan, error: Exception) -> InFlight:
        # Everything of this step fails, nothing else does: caches of other requests are in other blocks.
        logger.exception("step %d failed", plan.step_id)
        return InFlight(plan, error=f"step {plan.step_id} failed: {type(error).__name__}: {error}")

    def commit(self, step: InFlight) -> None:
        """Hand the tokens of a step to their requests and to the scheduler, and end what is finished."""
        if step.is_chained:
            step = self._read(step)
        with self.timer.phase("commit"):
            if step.error is not None:
                for chunk in step.plan.chunks:
                    self._fail_sequence(chunk.request_id, step.error)
            found = self._good_tokens(step)
            grown = self.scheduler.commit(step.plan, {name: each.token_ids for name, each in found.items()})
            for sequence in grown:
                assert step.tokens is not None
                assert step.tokens.report is not None
                self._add_tokens(sequence, found[sequence.request_id], step.tokens.report)
            if self.planner is not None and step.tokens is not None and step.launched is not None:
                self.planner.committed(step.launched, step.tokens, self._branches)
            self.statistics.step(step.plan, self.scheduler)

    def _take_ended(self) -> None:
        """Report sequences that the scheduler ended on its own: they fill all memory, or went on past a limit."""
        for sequence in self.scheduler.take_ended():
            request, branch = self._branches[sequence.request_id]
            request.error = request.error or sequence.error
            self._end_branch(request, branch, sequence.finish_reason or FINISH_ERROR)

    def _good_tokens(self, step: InFlight) -> dict[str, SequenceTokens]:
        """Tokens per sequence; sequences with a bad row are ended here."""
        if step.tokens is None:
            return {}
        good = {}
        for name, found in step.tokens.by_sequence.items():
            if found.token_ids:
                good[name] = found
            elif found.is_bad:
                self._fail_bad_row(name)
        return good

    def _fail_bad_row(self, sequence_id: str) -> None:
        """End a sequence whose next token has no distribution. Nothing happens if it has ended before that token."""
        if sequence_id in self._branches:
            position = self._branches[sequence_id][1].sampling.next_position
            self._fail_sequence(
                sequence_id,
                f"no token can be sampled at position {position}: every token is masked, or the logits are not finite. "
                "Check allowed_token_ids, logit_bias, token_blacklist and repetition_penalty, and whether a grammar is "
                "complete before min_tokens or first_n_token_no_eos allow the end; if none of them is set, the model's "
                "output is NaN.",
            )

    def _add_tokens(self, sequence: Sequence, found: SequenceTokens, report: SamplerOutput) -> None:
        """Add a sequence's tokens up to the one that ends it; those behind are dropped."""
        request, branch = self._branches[sequence.request_id]
        output = branch.builder.output
        if request.metrics.first_token_s is None:
            request.metrics.first_token_s = time.monotonic()
            request.num_cached_tokens = sequence.prefix.num_cached or 0
        output.num_preemptions = sequence.num_preemptions
        num_added, is_over = 0, False
        for row, token in enumerate(found.token_ids, start=found.first_row):
            entry = self._logprobs_of(request, report, row, token) if request.params.wants_logprobs else None
            if branch.grammar is not None and not branch.grammar.accept(token):
                self._fail_sequence(
                    sequence.request_id, f"token {token} was sampled, and the grammar does not allow it"
                )
                return
            branch.sampling.append((token,))
            num_added += 1
            is_over = branch.builder.add(token, entry)
            if is_over:
                break
        num_accepted = min(num_added, found.num_accepted)
        output.num_steps += 1
        output.num_drafts_verified += found.num_drafts
        output.num_drafts_accepted += num_accepted
        self.statistics.verified(num_accepted, found, num_added if is_over else None)
        if output.finish_reason is not None:
            request.error = request.error or branch.builder.cut_short
            self._end_branch(request, branch, output.finish_reason)
        elif found.is_bad:
            self._fail_bad_row(sequence.request_id)
        self._changed[request.request_id] = request

    def _logprobs_of(self, request: Request, report: SamplerOutput, row: int, token: int) -> TokenLogprobs:
        assert report.logprobs is not None
        assert report.ranks is not None
        alternatives = report.alternatives(row)
        return token_logprobs(token, float(report.logprobs[row]), int(report.ranks[row]), alternatives, self.tokenizer)

    def _fail_sequence(self, sequence_id: str, error: str) -> None:
        found = self._branches.get(sequence_id)
        if found is not None:
            request, branch = found
            request.error = request.error or error
            self._end_branch(request, branch, FINISH_ERROR)

    def _end_branch(self, request: Request, branch: Branch, reason: str) -> None:
        """Give back what the branch holds; the request leaves the engine with its last branch."""
        branch.builder.finish(reason)
        if self._branches.pop(branch.sequence_id, None) is not None:
            self.scheduler.finish(branch.sequence_id, reason)
            self._scoring.pop(branch.sequence_id, None)
            if self.planner is not None:
                self.planner.forget(branch.sequence_id)
        self._note_change(request)

    def _note_change(self, request: Request) -> None:
        self._changed[request.request_id] = request
        if request.finished and request.metrics.finished_s is None:
            request.metrics.finished_s = time.monotonic()
            self.statistics.finished(request)

    def take_changes(self, only: Collection[str] | None = None) -> list[RequestOutput]:
        """Requests that changed since the last call; finished ones are forgotten by the engine with it.

        Args:
            only: ids of the requests that the caller waits for; changes of others wait for their own caller.
        """
        return [request.to_output(self.config.numerics) for request in self._take_changed(only)]

    def take_finished(self, only: Collection[str]) -> list[RequestOutput]:
        """As :meth:`take_changes`, for a caller that only wants to hear of the end of its requests."""
        ended = [name for name, request in self._changed.items() if name in only and request.finished]
        return self.take_changes(ended)

    def take_deltas(self, only: Collection[str] | None = None) -> list[StreamDelta]:
        """As :meth:`take_changes`, but only what was added, one entry per output that changed."""
        deltas = []
        for request in self._take_changed(only):
            for branch in request.branches:
                delta = branch.builder.take_delta(request.request_id, request.error)
                if delta.token_ids or delta.text or delta.finish_reason is not None:
                    deltas.append(delta)
        return deltas

    def _take_changed(self, only: Collection[str] | None) -> list[Request]:
        names = [name for name in self._changed if only is None or name in only]
        changed = [self._changed.pop(name) for name in names]
        for request in changed:
            if request.finished:
                self._requests.pop(request.request_id, None)
        return changed

    def _require_open(self) -> None:
        if self._is_closed:
            raise EngineError("this engine is closed", why="its memory was given back", fix="make a new one")

    def close(self) -> None:
        """End the processes and threads of structured output. Requests that still run are never finished."""
        self._is_closed = True
        self._grammars.close()
        self.worker.close()
        self.statistics.close()

    def check(self) -> None:
        """Raise AssertionError if the engine and its scheduler contradict each other."""
        self.scheduler.check()
        for sequence_id, (request, branch) in self._branches.items():
            assert self.scheduler.get(sequence_id) is not None, f"{sequence_id} is unknown to the scheduler"
            assert not branch.builder.output.finished, f"{sequence_id} is finished but not let go"
            assert self._requests[request.request_id] is request, f"{sequence_id} belongs to a forgotten request"
            branch.sampling.check()
        if not self._requests and self._previous is None:
            assert not self.scheduler.has_work(), "the scheduler holds sequences of no request"
