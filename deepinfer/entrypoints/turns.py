"""Who may use the engine: one thread at a time, in the order in which they came."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from types import TracebackType


class Turn:
    """A reentrant lock that serves threads in the order of their arrival, and runs errands that nobody waits for.

    ``threading.RLock`` gives no order: a thread that lets it go and takes it again at once keeps the others waiting.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()  # its lock is reentrant, because the garbage collector may run in here
        self._waiting: deque[object] = deque()
        self._errands: deque[Callable[[], object]] = deque()
        self._owner: int | None = None
        self._depth = 0

    def __enter__(self) -> Turn:
        me = threading.get_ident()
        if self._owner == me:
            self._depth += 1
            return self
        ticket = object()
        with self._changed:
            self._waiting.append(ticket)
            try:
                while self._owner is not None or self._waiting[0] is not ticket:
                    self._changed.wait()
                self._owner, self._depth = me, 1
            finally:  # also where Ctrl-C ends the wait
                self._waiting.remove(ticket)
                self._changed.notify_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._depth > 1:
            self._depth -= 1
            return
        try:
            self.run_errands()
        finally:
            with self._changed:
                self._owner, self._depth = None, 0
                self._changed.notify_all()
        if self._errands:  # left between the last look and the end of the turn
            self._run_errands_if_free()

    def leave(self, errand: Callable[[], object]) -> None:
        """Have ``errand`` run in a turn, without waiting for one: now if nobody has it, else by whoever does.

        For what a generator does when it is closed, which may be anywhere: the garbage collector closes some.
        """
        self._errands.append(errand)
        self._run_errands_if_free()

    def _run_errands_if_free(self) -> None:
        with self._changed:
            if self._owner is not None or self._waiting:
                return
            self._owner, self._depth = threading.get_ident(), 1
        self.__exit__(None, None, None)

    def run_errands(self) -> None:
        """Run what was left so far. Only within a turn, where the engine is between two steps."""
        while self._errands:
            self._errands.popleft()()
