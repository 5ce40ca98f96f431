"""Ctrl-C between steps: an interrupt in the middle of the books would leave them half written."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupt_after() -> Iterator[None]:
    """Hold back the first Ctrl-C until the end of the ``with`` block; a second one interrupts at once.

    Does nothing outside the main thread, or where the program has its own way with SIGINT.

    Raises:
        KeyboardInterrupt: at the end of the block, if Ctrl-C was pressed in it.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    pressed = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            signal.default_int_handler(number, frame)
        pressed = True

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if pressed:
        raise KeyboardInterrupt
