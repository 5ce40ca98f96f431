"""Ctrl-C waits for the end of a step; a second one does not wait."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from deepinfer.entrypoints.interrupts import interrupt_after


def _press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_is_raised_after_the_block():
    done = False
    with pytest.raises(KeyboardInterrupt), interrupt_after():  # noqa: PT012
        _press()
        done = True
    assert done
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_interrupt_is_raised_at_once():
    reached = False
    with pytest.raises(KeyboardInterrupt), interrupt_after():  # noqa: PT012
        _press()
        _press()
        reached = True
    assert not reached
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_in_the_block_comes_through():
    with pytest.raises(RuntimeError, match="step"), interrupt_after():
        raise RuntimeError("step")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_program_s_own_handler_is_left_alone(monkeypatch):
    seen = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        with interrupt_after():
            _press()
        assert seen == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_are_left_alone():
    problems: list[BaseException] = []

    def work() -> None:
        try:
            with interrupt_after():
                pass
        except BaseException as error:
            problems.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not problems
