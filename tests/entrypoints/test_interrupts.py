"""Ctrl-C waits for the end of a step; a second one does not wait. SIGTERM does the same in the command line."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import threading

import pytest

from deepinfer.checkpoint.tiny import tiny_config
from deepinfer.engine.engine import Engine
from deepinfer.entrypoints import cli, default_model
from deepinfer.entrypoints.cli import main
from deepinfer.entrypoints.interrupts import Terminated, interrupt_after, termination_as_interrupt


def _press(number: int = signal.SIGINT) -> None:
    os.kill(os.getpid(), number)


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


# ---- SIGTERM ---------------------------------------------------------------------------------------------------------


def test_termination_is_an_interrupt_within_its_block_only():
    with pytest.raises(Terminated), termination_as_interrupt() as termination:
        _press(signal.SIGTERM)
    assert termination.is_requested
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_termination_waits_for_the_end_of_a_step_too():
    done = False
    with termination_as_interrupt() as termination, pytest.raises(Terminated), interrupt_after():  # noqa: PT012
        _press(signal.SIGTERM)
        assert not termination.is_requested
        done = True
    assert done
    assert termination.is_requested


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_any_second_signal_is_raised_at_once(second):
    reached = False
    with termination_as_interrupt() as termination, pytest.raises(KeyboardInterrupt), interrupt_after():  # noqa: PT012
        _press()
        _press(second)
        reached = True
    assert not reached
    assert termination.is_requested == (second == signal.SIGTERM)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_program_s_own_way_with_termination_is_left_alone():
    seen = []
    signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        with termination_as_interrupt() as termination, interrupt_after():
            _press(signal.SIGTERM)
        assert seen == [signal.SIGTERM]
        assert not termination.is_requested
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


# ---- the command line ------------------------------------------------------------------------------------------------

SMALL = ["--max-model-len", "160", "--num-threads", "1", "--num-speculative-tokens", "0", "--max-tokens", "100"]
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}


@pytest.fixture
def press_at_step(monkeypatch):
    """Have a signal arrive in the given step of whatever engine runs next."""

    def prepare(number: int, at: int) -> None:
        original, steps = Engine.run_step, []

        def run_step(self):
            steps.append(None)
            if len(steps) == at:
                _press(number)
            return original(self)

        monkeypatch.setattr(Engine, "run_step", run_step)

    return prepare


@pytest.mark.parametrize("number", CODES, ids=lambda number: number.name)
def test_interrupted_batches_print_what_was_generated(model_path, press_at_step, number, capsys):
    press_at_step(number, 6)
    code = main(["generate", "--model", str(model_path), *SMALL, "--ignore-eos", "--json", "The sea", "Once"])
    out, err = capsys.readouterr()
    outputs = [json.loads(line)["outputs"][0] for line in out.splitlines()]
    assert code == CODES[number]
    assert [each["finish_reason"] for each in outputs] == ["abort", "abort"]
    assert all(3 <= len(each["token_ids"]) <= 6 for each in outputs)
    assert "Traceback" not in err
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("number", CODES, ids=lambda number: number.name)
def test_an_interrupted_stream_ends_its_line(model_path, press_at_step, number, capsys):
    press_at_step(number, 6)
    code = main(["generate", "--model", str(model_path), *SMALL, "--ignore-eos", "The sea"])
    out, err = capsys.readouterr()
    assert code == CODES[number]
    assert out.strip()
    assert out.endswith("\n")
    assert err == "interrupted\n"


def test_termination_ends_a_chat_that_ctrl_c_does_not(model_path, press_at_step, monkeypatch, capsys):
    chat = ["chat", "--model", str(model_path), *SMALL]
    for number, code in ((signal.SIGINT, 0), (signal.SIGTERM, 143)):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdin", io.StringIO("Hello\n/help\n"))
            press_at_step(number, 4)
            assert main(chat) == code
        assert ("/reset" in capsys.readouterr().err) == (code == 0)


@pytest.mark.parametrize("number", CODES, ids=lambda number: number.name)
def test_an_interrupt_while_the_program_loads_is_no_traceback(monkeypatch, number, capsys):
    monkeypatch.setattr(cli, "build_parser", lambda command: _press(number))
    assert main(["generate", "x"]) == CODES[number]
    assert capsys.readouterr().err == "interrupted\n"


def test_a_random_model_that_was_not_finished_leaves_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(default_model, "make_random_checkpoint", lambda *args, **more: _press(signal.SIGTERM))
    with pytest.raises(Terminated), termination_as_interrupt():
        default_model.cached_random_model("tiny", tiny_config())
    assert list((tmp_path / "deepinfer").iterdir()) == []
