"""The process that compiles grammars. It may hang, grow or crash: it is limited, and killed from outside.

Started as a plain program rather than through ``multiprocessing``, which would run the caller's main module again and
cannot do that for a program read from standard input. It never loads torch, so it starts in a fraction of a second.
"""

from __future__ import annotations

import os
import random
import resource
import sys
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from deepinfer.structured import native
from deepinfer.structured.endless_rules import require_text
from deepinfer.structured.failures import INVALID_SCHEMA, SCHEMA_TOO_LARGE
from deepinfer.structured.frames import read_frame, write_frame
from deepinfer.structured.grammar_text import GrammarKey, grammar_text
from deepinfer.structured.problems import SchemaError

_PROBED_TOKENS = 32


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """The first message to a worker."""

    token_bytes: tuple[bytes, ...]
    eos_id: int
    num_threads: int
    cpu_seconds: int
    """Processor time of one compile; the kernel ends the process that exceeds it."""
    memory_bytes: int
    """Address space of the process."""
    max_grammar_bytes: int
    """Longest text of a grammar that is given to the library."""
    max_compiled_bytes: int
    """Largest compiled grammar, serialised."""
    max_mask_s: float
    """Longest time that one mask may take; they are computed in the engine, where nothing could stop them."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """A serialised compiled grammar."""

    text: str


@dataclass(frozen=True, slots=True)
class Refused:
    """Why there is none."""

    kind: str
    message: str


def compile_one(key: GrammarKey, info: Any, settings: WorkerSettings) -> Compiled | Refused:
    """Compile a grammar, or say in a sentence why that isn't possible."""
    try:
        text, root = grammar_text(key)
        if len(text) > settings.max_grammar_bytes:
            return Refused(SCHEMA_TOO_LARGE, f"the grammar has {len(text)} bytes, above {settings.max_grammar_bytes}")
        if key.kind == "ebnf":  # those of the other kinds were written for a language that is not empty
            require_text(text, root)
        handle = native.compile_ebnf(info, text, root, settings.num_threads)
        slowest_s, is_dead = probe_masks(handle, len(settings.token_bytes))
        if is_dead:
            return Refused(INVALID_SCHEMA, str(_no_token(key)))
        if slowest_s > settings.max_mask_s:
            why = f"one mask of the {key.kind} takes {slowest_s:.2g} s, above {settings.max_mask_s:g} s"
            return Refused(SCHEMA_TOO_LARGE, why)
        compiled = str(handle.serialize_json())
    except SchemaError as error:
        return Refused(INVALID_SCHEMA, str(error))
    except UnicodeDecodeError as error:  # the library's message quotes half of a character
        said = error.object.decode("utf-8", errors="replace")
        return Refused(INVALID_SCHEMA, f"the {key.kind} can't be compiled: {_library_message(RuntimeError(said))}")
    except RecursionError:
        return Refused(SCHEMA_TOO_LARGE, f"the {key.kind} is nested too deeply to be compiled")
    except MemoryError:
        return Refused(SCHEMA_TOO_LARGE, f"compiling the {key.kind} takes more than {settings.memory_bytes} bytes")
    except RuntimeError as error:  # what the library raises for a text that it can't read
        if "bad_alloc" in str(error) or "bad alloc" in str(error):
            return Refused(SCHEMA_TOO_LARGE, f"compiling the {key.kind} takes more than {settings.memory_bytes} bytes")
        return Refused(INVALID_SCHEMA, f"the {key.kind} can't be compiled: {_library_message(error)}")
    if len(compiled) > settings.max_compiled_bytes:
        why = f"the compiled {key.kind} takes {len(compiled)} bytes, above {settings.max_compiled_bytes}"
        return Refused(SCHEMA_TOO_LARGE, why)
    return Compiled(compiled)


def probe_masks(handle: Any, vocab_size: int) -> tuple[float, bool]:
    """Masks along a random text of the language.

    Returns:
        seconds that the slowest of them takes, and whether the first one allows nothing, not even the end.
    """
    matcher = native.bindings().GrammarMatcher(handle, None, False, -1, None)
    row = np.zeros((1, -(-vocab_size // 32)), dtype=np.int32)
    choose = random.Random(0)
    slowest, is_dead = 0.0, False
    for index in range(_PROBED_TOKENS):
        start = time.perf_counter()
        matcher.fill_next_token_bitmask(row, 0, False)
        slowest = max(slowest, time.perf_counter() - start)
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")[:vocab_size])
        is_dead = is_dead or (index == 0 and not len(allowed))
        if not len(allowed) or not matcher.accept_token(int(choose.choice(allowed)), False):
            break
        if matcher.is_terminated():
            break
    return slowest, is_dead


def _no_token(key: GrammarKey) -> SchemaError:
    return SchemaError(
        key.kind,
        key.text,
        why="none of the model's tokens can begin a text of it, and it has no empty text",
        fix="check how it begins",
    )


def _library_message(error: RuntimeError) -> str:
    """The library's first line, without time and source file."""
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return first.split("grammar_parser.cc", 1)[-1].split(": ", 1)[-1]


def _limit_processor_time(seconds: int) -> None:
    """Let the process use this much more processor time than it has used."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _soft, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + seconds + 1, hard))


def main() -> None:
    """Serve compile requests from standard input until it closes."""
    # Nothing else may write to the pipe: what a library prints goes to standard error.
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    requests = sys.stdin.buffer
    settings: WorkerSettings = read_frame(requests)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    info = native.tokenizer_info(settings.token_bytes, settings.eos_id)
    resource.setrlimit(resource.RLIMIT_AS, (settings.memory_bytes, settings.memory_bytes))
    write_frame(replies, "ready")
    while True:
        try:
            key = read_frame(requests)
        except EOFError:
            return
        _limit_processor_time(settings.cpu_seconds)
        write_frame(replies, compile_one(key, info, settings))
