"""Compiling in worker processes: results, failures, limits, sharing, cancelling; nobody waits for a bad grammar."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deepinfer.structured.compiler import CompilerLimits, GrammarCompiler, Ticket
from deepinfer.structured.failures import (
    INVALID_SCHEMA,
    SCHEMA_CANCELLED,
    SCHEMA_TIMEOUT,
    SCHEMA_TOO_LARGE,
    GrammarFailure,
)
from deepinfer.structured.grammar_cache import CompiledGrammar, GrammarCache
from deepinfer.structured.grammar_text import GrammarKey
from deepinfer.structured.matcher import GrammarMatcher
from deepinfer.structured.spec import Choice, Ebnf, JsonSchema, Regex, StructuredSpec
from tests.structured.support import allowed_ids, matcher_for, random_walk, vocabulary

# Each level needs the one below it twice: resolving the last takes 2**45 steps.
SLOW = JsonSchema(
    {
        "$defs": {"0": {"type": "null"}}
        | {str(level): {"allOf": [{"$ref": f"#/$defs/{level - 1}"}] * 2} for level in range(1, 46)},
        "$ref": "#/$defs/45",
    }
)


@pytest.fixture
def make() -> Iterator[Callable[..., GrammarCompiler]]:
    made: list[GrammarCompiler] = []

    def build(**limits: object) -> GrammarCompiler:
        made.append(GrammarCompiler(vocabulary(), CompilerLimits(**{"num_workers": 1, **limits})))
        return made[-1]

    yield build
    for compiler in made:
        compiler.close()
        assert not any(worker.pid for worker in compiler._workers), "a worker outlived its compiler"


def finish(compiler: GrammarCompiler, spec: StructuredSpec) -> CompiledGrammar | GrammarFailure:
    result = compiler.wait(compiler.submit(spec), 60)
    assert result is not None
    return result


def is_working(compiler: GrammarCompiler, ticket: Ticket) -> bool:
    job = compiler._jobs.get(ticket.key)
    return job is not None and job.worker is not None and job.worker.pid is not None


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_grammar_from_a_worker_is_the_one_compiled_here(make: Callable[..., GrammarCompiler]) -> None:
    compiler = make()
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^[é-ü]+$"}, "b": {"enum": [1, "x"]}}}
    for spec in (JsonSchema(schema), Regex("(ab|[^a]){2,5}"), Choice(["x", "yz"]), Ebnf('root ::= "a" root | "b"')):
        compiled = finish(compiler, spec)
        assert isinstance(compiled, CompiledGrammar)
        remote, local = GrammarMatcher(compiled, vocabulary()), matcher_for(spec)
        for token in random_walk(local, random.Random(1)) or []:
            assert remote.accept(token)
        assert remote.mode is local.mode
        local.replay(())
        remote.replay(())
        assert allowed_ids(remote) == allowed_ids(local)
    assert compiler.counters.compiled == 4
    compiler.check()


def test_poll_hands_out_each_ticket_once(make: Callable[..., GrammarCompiler]) -> None:
    compiler = make()
    tickets = [compiler.submit(Regex(f"a{{{count}}}")) for count in (1, 2, 3)]
    assert compiler.num_pending >= 1
    seen: list[Ticket] = []
    wait_until(lambda: bool(seen.extend(compiler.poll()) or len(seen) == 3))
    assert seen == tickets
    assert compiler.poll() == []
    assert compiler.num_pending == 0


def test_failures_have_kind_and_message(make: Callable[..., GrammarCompiler]) -> None:
    compiler = make(max_grammar_bytes=20_000, max_compiled_bytes=100_000)
    cases: list[tuple[StructuredSpec, str, str]] = [
        (Ebnf('root ::= "a" missing'), INVALID_SCHEMA, "missing"),
        (Ebnf('root ::= "a'), INVALID_SCHEMA, "ebnf"),
        (JsonSchema({"oneOf": [{}, {}]}), INVALID_SCHEMA, r"\$\.oneOf"),
        (JsonSchema({"type": "integer", "minimum": 5, "maximum": 4}), INVALID_SCHEMA, "no integer fits"),
        (JsonSchema({"enum": [f"{index:x}" for index in range(9000)]}), SCHEMA_TOO_LARGE, "bytes"),
        (Regex("(([ab]{1,50}c){1,50}d){1,50}"), SCHEMA_TOO_LARGE, "bytes"),
    ]
    for spec, kind, message in cases:
        failure = finish(compiler, spec)
        assert isinstance(failure, GrammarFailure), spec
        assert failure.kind == kind
        assert re.search(message, failure.message), failure.message
        assert failure.vendor_reason == "xgrammar runtime errors or timeout"
    assert isinstance(finish(compiler, Regex("ok")), CompiledGrammar)
    assert compiler._workers[0].num_starts == 1, "none of these costs a process"


def test_equal_grammars_are_compiled_once_and_remembered(make: Callable[..., GrammarCompiler]) -> None:
    compiler = make()
    first = [compiler.submit(JsonSchema({"type": "null"}, trigger_token_ids=[number])) for number in range(5)]
    results = {id(compiler.wait(ticket, 60)) for ticket in first}
    assert len(results) == 1
    assert compiler.counters.joined == 4
    again = compiler.submit(JsonSchema(' {"type":  "null"}'))
    assert again.result is first[0].result, "known at once"
    assert compiler.counters.cache_hits == 1
    bad = Ebnf('root ::= "a" x')
    failure = finish(compiler, bad)
    assert compiler.submit(bad).result == failure
    assert compiler.counters.failure_hits == 1
    assert compiler.counters.compiled == 1
    assert compiler.counters.failed == 1
    assert len(compiler.poll()) == 8


def test_without_cache_everything_is_compiled(make: Callable[..., GrammarCompiler]) -> None:
    compiler = make(uses_cache=False)
    for _repeat in range(3):
        assert isinstance(finish(compiler, Regex("a")), CompiledGrammar)
    assert compiler.counters.compiled == 3
    assert len(compiler.cache) == 0


def test_stuck_grammars_time_out_while_others_go_on(make: Callable[..., GrammarCompiler]) -> None:
    compiler = make(timeout_s=1.0, num_workers=2)
    stuck = compiler.submit(SLOW)
    start = time.monotonic()
    for number in range(10):
        assert isinstance(finish(compiler, Regex(f"[a-z]{{{number}}}x")), CompiledGrammar)
    failure = compiler.wait(stuck, 30)
    assert isinstance(failure, GrammarFailure)
    assert failure.kind == SCHEMA_TIMEOUT
    assert "1 s" in failure.message
    assert time.monotonic() - start < 15
    # Capacity is back: two more, each on its own worker.
    assert isinstance(finish(compiler, Choice(["after"])), CompiledGrammar)
    assert compiler.submit(SLOW).result == failure, "not tried again at once"
    compiler.check()


@pytest.mark.parametrize(
    "spec",
    [
        Regex("[a-z]{100000}"),
        Regex("((a{1000}){1000}){1000}"),
        Regex("(((a|aa)*|(b|bb)*)*|(c*)*)*d"),
        Regex("(.*a.{20}|.*b.{20}){3}"),
        JsonSchema({"enum": [f"value {index} {'x' * (index % 40)}" for index in range(4000)]}),
        JsonSchema({"type": "object", "properties": {f"p{index}": {} for index in range(2000)}, "maxProperties": 999}),
        JsonSchema({"type": "array", "items": {"type": "array", "maxItems": 5000}, "maxItems": 50000}),
        Ebnf('root ::= root "a" | root root | ""'),
    ],
    ids=lambda spec: type(spec).__name__ + str(spec.grammar_key.text)[:30],
)
def test_pathological_grammars_end_and_others_go_on(make: Callable[..., GrammarCompiler], spec: StructuredSpec) -> None:
    compiler = make(timeout_s=2.0, memory_bytes=2 << 30, num_workers=2)
    start = time.monotonic()
    ticket, other = compiler.submit(spec), compiler.submit(Regex("fine"))
    assert isinstance(compiler.wait(other, 30), CompiledGrammar)
    result = compiler.wait(ticket, 30)
    assert time.monotonic() - start < 15
    if isinstance(result, GrammarFailure):
        assert result.kind in (SCHEMA_TIMEOUT, SCHEMA_TOO_LARGE, INVALID_SCHEMA)
    else:  # not so bad after all: then it has to work
        assert isinstance(result, CompiledGrammar)
        assert allowed_ids(GrammarMatcher(result, vocabulary()))
    assert isinstance(finish(compiler, Regex("still fine")), CompiledGrammar)


def test_memory_of_a_worker_is_limited(make: Callable[..., GrammarCompiler]) -> None:
    compiler = make(memory_bytes=400 << 20, timeout_s=30, max_grammar_bytes=1 << 30)
    greedy = Ebnf("root ::= " + " | ".join(f'"{index * 7919 % 20011} {index} xxxxxxxx"' for index in range(8_000)))
    failure = finish(compiler, greedy)
    assert isinstance(failure, GrammarFailure)
    assert failure.kind == SCHEMA_TOO_LARGE
    assert isinstance(finish(compiler, Regex("a")), CompiledGrammar)


def test_killed_worker_is_replaced_and_its_grammar_tried_again(make: Callable[..., GrammarCompiler]) -> None:
    compiler = make(timeout_s=2.0)
    assert isinstance(finish(compiler, Regex("a")), CompiledGrammar)
    worker = compiler._workers[0]
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)  # while it is idle
    assert isinstance(finish(compiler, Regex("b")), CompiledGrammar)
    assert worker.num_starts == 2
    ticket = compiler.submit(SLOW)
    wait_until(lambda: is_working(compiler, ticket))
    time.sleep(0.2)
    os.kill(worker.pid or 0, signal.SIGKILL)  # while it works
    failure = compiler.wait(ticket, 30)
    assert isinstance(failure, GrammarFailure)
    assert failure.kind == SCHEMA_TIMEOUT, "the second try took too long as well"
    assert isinstance(finish(compiler, Regex("c")), CompiledGrammar)
    assert worker.num_starts == 4


def test_a_worker_that_dies_of_itself_may_have_had_no_memory(make: Callable[..., GrammarCompiler]) -> None:
    compiler = make(timeout_s=60, memory_bytes=3 << 30)
    ticket = compiler.submit(SLOW)
    wait_until(lambda: is_working(compiler, ticket))
    time.sleep(0.2)
    os.kill(compiler._workers[0].pid or 0, signal.SIGABRT)  # how a thread of the library ends without memory
    failure = compiler.wait(ticket, 30)
    assert isinstance(failure, GrammarFailure)
    assert failure.kind == SCHEMA_TOO_LARGE
    assert "SIGABRT" in failure.message
    assert "may have run out of the 3 GiB of memory" in failure.message


def test_cancelling_stops_a_compile_nobody_waits_for(make: Callable[..., GrammarCompiler]) -> None:
    compiler = make(timeout_s=60)
    first, second = compiler.submit(SLOW), compiler.submit(SLOW)
    waiting = compiler.submit(Regex("never started"))
    behind = compiler.submit(Regex("behind"))
    wait_until(lambda: is_working(compiler, first))
    assert compiler.cancel(first)
    assert not compiler.cancel(first)
    assert second.result is None, "another request still wants it"
    assert compiler.cancel(waiting)
    assert compiler.cancel(second)
    assert isinstance(compiler.wait(behind, 20), CompiledGrammar), "the worker is free at once"
    assert [ticket.result.kind for ticket in (first, second, waiting) if isinstance(ticket.result, GrammarFailure)] == [
        SCHEMA_CANCELLED
    ] * 3
    assert compiler.poll() == [behind]
    assert compiler.counters.cancelled == 3
    compiler.check()


def test_cancelling_a_finished_ticket_takes_it_back(make: Callable[..., GrammarCompiler]) -> None:
    compiler = make()
    ticket = compiler.submit(Regex("a"))
    compiler.wait(ticket, 30)
    assert compiler.cancel(ticket)
    assert compiler.poll() == []
    assert not compiler.cancel(ticket)


def test_closing_fails_what_is_pending(make: Callable[..., GrammarCompiler]) -> None:
    compiler = make()
    tickets = [compiler.submit(SLOW), compiler.submit(Regex("a"))]
    wait_until(lambda: is_working(compiler, tickets[0]))
    start = time.monotonic()
    compiler.close()
    compiler.close()
    assert time.monotonic() - start < 10
    for ticket in tickets:
        assert isinstance(ticket.result, GrammarFailure)
        assert ticket.result.kind == SCHEMA_CANCELLED


def test_a_program_from_standard_input_can_compile() -> None:
    """Workers start however the main module was found, and do not run it again."""
    program = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from tests.structured.support import vocabulary
from deepinfer.structured.compiler import GrammarCompiler, CompilerLimits
from deepinfer.structured.spec import Regex
compiler = GrammarCompiler(vocabulary(), CompilerLimits(num_workers=1))
print(type(compiler.wait(compiler.submit(Regex("a")), 30)).__name__)
compiler.close()
"""
    done = subprocess.run([sys.executable, "-"], input=program, capture_output=True, text=True, timeout=60)
    assert done.stdout == "CompiledGrammar\n", done.stderr


def test_cache_keeps_within_its_bytes() -> None:
    cache = GrammarCache(100)
    grammars = [CompiledGrammar(GrammarKey("regex", str(index)), None, 40) for index in range(4)]
    for grammar in grammars[:2]:
        cache.put(grammar.key, grammar)
    assert cache.get(grammars[0].key) is grammars[0]
    cache.put(grammars[2].key, grammars[2])
    assert cache.get(grammars[1].key) is None, "the least recently used went"
    assert cache.get(grammars[0].key) is grammars[0]
    huge = CompiledGrammar(GrammarKey("regex", "huge"), None, 1000)
    cache.put(huge.key, huge)
    assert cache.get(huge.key) is None
    cache.check()
    unlimited = GrammarCache(0)
    unlimited.put(huge.key, huge)
    assert unlimited.get(huge.key) is huge


def test_timeouts_are_forgotten_after_a_while_and_cancelled_ones_at_once() -> None:
    now = [0.0]
    cache = GrammarCache(100, clock=lambda: now[0])
    keys = [GrammarKey("regex", kind) for kind in (INVALID_SCHEMA, SCHEMA_TIMEOUT, SCHEMA_CANCELLED)]
    for key in keys:
        cache.put(key, GrammarFailure(key.text, ""))
    assert [cache.get(key) is None for key in keys] == [False, False, True]
    now[0] = 301.0
    assert [cache.get(key) is None for key in keys] == [False, True, True]
    for index in range(1100):
        cache.put(GrammarKey("regex", str(index)), GrammarFailure(INVALID_SCHEMA, ""))
    assert cache.get(keys[0]) is None


def test_the_library_is_used_without_the_frameworks_that_its_python_layer_imports() -> None:
    program = """
import sys
for name in ("torch", "transformers", "pydantic", "triton", "xgrammar.matcher"):
    sys.modules[name] = None
from deepinfer.structured import native
info = native.tokenizer_info([bytes([value]) for value in range(256)] + [b""], 256)
print(native.compile_ebnf(info, 'root ::= "a"+', "root", 1).memory_size_bytes() > 0)
"""
    folder = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=folder)
    assert done.stdout == "True\n", done.stderr
