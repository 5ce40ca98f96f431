"""Structured output inside the engine: which grammar a request wants, compiling it, and its matchers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deepinfer.config.engine import StructuredConfig
from deepinfer.errors import RequestError
from deepinfer.sampling.param_checks import check_below_vocab
from deepinfer.sampling.params import SamplingParams
from deepinfer.structured.compiler import CompilerLimits, GrammarCompiler, Ticket
from deepinfer.structured.failures import GrammarFailure
from deepinfer.structured.matcher import GrammarMatcher
from deepinfer.structured.spec import StructuredSpec, from_so_args
from deepinfer.structured.start_rule import StartRule, start_rule
from deepinfer.structured.vocabulary import Vocabulary
from deepinfer.tokenizer.tokenizer import Tokenizer


def compiler_limits(config: StructuredConfig) -> CompilerLimits:
    """What compiling may cost, as configured."""
    return CompilerLimits(
        timeout_s=config.timeout_s,
        num_workers=config.num_workers,
        cache_bytes=config.cache_bytes,
        uses_cache=config.uses_cache,
    )


def spec_of(params: SamplingParams) -> StructuredSpec | None:
    """What a request's output has to look like; None if anything goes.

    Raises:
        RequestError: both ways of saying it are used, or the description is refused.
    """
    if params.structured is not None and params.so_args is not None:
        raise RequestError(
            "structured", params.structured, why="so_args is given too, and one output has one grammar", fix="drop one"
        )
    if params.so_args is not None:
        return from_so_args(params.so_args)
    if params.structured is None or isinstance(params.structured, StructuredSpec):
        return params.structured
    raise RequestError(
        "structured", params.structured, why="it is no description", fix="use JsonSchema, Regex, Ebnf or Choice"
    )


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request whose grammar is being compiled."""

    request_id: str
    ticket: Ticket
    start: StartRule


@dataclass(frozen=True, slots=True)
class Compiled:
    """The end of a wait: matchers can be made, or a failure says why not."""

    request_id: str
    failure: GrammarFailure | None
    matchers: tuple[GrammarMatcher, ...] = ()


class Grammars:
    """Owns the compiler; started with the first request that wants a grammar.

    Args:
        tokenizer: the model's; without one there is no text to constrain.
        limits: what compiling may cost.
        max_rollback: most tokens of a speculative block.
    """

    def __init__(self, tokenizer: Tokenizer | None, limits: CompilerLimits, max_rollback: int) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._max_rollback = max_rollback
        self._compiler: GrammarCompiler | None = None
        self._waiting: dict[int, Waiting] = {}

    @property
    def num_waiting(self) -> int:
        """Requests whose grammar is not ready."""
        return len(self._waiting)

    @property
    def compiler(self) -> GrammarCompiler:
        if self._compiler is None:
            assert self._tokenizer is not None
            self._compiler = GrammarCompiler(Vocabulary.of(self._tokenizer), self._limits)
        return self._compiler

    def check(self, params: SamplingParams) -> StructuredSpec | None:
        """The description of a request. Raises RequestError if it can't be served here."""
        spec = spec_of(params)
        if spec is not None and params.ignore_eos:
            raise RequestError(
                "ignore_eos",
                True,
                why="a grammar ends with EOS, and what came behind it could be anything",
                fix="leave ignore_eos out, or the grammar",
            )
        if spec is not None and self._tokenizer is None:
            raise RequestError(
                "structured", spec, why="this engine has no tokenizer to write text with", fix="leave it out"
            )
        if spec is not None and self._tokenizer is not None:
            vocab_size = self._tokenizer.vocab_size  # an id beyond it never comes, and nothing would be constrained
            check_below_vocab("trigger_token_ids", spec.trigger_token_ids, vocab_size)
            bound = spec.bound_token_id
            check_below_vocab("bound_token_id", () if bound is None else (bound,), vocab_size)
        return spec

    def submit(self, request_id: str, spec: StructuredSpec, prompt_ids: Sequence[int]) -> None:
        """Start compiling; the request comes out of :meth:`poll`."""
        start = start_rule(spec, self._tokenizer, prompt_ids)
        ticket = self.compiler.submit(spec)
        self._waiting[ticket.number] = Waiting(request_id, ticket, start)

    def poll(self, counts: dict[str, int]) -> list[Compiled]:
        """Requests whose wait is over.

        Args:
            counts: matchers that each waiting request needs, one per output.
        """
        if self._compiler is None or not self._waiting:
            return []
        return [self._finish(ticket, counts) for ticket in self._compiler.poll() if ticket.number in self._waiting]

    def _finish(self, ticket: Ticket, counts: dict[str, int]) -> Compiled:
        waiting = self._waiting.pop(ticket.number)
        result = ticket.result
        if isinstance(result, GrammarFailure):
            return Compiled(waiting.request_id, result)
        assert result is not None
        matchers = tuple(
            GrammarMatcher(result, self.compiler.vocabulary, waiting.start, max_rollback=self._max_rollback)
            for _ in range(counts[waiting.request_id])
        )
        return Compiled(waiting.request_id, None, matchers)

    def wait(self, timeout_s: float) -> None:
        """Block until some grammar is ready or the time is over: for an engine with nothing else to do."""
        if self._waiting and self._compiler is not None:
            self._compiler.wait(next(iter(self._waiting.values())).ticket, timeout_s)

    def cancel(self, request_id: str) -> None:
        """The request is not wanted any more."""
        for number, waiting in list(self._waiting.items()):
            if waiting.request_id == request_id:
                del self._waiting[number]
                self.compiler.cancel(waiting.ticket)

    def close(self) -> None:
        """End the compiler's processes."""
        if self._compiler is not None:
            self._compiler.close()
            self._compiler = None
        self._waiting.clear()
