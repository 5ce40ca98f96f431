"""Turns at the engine: order of arrival, errands that are never lost, and nothing stuck whatever is interrupted."""

from __future__ import annotations

import threading
import time

import pytest

from deepinfer.entrypoints.turns import Turn


def _start(target, *arguments) -> threading.Thread:
    thread = threading.Thread(target=target, args=arguments, daemon=True)
    thread.start()
    return thread


def _waiting(turn: Turn, count: int) -> None:
    end = time.monotonic() + 10
    while len(turn._waiting) < count:
        assert time.monotonic() < end
        time.sleep(0.001)


def test_threads_are_served_in_the_order_of_their_arrival():
    turn, served = Turn(), []

    def ask(name: int) -> None:
        with turn:
            served.append(name)

    with turn:
        threads = []
        for name in range(5):
            threads.append(_start(ask, name))
            _waiting(turn, name + 1)
    for thread in threads:
        thread.join(10)
    assert served == [0, 1, 2, 3, 4]


def test_who_lets_go_and_asks_again_comes_after_those_who_wait():
    turn, served, done = Turn(), [], threading.Event()

    def greedy() -> None:
        while not done.is_set():
            with turn:
                served.append("greedy")
                time.sleep(0.001)

    def patient() -> None:
        with turn:
            served.append("patient")
        done.set()

    with turn:
        first = _start(greedy)
        _waiting(turn, 1)
        second = _start(patient)
        _waiting(turn, 2)
    first.join(10)
    second.join(10)
    assert served.index("patient") == 1


def test_a_thread_may_take_its_turn_again():
    turn, served = Turn(), []
    with turn, turn:
        thread = _start(lambda: served.append(turn.__enter__()))
        _waiting(turn, 1)
        assert not served
    thread.join(10)
    assert served == [turn]


def test_an_errand_runs_at_once_or_at_the_end_of_the_turn_that_is_in_the_way():
    turn, done = Turn(), []
    turn.leave(lambda: done.append("free"))
    assert done == ["free"]
    with turn:
        turn.leave(lambda: done.append("own turn"))
        _start(turn.leave, lambda: done.append("another thread")).join(10)
        assert done == ["free"]
    assert done == ["free", "own turn", "another thread"]
    with turn:
        turn.leave(lambda: done.append("between steps"))
        turn.run_errands()
        assert done[-1] == "between steps"


def test_an_errand_that_fails_ends_the_turn():
    turn = Turn()

    def fail() -> None:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):  # noqa: SIM117
        with turn:
            turn.leave(fail)
    with turn:
        pass
    with pytest.raises(RuntimeError, match="no"):
        turn.leave(fail)
    with turn:
        pass


def test_an_interrupt_while_waiting_leaves_the_queue(monkeypatch):
    turn = Turn()
    held, let_go = threading.Event(), threading.Event()

    def hold() -> None:
        with turn:
            held.set()
            let_go.wait(10)

    thread = _start(hold)
    held.wait(10)

    def interrupted(timeout: float | None = None) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(turn._changed, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            turn.__enter__()
    let_go.set()
    thread.join(10)
    with turn:
        assert not turn._waiting
