"""``LLM``: the offline door. Load a checkpoint, generate, chat, stream.

The engine runs inside the calls of this class. Threads take turns: a second call to ``generate`` waits for the first.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from tqdm import tqdm

from deepinfer.config.env import read_environment
from deepinfer.config.resolve import Reason, resolve
from deepinfer.engine.engine import Engine
from deepinfer.engine.factory import build_engine
from deepinfer.engine.output_builder import FINISH_ERROR
from deepinfer.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput, StreamDelta
from deepinfer.entrypoints.collector import lasting_objects_spared
from deepinfer.entrypoints.inputs import (
    ParamsArgument,
    PreparedPrompt,
    Prompt,
    as_list,
    params_per_prompt,
    prepare_prompt,
)
from deepinfer.entrypoints.interrupts import interrupt_after
from deepinfer.entrypoints.turns import Turn
from deepinfer.errors import EngineError, RequestError
from deepinfer.sampling.params import SamplingParams
from deepinfer.tokenizer.chat import encode_chat
from deepinfer.tokenizer.tokenizer import Tokenizer

Conversation = Sequence[Mapping[str, Any]]
logger = logging.getLogger(__name__)

CHAT_OPTIONS = (
    "thinking",
    "reasoning_effort",
    "tools",
    "tool_choice",
    "add_generation_prompt",
    "continue_final_message",
)
"""Keywords of :meth:`LLM.chat` besides the parameters; see :func:`deepinfer.tokenizer.chat.encode_chat`."""


class GenerationInterrupted(KeyboardInterrupt):
    """Ctrl-C during ``generate``. ``outputs`` holds what was generated, in input order; unfinished ones say abort."""

    def __init__(self, outputs: list[RequestOutput]) -> None:
        super().__init__("generation was interrupted")
        self.outputs = outputs


class LLM:
    """A model ready to generate.

    Args:
        model: checkpoint directory in the released format.
        ops: pins of operator implementations, such as ``"all=reference"``.
        progress: show progress bars while loading.
        engine_args: every option of docs/configuration.md by name: ``numerics``, ``device``, ``seed``,
            ``max_model_len``, ``max_num_seqs``, ``max_num_batched_tokens``, ``num_blocks``, ``load_format``, ...
    Raises:
        ConfigError, CheckpointError, CheckpointFileError, CapacityError: see their messages.
    """

    def __init__(
        self, model: str | Path | None = None, *, ops: str = "", progress: bool = True, **engine_args: Any
    ) -> None:
        config, reasons = resolve({"model": model, **engine_args}, read_environment())
        engine, more = build_engine(config, ops_pins=ops, progress=progress)
        self._engine: Engine | None = engine
        self._turn = Turn()
        self.reasons: tuple[Reason, ...] = (*reasons, *more)
        """Why each option that was left open has its value."""

    @property
    def engine(self) -> Engine:
        """The engine underneath. Raises EngineError after :meth:`close`."""
        if self._engine is None:
            raise EngineError("this LLM is closed", why="close() gave its memory back", fix="make a new LLM")
        return self._engine

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises EngineError if the model directory has none (dummy weights only)."""
        if self.engine.tokenizer is None:
            raise EngineError("there is no tokenizer", why="the model directory has none", fix="use token ids")
        return self.engine.tokenizer

    def close(self) -> None:
        """Give back the memory and end the processes of structured output. Safe to call twice."""
        with self._turn:
            if self._engine is not None:
                self._engine.close()
            self._engine = None

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- generate ------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        sampling_params: ParamsArgument = None,
        prompt_token_ids: Sequence[Sequence[int]] | None = None,
        use_tqdm: bool = True,
        multi_modal_data: object = None,
    ) -> list[RequestOutput]:
        """Complete prompts.

        Args:
            prompts: a text or a list of texts; ``{"prompt": ..., "prompt_token_ids": ...}`` and lists of ids work too.
            sampling_params: one for all, one per prompt, dicts of the same names, or None for the defaults.
            prompt_token_ids: ids instead of, or beside, the texts; then the texts are only echoed.
            use_tqdm: show progress with tokens per second in and out.
            multi_modal_data: must be None: images are not supported yet.
        Returns:
            one result per prompt, in the order of the prompts, whatever became of it: ``finish_reason`` and ``error``
            say so. Repeated calls on one ``LLM`` continue the engine's random numbers; ``seq_seed`` fixes them.
        Raises:
            RequestError: a mistake that can be seen beforehand; then nothing of the call was queued.
        """
        _refuse_images(multi_modal_data)
        given = as_list(prompts, prompt_token_ids)
        engine = self.engine
        vocab = engine.model_config.text.vocab_size
        prepared = [prepare_prompt(prompt, index, engine.tokenizer, vocab) for index, prompt in enumerate(given)]
        return self._run(prepared, self._params(sampling_params, len(prepared)), use_tqdm)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: ParamsArgument = None,
        use_tqdm: bool = True,
        **chat_options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them.

        Args:
            messages: dicts with ``role`` and ``content``, or a list of such lists.
            chat_options: ``thinking`` (here off by default), ``reasoning_effort`` (only beside ``thinking``: without it
                nothing would have the effort), ``tools``, ``tool_choice``, ``add_generation_prompt``,
                ``continue_final_message``; see :func:`deepinfer.tokenizer.chat.encode_chat`.
        Returns, Raises:
            as :meth:`generate`.
        """
        if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
            raise RequestError(
                "messages",
                messages,
                why=f"it is a {type(messages).__name__}, not a list of messages",
                fix='pass [{"role": "user", "content": ...}]',
            )
        conversations = [messages] if not messages or isinstance(messages[0], Mapping) else list(messages)
        prepared = [self.encode_conversation(each, **chat_options) for each in conversations]  # type: ignore[arg-type]
        return self._run(prepared, self._params(sampling_params, len(prepared)), use_tqdm)

    def encode_conversation(self, messages: Conversation, **chat_options: Any) -> PreparedPrompt:
        """The prompt of a conversation; see :meth:`chat`."""
        tokenizer = self.get_tokenizer()
        for name in chat_options:
            if name not in CHAT_OPTIONS:
                known = ", ".join(CHAT_OPTIONS)
                raise RequestError(name, chat_options[name], why="there is no such chat option", fix=f"known: {known}")
        effort = chat_options.get("reasoning_effort")
        if chat_options.get("thinking") is None and effort not in (None, "none"):
            logger.warning(
                "reasoning_effort=%r does nothing: thinking is off here unless it is asked for; add thinking=True, or "
                "thinking=False if the effort may go unused",
                effort,
            )
        ids = encode_chat(messages, tokenizer=tokenizer, **{"thinking": False, **chat_options})
        if tokenizer.image_token_id in ids:
            raise RequestError("messages", "an image part", why="images are not supported yet", fix="send text only")
        return PreparedPrompt(tokenizer.decode(ids), ids)

    def stream(
        self, prompt: Prompt | PreparedPrompt, sampling_params: SamplingParams | Mapping[str, Any] | None = None
    ) -> Iterator[StreamDelta]:
        """Generate from one prompt, yielding what each step adds.

        Closing the iterator (leaving the loop) aborts the request. Joined texts equal the text of :meth:`generate`.

        Raises:
            RequestError: at the call, not at the first item.
        """
        engine = self.engine
        if not isinstance(prompt, PreparedPrompt):
            prompt = prepare_prompt(prompt, 0, engine.tokenizer, engine.model_config.text.vocab_size)
        if prompt.error is not None:
            raise prompt.error
        params = self._params(sampling_params, 1)[0]
        return _stream(engine, self._turn, prompt, params)

    def _params(self, given: ParamsArgument, count: int) -> list[SamplingParams]:
        sampling = self.engine.config.sampling
        default = SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=sampling.max_tokens,
        )
        params = params_per_prompt(given, count, default)
        for each in {id(one): one for one in params}.values():  # usually one object for many prompts
            self.engine.check_params(each)
        return params

    def _run(self, prompts: list[PreparedPrompt], params: list[SamplingParams], use_tqdm: bool) -> list[RequestOutput]:
        with self._turn, lasting_objects_spared():
            engine = self.engine
            results: dict[int, RequestOutput] = {}
            index_of: dict[str, int] = {}

            def collect() -> list[RequestOutput]:
                done = engine.take_finished(index_of)
                results.update({index_of[output.request_id]: output for output in done})
                return done

            bar = _Progress(len(prompts), use_tqdm)
            try:
                for index, (prompt, each) in enumerate(zip(prompts, params, strict=True)):
                    if prompt.error is None:
                        index_of[engine.add_request(prompt.ids, each, prompt=prompt.text)] = index
                    else:
                        results[index] = _refused(prompt, index, engine.config.numerics)
                bar.update(list(results.values()))
                while len(results) < len(prompts):
                    with interrupt_after():
                        engine.run_step()
                    self._turn.run_errands()
                    bar.update(collect())
            except BaseException as error:
                # Whatever went wrong, the engine must not go on with requests that nobody waits for.
                for request_id in index_of:
                    engine.abort(request_id)
                collect()
                if isinstance(error, KeyboardInterrupt):
                    raise GenerationInterrupted([results[index] for index in sorted(results)]) from None
                raise
            finally:
                bar.close()
                engine.drain()
            return [results[index] for index in range(len(prompts))]


def _stream(engine: Engine, turn: Turn, prompt: PreparedPrompt, params: SamplingParams) -> Iterator[StreamDelta]:
    # Queued here, at the first item: a stream that nobody starts would never be closed either.
    with turn:
        request_id = engine.add_request(prompt.ids, params, prompt=prompt.text)
    mine = (request_id,)
    try:
        is_finished = False
        while not is_finished:
            with turn:
                deltas = list(engine.take_deltas(mine))  # of steps that somebody else ran
                if not deltas and not engine.is_finished(request_id):
                    with interrupt_after():
                        engine.run_step()
                    deltas = list(engine.take_deltas(mine))
                is_finished = engine.is_finished(request_id)
            yield from deltas
    finally:
        turn.leave(functools.partial(_abandon, engine, request_id))


def _abandon(engine: Engine, request_id: str) -> None:
    """End a request whose stream was closed, if it has not ended."""
    if engine.abort(request_id):
        engine.take_changes((request_id,))
    engine.drain()


def _refuse_images(data: object) -> None:
    if data is not None:
        raise RequestError("multi_modal_data", data, why="images are not supported yet", fix="send text only")


def _refused(prompt: PreparedPrompt, index: int, numerics: str) -> RequestOutput:
    """The result of a prompt that was never queued."""
    now = time.monotonic()
    return RequestOutput(
        request_id=f"refused-{index}",
        prompt=prompt.text,
        prompt_token_ids=list(prompt.ids),
        outputs=[CompletionOutput(0, finish_reason=FINISH_ERROR)],
        metrics=RequestMetrics(now, None, now),
        error=str(prompt.error),
        numerics=numerics,
    )


class _Progress:
    """Progress bar over prompts, with tokens per second in and out."""

    def __init__(self, total: int, show: bool) -> None:
        self._bar = tqdm(total=total, desc="prompts", disable=not show, unit="prompt")
        self._begin = time.perf_counter()
        self._num_in = self._num_out = 0

    def update(self, finished: list[RequestOutput]) -> None:
        for output in finished:
            self._num_in += len(output.prompt_token_ids)
            self._num_out += sum(len(each.token_ids) for each in output.outputs)
            elapsed_s = max(time.perf_counter() - self._begin, 1e-9)
            self._bar.set_postfix_str(
                f"in {self._num_in / elapsed_s:.0f} tok/s, out {self._num_out / elapsed_s:.0f} tok/s", refresh=False
            )
            self._bar.update()

    def close(self) -> None:
        self._bar.close()
