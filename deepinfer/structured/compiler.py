"""``GrammarCompiler``: grammars for requests, compiled in worker processes without ever blocking the engine.

The compiled grammar comes back serialised and is rebuilt here. Rebuilding takes a small part of the time of compiling,
in a thread and without the interpreter lock, and is bounded by the size limit; compiling again would not be. A worker
also measures some masks, since those are computed in the engine.
"""

from __future__ import annotations

import os
import queue
import threading
from dataclasses import dataclass, field

from deepinfer.structured import native
from deepinfer.structured.failures import (
    INVALID_SCHEMA,
    SCHEMA_CANCELLED,
    SCHEMA_TIMEOUT,
    SCHEMA_TOO_LARGE,
    GrammarFailure,
)
from deepinfer.structured.grammar_cache import CompiledGrammar, GrammarCache
from deepinfer.structured.grammar_text import GrammarKey
from deepinfer.structured.spec import StructuredSpec
from deepinfer.structured.vocabulary import Vocabulary
from deepinfer.structured.worker_handle import WorkerGoneError, WorkerHandle, WorkerTimeoutError
from deepinfer.structured.worker_process import Refused, WorkerSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class CompilerLimits:
    """What compiling may cost."""

    timeout_s: float = 20.0
    """Wall time of one compile; waiting for a free worker does not count (``DEEPINFER_XGRAMMAR_TIMEOUT``)."""
    num_workers: int = 4
    """Most processes at a time; they start with the first grammars (``DEEPINFER_SO_BUILDER_CPUS``)."""
    cache_bytes: int = 1 << 30
    """Compiled grammars that are kept; 0 or less: all (``DEEPINFER_XGRAMMAR_CACHE_LIMIT_BYTES``)."""
    uses_cache: bool = True
    """False compiles every time (``DEEPINFER_XGRAMMAR_DISABLE_CACHE``)."""
    memory_bytes: int = 4 << 30
    """Address space of one worker."""
    max_grammar_bytes: int = 8 << 20
    """Longest text of a grammar."""
    max_compiled_bytes: int = 128 << 20
    """Largest compiled grammar, serialised."""
    max_mask_s: float = 0.5
    """Longest time that one mask may take, measured by the worker."""
    shows_messages: bool = False
    """Let workers write to standard error (``DEEPINFER_XGRAMMAR_DEBUG``)."""


@dataclass(eq=False, slots=True)
class Ticket:
    """One request's wait for its grammar."""

    number: int
    key: GrammarKey
    result: CompiledGrammar | GrammarFailure | None = None
    """None until it is finished."""
    done: threading.Event = field(default_factory=threading.Event)


@dataclass(eq=False, slots=True)
class _Job:
    """One compile, for all tickets that want the same grammar."""

    key: GrammarKey
    tickets: list[Ticket]
    worker: WorkerHandle | None = None
    is_cancelled: bool = False


@dataclass(slots=True)
class CompilerCounters:
    """How often what happened."""

    submitted: int = 0
    compiled: int = 0
    cache_hits: int = 0
    failure_hits: int = 0
    joined: int = 0
    """Tickets that joined a compile which was already on its way."""
    failed: int = 0
    cancelled: int = 0


class GrammarCompiler:
    """Compiles grammars in the background. All methods may be called from any thread and return at once.

    One thread per worker process waits for it. Threads and processes start when there is work for them.

    Raises:
        ConfigError: the grammar library is not installed.
    """

    def __init__(self, vocabulary: Vocabulary, limits: CompilerLimits | None = None) -> None:
        native.bindings()  # here rather than as a mystery in a worker
        self.vocabulary = vocabulary
        self.limits = limits or CompilerLimits()
        self.counters = CompilerCounters()
        self.cache = GrammarCache(self.limits.cache_bytes)
        self._lock = threading.Lock()
        self._jobs: dict[GrammarKey, _Job] = {}
        self._waiting: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._num_waiting = 0
        self._num_idle = 0
        self._threads: list[threading.Thread] = []
        self._workers: list[WorkerHandle] = []
        self._finished: list[Ticket] = []
        self._num_tickets = 0
        self._is_closed = False

    def submit(self, spec: StructuredSpec) -> Ticket:
        """Ask for the grammar of ``spec``; the ticket comes out of :meth:`poll` when it is finished."""
        key = spec.grammar_key
        with self._lock:
            assert not self._is_closed, "the compiler is closed"
            ticket = Ticket(self._num_tickets, key)
            self._num_tickets += 1
            self.counters.submitted += 1
            known = self.cache.get(key) if self.limits.uses_cache else None
            if known is not None:
                failed = isinstance(known, GrammarFailure)
                self.counters.failure_hits += failed
                self.counters.cache_hits += not failed
                self._finish(ticket, known)
            elif key in self._jobs:
                self.counters.joined += 1
                self._jobs[key].tickets.append(ticket)
            else:
                job = self._jobs[key] = _Job(key, [ticket])
                self._num_waiting += 1
                self._waiting.put(job)
                self._start_thread_if_needed()
        return ticket

    def poll(self) -> list[Ticket]:
        """Tickets that finished since the last call, each once, in order."""
        with self._lock:
            finished, self._finished = self._finished, []
        return finished

    def wait(self, ticket: Ticket, timeout_s: float | None = None) -> CompiledGrammar | GrammarFailure | None:
        """Block until a ticket is finished and return its result; None if ``timeout_s`` was too short."""
        ticket.done.wait(timeout_s)
        return ticket.result

    @property
    def num_pending(self) -> int:
        """Tickets that are not finished."""
        with self._lock:
            return sum(len(job.tickets) for job in self._jobs.values())

    def cancel(self, ticket: Ticket) -> bool:
        """Give up a ticket. Its compile is stopped unless another ticket waits for it.

        Returns:
            Whether it was pending; it will then not come out of :meth:`poll`.
        """
        with self._lock:
            job = self._jobs.get(ticket.key)
            if ticket in self._finished:
                self._finished.remove(ticket)
                return True
            if job is None or ticket not in job.tickets:
                return False
            job.tickets.remove(ticket)
            self.counters.cancelled += 1
            ticket.result = GrammarFailure(SCHEMA_CANCELLED, "the request was aborted")
            ticket.done.set()
            if job.tickets:
                return True
            job.is_cancelled = True
            del self._jobs[ticket.key]
            if job.worker is not None:  # under the lock: it may work on another job a moment later
                job.worker.kill()
        return True

    def close(self) -> None:
        """Stop all workers; pending tickets fail as cancelled. Closing twice is fine."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            for job in self._jobs.values():
                job.is_cancelled = True
                for ticket in job.tickets:
                    self._finish(ticket, GrammarFailure(SCHEMA_CANCELLED, "the engine was closed"))
            self._jobs.clear()
            for _thread in self._threads:
                self._waiting.put(None)
        for worker in self._workers:
            worker.kill(forever=True)
        for thread in self._threads:
            thread.join()
        for worker in self._workers:
            worker.close()

    def check(self) -> None:
        """Raise AssertionError if tickets and jobs contradict each other."""
        with self._lock:
            for key, job in self._jobs.items():
                assert job.tickets, f"nobody waits for {key}"
                assert not job.is_cancelled, f"{key} is cancelled but still listed"
                assert all(ticket.result is None for ticket in job.tickets), f"{key} has finished tickets"
            self.cache.check()

    def _finish(self, ticket: Ticket, result: CompiledGrammar | GrammarFailure) -> None:
        ticket.result = result
        ticket.done.set()
        self._finished.append(ticket)

    def _start_thread_if_needed(self) -> None:
        if self._num_waiting <= self._num_idle or len(self._threads) >= self.limits.num_workers:
            return
        limits = self.limits
        settings = WorkerSettings(
            token_bytes=self.vocabulary.token_bytes,
            eos_id=self.vocabulary.eos_id,
            num_threads=max(1, min(4, (os.cpu_count() or 1) // limits.num_workers)),
            cpu_seconds=max(1, round(limits.timeout_s * 2)),
            memory_bytes=limits.memory_bytes,
            max_grammar_bytes=limits.max_grammar_bytes,
            max_compiled_bytes=limits.max_compiled_bytes,
            max_mask_s=limits.max_mask_s,
        )
        worker = WorkerHandle(settings, limits.shows_messages)
        thread = threading.Thread(target=self._serve, args=(worker,), name="grammar-worker", daemon=True)
        self._workers.append(worker)
        self._threads.append(thread)
        self._num_idle += 1
        thread.start()

    def _serve(self, worker: WorkerHandle) -> None:
        """Body of a thread: hand jobs to its worker, one at a time."""
        while (job := self._waiting.get()) is not None:
            with self._lock:
                self._num_waiting -= 1
                if job.is_cancelled:
                    continue
                self._num_idle -= 1
                job.worker = worker
            result = self._compile(job, worker)
            with self._lock:
                self._num_idle += 1
                job.worker = None
                if job.is_cancelled:
                    continue
                del self._jobs[job.key]
                self.counters.compiled += isinstance(result, CompiledGrammar)
                self.counters.failed += isinstance(result, GrammarFailure)
                if self.limits.uses_cache:
                    self.cache.put(job.key, result)
                for ticket in job.tickets:
                    self._finish(ticket, result)

    def _compile(self, job: _Job, worker: WorkerHandle, may_retry: bool = True) -> CompiledGrammar | GrammarFailure:
        kind, limits = job.key.kind, self.limits
        try:
            reply = worker.compile(job.key, limits.timeout_s)
        except WorkerTimeoutError:
            return GrammarFailure(SCHEMA_TIMEOUT, f"compiling the {kind} takes more than {limits.timeout_s:g} s")
        except WorkerGoneError as error:
            if error.was_killed and may_retry and not job.is_cancelled:  # not its own doing: once more
                return self._compile(job, worker, may_retry=False)
            return _failure_of(error, kind, limits.memory_bytes)
        if isinstance(reply, Refused):
            return GrammarFailure(reply.kind, reply.message)
        try:
            handle = native.bindings().CompiledGrammar.deserialize_json(reply.text, self.vocabulary.info)
        except RuntimeError as error:
            return GrammarFailure(INVALID_SCHEMA, f"the compiled {kind} can't be read back: {error}")
        return CompiledGrammar(job.key, handle, max(1, int(handle.memory_size_bytes())))


def _failure_of(error: WorkerGoneError, kind: str, memory_bytes: int) -> GrammarFailure:
    """A worker that dies while it compiles has met a limit, or a grammar that the library can't bear."""
    if "processor time" in str(error):
        return GrammarFailure(SCHEMA_TIMEOUT, f"compiling the {kind}: {error}")
    # The library does not always say that it got no memory: a thread of its own then ends the process.
    memory = f"it may have run out of the {memory_bytes / 2**30:.3g} GiB of memory that it is allowed"
    return GrammarFailure(SCHEMA_TOO_LARGE, f"compiling the {kind} failed: {error}; {memory}; describe less")
