"""Ctrl-C and SIGTERM between steps: an interrupt in the middle of the books would leave them half written."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn


class Terminated(KeyboardInterrupt):
    """SIGTERM, in a program that asked for it by :func:`termination_as_interrupt`: it ends whatever Ctrl-C stops."""


class Termination:
    """The handler of SIGTERM of :func:`termination_as_interrupt`."""

    def __init__(self) -> None:
        self.is_requested = False
        """Whether the signal has come; says so even where somebody turned the interrupt into something else."""

    def __call__(self, number: int, frame: FrameType | None) -> NoReturn:
        self.is_requested = True
        raise Terminated


@contextmanager
def termination_as_interrupt() -> Iterator[Termination]:
    """Let SIGTERM interrupt the ``with`` block like Ctrl-C: results are printed, temporary files and workers end.

    The default would end the process at once. Does nothing outside the main thread, or where the program (or whoever
    started it) has its own way with SIGTERM.

    Raises:
        Terminated: anywhere in the block.
    """
    termination = Termination()
    if not _is_main_thread() or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield termination
        return
    signal.signal(signal.SIGTERM, termination)
    try:
        yield termination
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def interrupt_after() -> Iterator[None]:
    """Hold back the first Ctrl-C or SIGTERM until the end of the ``with`` block; a second one interrupts at once.

    Does nothing outside the main thread, and leaves a signal alone with which the program has its own way.

    Raises:
        KeyboardInterrupt: at the end of the block, if Ctrl-C was pressed in it.
        Terminated: the same for SIGTERM, where it is an interrupt.
    """
    handlers = {}
    if _is_main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            handler = signal.getsignal(number)
            if handler is signal.default_int_handler or isinstance(handler, Termination):
                handlers[number] = handler
    if not handlers:
        yield
        return
    held: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if held:
            handlers[signal.Signals(number)](number, frame)
        held.append(number)

    for number in handlers:
        signal.signal(number, note)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if held:
        handlers[signal.Signals(held[0])](held[0], None)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
