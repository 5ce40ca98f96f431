"""The engine: requests in, steps, outputs out. Single-threaded; one instance owns one model on one device."""

from __future__ import annotations

import itertools
import logging
import random
import time
from collections.abc import Collection
from collections.abc import Sequence as Items
from dataclasses import dataclass

from torch import Tensor

from deepinfer.config.engine import EngineConfig
from deepinfer.config.model import ModelConfig
from deepinfer.engine.output_builder import FINISH_ERROR, OutputBuilder, token_logprobs
from deepinfer.engine.outputs import RequestOutput, StreamDelta
from deepinfer.engine.prompt_scorer import score_prompts
from deepinfer.engine.request import Branch, Request
from deepinfer.engine.statistics import EngineStatistics
from deepinfer.errors import RequestError
from deepinfer.messages import Chunk, StepPlan
from deepinfer.observe.step_timer import StepTimer
from deepinfer.sampling.batch import SamplingBatchBuilder
from deepinfer.sampling.params import SamplingParams
from deepinfer.sampling.random import child_seed
from deepinfer.sampling.sampler import Sampler, SamplerOutput
from deepinfer.sampling.state import SamplingState
from deepinfer.scheduler.admission import PromptTooLongError
from deepinfer.scheduler.scheduler import Scheduler
from deepinfer.scheduler.sequence import FINISH_ABORT, Sequence
from deepinfer.tokenizer.tokenizer import Tokenizer
from deepinfer.worker.model_runner import ModelRunner

logger = logging.getLogger(__name__)

FINISH_PROMPT_TOO_LONG = "prompt_length_exceeded"


@dataclass(frozen=True, slots=True)
class InFlight:
    """A step that was launched: its plan and, unless it failed, the sampled tokens of its sampled rows."""

    plan: StepPlan
    chunks: tuple[Chunk, ...]
    """The chunks that sample, in the order of the sampler's rows."""
    sampled: SamplerOutput | None
    error: str | None = None


class Engine:
    """Runs requests through the model, a step at a time: ``schedule -> launch -> commit``.

    Args:
        tokenizer: None serves token ids only.
        runner: the model with its caches.
        scheduler: decides which rows run.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        tokenizer: Tokenizer | None,
        runner: ModelRunner,
        scheduler: Scheduler,
    ) -> None:
        self.config = config
        self.model_config = model_config
        self.tokenizer = tokenizer
        self.runner = runner
        self.scheduler = scheduler
        self.timer: StepTimer = runner.timer
        self.statistics = EngineStatistics(config.observe)
        vocab = model_config.text.vocab_size
        banned = [token for first, last in config.sampling.token_blacklist for token in range(first, last + 1)]
        self._sampler = Sampler(vocab, banned_ids=banned, device=runner.device)
        self._batches = SamplingBatchBuilder(vocab, device=runner.device)
        self._requests: dict[str, Request] = {}
        self._branches: dict[str, tuple[Request, Branch]] = {}
        self._scoring: dict[str, Request] = {}
        self._changed: dict[str, Request] = {}
        self._seeds = random.Random(config.seed)
        self._numbers = itertools.count()

    # ---- requests ------------------------------------------------------------------------------------------------

    def add_request(
        self,
        prompt_ids: Items[int],
        params: SamplingParams,
        *,
        prompt: str | None = None,
        request_id: str | None = None,
    ) -> str:
        """Queue a request and return its id.

        What can be said about a request on its own is said by an exception; a prompt that this engine can't hold
        becomes a finished request with its reason, like everything that goes wrong later.

        Args:
            prompt_ids: at least one id below the vocabulary size.
            prompt: its text, only echoed. request_id: default the next number.
        Raises:
            RequestError: empty prompt, an id out of range, parameters that don't fit the model, or an id in use.
        """
        ids = self.check_prompt_ids(prompt_ids, "prompt_token_ids")
        self.check_params(params)
        if request_id is None:
            request_id = next(name for name in map(str, self._numbers) if name not in self._requests)
        elif request_id in self._requests:
            raise RequestError("request_id", request_id, why="a live request has this id", fix="choose another id")
        request = Request(request_id, prompt, ids, params)
        self._make_branches(request)
        self._requests[request_id] = request
        try:
            for branch in request.branches:
                sequence = Sequence(request_id=branch.sequence_id, prompt_ids=ids, max_tokens=params.max_tokens)
                self.scheduler.add(sequence)
                self._branches[branch.sequence_id] = (request, branch)
        except PromptTooLongError as error:
            request.fail(str(error), FINISH_PROMPT_TOO_LONG)
            self._note_change(request)
        if request.prompt_logprobs is not None and not request.finished:
            self._scoring[request.branches[0].sequence_id] = request
        return request_id

    def check_prompt_ids(self, ids: Items[int], field: str) -> tuple[int, ...]:
        """``ids`` as plain integers.

        Raises:
            RequestError: none at all, or one that is no integer or out of range; names ``field`` or ``field[index]``.
        """
        vocab = self.model_config.text.vocab_size
        checked = []
        for index, token in enumerate(ids):
            try:
                value = token.__index__()
            except (AttributeError, TypeError):
                value = -1
            if isinstance(token, bool) or not 0 <= value < vocab:
                raise RequestError(
                    f"{field}[{index}]",
                    token,
                    why="there is no such token",
                    fix=f"token ids are integers from 0 to {vocab - 1}",
                )
            checked.append(value)
        if not checked:
            raise RequestError(field, [], why="a prompt holds at least one token", fix="send a token, for example BOS")
        return tuple(checked)

    def check_params(self, params: SamplingParams) -> None:
        """Raise RequestError if the parameters don't fit this model and engine."""
        params.validate_for(self.model_config.text.vocab_size)
        if params.stop and self.tokenizer is None:
            raise RequestError(
                "stop", params.stop, why="this engine has no tokenizer to find text with", fix="use stop_token_ids"
            )

    def _make_branches(self, request: Request) -> None:
        params = request.params
        seed = self._seeds.getrandbits(64) if params.seq_seed is None else params.seq_seed
        for index in range(params.n):
            builder = OutputBuilder(
                index,
                params,
                self.tokenizer,
                self.model_config.eos_token_id,
                len(request.prompt_ids),
                self.config.scheduler.max_model_len,
            )
            sampling = SamplingState(
                params,
                request.prompt_ids,
                vocab_size=self.model_config.text.vocab_size,
                eos_id=self.model_config.eos_token_id,
                seed=child_seed(seed, index),
            )
            name = request.request_id if params.n == 1 else f"{request.request_id}#{index}"
            request.branches.append(Branch(name, builder, sampling))

    def abort(self, request_id: str) -> bool:
        """End a request in whatever state it is; its outputs so far stay. Returns False if there is none."""
        request = self._requests.get(request_id)
        if request is None:
            return False
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
        return bool(self._requests) or self.scheduler.has_work()

    # ---- one step ------------------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Run one step. Returns the requests that changed, finished ones for the last time."""
        self.run_step()
        return self.take_changes()

    def run_step(self) -> None:
        """Run one step; its results wait in :meth:`take_changes` or :meth:`take_deltas`."""
        with self.timer.phase("schedule"):
            plan = self.scheduler.schedule()
        try:
            launched = self.launch(plan)
        except BaseException:
            self._abandon(plan)
            raise
        self.commit(launched)

    def _abandon(self, plan: StepPlan) -> None:
        """Close a step that was interrupted in the model: nobody knows which of its records were written."""
        for chunk in plan.chunks:
            found = self._branches.get(chunk.request_id)
            if found is not None:
                self._end_branch(*found, FINISH_ABORT)
        self.scheduler.commit(plan, {})

    def launch(self, plan: StepPlan) -> InFlight:
        """Run the model and the sampler on a plan. A failure is kept for :meth:`commit`; it ends this step only."""
        chunks = tuple(chunk for chunk in plan.chunks if chunk.num_sampled)
        if not plan.chunks:
            return InFlight(plan, (), None)
        try:
            result = self.runner.run(plan)
            with self.timer.phase("sample"):
                if self._scoring:
                    score_prompts(plan, result, self._scoring, self.tokenizer)
                sampled = self._sample(chunks, result.sample_logits()) if chunks else None
        except Exception as error:
            # Everything of this step fails, nothing else does: caches of other requests are in other blocks.
            logger.exception("step %d failed", plan.step_id)
            return InFlight(plan, chunks, None, f"step {plan.step_id} failed: {type(error).__name__}: {error}")
        return InFlight(plan, chunks, sampled)

    def _sample(self, chunks: tuple[Chunk, ...], logits: Tensor) -> SamplerOutput:
        states = [self._branches[chunk.request_id][1].sampling for chunk in chunks]
        batch = self._batches.build(states, [state.next_position for state in states])
        return self._sampler.sample(logits, batch).cpu()

    def commit(self, step: InFlight) -> None:
        """Hand the tokens of a step to their requests and to the scheduler, and end what is finished."""
        with self.timer.phase("commit"):
            if step.error is not None:
                for chunk in step.plan.chunks:
                    self._fail_sequence(chunk.request_id, step.error)
            tokens = self._good_tokens(step)
            grown = self.scheduler.commit(step.plan, tokens)
            row_of = {chunk.request_id: row for row, chunk in enumerate(step.chunks)}
            for sequence in grown:
                assert step.sampled is not None
                row = row_of[sequence.request_id]
                self._add_token(sequence, tokens[sequence.request_id][0], step.sampled, row)
            for sequence in self.scheduler.take_ended():
                request, branch = self._branches[sequence.request_id]
                request.error = request.error or sequence.error
                self._end_branch(request, branch, sequence.finish_reason or FINISH_ERROR)
            self.statistics.step(step.plan, self.scheduler)

    def _good_tokens(self, step: InFlight) -> dict[str, tuple[int]]:
        """Token per sequence; sequences whose row was bad are ended here."""
        if step.sampled is None:
            return {}
        ids, bad = step.sampled.token_ids.tolist(), step.sampled.is_bad.tolist()
        tokens: dict[str, tuple[int]] = {}
        for chunk, token, is_bad in zip(step.chunks, ids, bad, strict=True):
            if is_bad:
                self._fail_sequence(
                    chunk.request_id,
                    f"no token can be sampled at position {chunk.end}: the logits are not finite, or every token is "
                    "masked. Check logit_bias and allowed_token_ids; if they are not set, the model's output is NaN.",
                )
            else:
                tokens[chunk.request_id] = (token,)
        return tokens

    def _add_token(self, sequence: Sequence, token: int, sampled: SamplerOutput, row: int) -> None:
        request, branch = self._branches[sequence.request_id]
        entry = None
        if request.params.wants_logprobs:
            assert sampled.logprobs is not None
            assert sampled.ranks is not None
            alternatives = sampled.alternatives(row)
            entry = token_logprobs(
                token, float(sampled.logprobs[row]), int(sampled.ranks[row]), alternatives, self.tokenizer
            )
        if request.metrics.first_token_s is None:
            request.metrics.first_token_s = time.monotonic()
        branch.sampling.append((token,))
        branch.builder.output.num_preemptions = sequence.num_preemptions
        if branch.builder.add(token, entry):
            assert branch.builder.output.finish_reason is not None
            self._end_branch(request, branch, branch.builder.output.finish_reason)
        self._changed[request.request_id] = request

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

    def check(self) -> None:
        """Raise AssertionError if the engine and its scheduler contradict each other."""
        self.scheduler.check()
        for sequence_id, (request, branch) in self._branches.items():
            assert self.scheduler.get(sequence_id) is not None, f"{sequence_id} is unknown to the scheduler"
            assert not branch.builder.output.finished, f"{sequence_id} is finished but not let go"
            assert self._requests[request.request_id] is request, f"{sequence_id} belongs to a forgotten request"
            branch.sampling.check()
        if not self._requests:
            assert not self.scheduler.has_work(), "the scheduler holds sequences of no request"
