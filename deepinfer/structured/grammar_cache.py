"""What is known about grammars: compiled ones within a limit of bytes, and those that are known to fail."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from deepinfer.structured.failures import SCHEMA_CANCELLED, SCHEMA_TIMEOUT, GrammarFailure
from deepinfer.structured.grammar_text import GrammarKey

_MAX_FAILURES = 1024
_TIMEOUT_KEPT_S = 300.0


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A grammar that matchers can be made of. Immutable and shared between requests and threads."""

    key: GrammarKey
    handle: Any
    """The library's object."""
    num_bytes: int


class GrammarCache:
    """Least recently used first out. Not locked: its owner is.

    Args:
        limit_bytes: most bytes of compiled grammars; 0 or less keeps all. A grammar larger than it is not kept.
        clock: seconds, only for how long a timeout is remembered: the machine may have been busy.
    """

    def __init__(self, limit_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit_bytes = limit_bytes
        self.num_bytes = 0
        self._clock = clock
        self._compiled: OrderedDict[GrammarKey, CompiledGrammar] = OrderedDict()
        self._failed: OrderedDict[GrammarKey, tuple[float, GrammarFailure]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._compiled)

    def get(self, key: GrammarKey) -> CompiledGrammar | GrammarFailure | None:
        compiled = self._compiled.get(key)
        if compiled is not None:
            self._compiled.move_to_end(key)
            return compiled
        at, failure = self._failed.get(key, (0.0, None))
        if failure is not None and failure.kind == SCHEMA_TIMEOUT and self._clock() - at > _TIMEOUT_KEPT_S:
            del self._failed[key]
            return None
        return failure

    def put(self, key: GrammarKey, result: CompiledGrammar | GrammarFailure) -> None:
        if isinstance(result, GrammarFailure):
            if result.kind != SCHEMA_CANCELLED:
                self._failed[key] = (self._clock(), result)
                if len(self._failed) > _MAX_FAILURES:
                    self._failed.popitem(last=False)
            return
        previous = self._compiled.pop(key, None)
        self.num_bytes += result.num_bytes - (previous.num_bytes if previous else 0)
        self._compiled[key] = result
        while self.limit_bytes > 0 and self.num_bytes > self.limit_bytes:
            _key, dropped = self._compiled.popitem(last=False)
            self.num_bytes -= dropped.num_bytes

    def check(self) -> None:
        """Raise AssertionError if the bytes do not add up."""
        total = sum(each.num_bytes for each in self._compiled.values())
        assert total == self.num_bytes, f"{total=} but {self.num_bytes=}"
        assert self.limit_bytes <= 0 or total <= self.limit_bytes, f"{total=} above {self.limit_bytes=}"
