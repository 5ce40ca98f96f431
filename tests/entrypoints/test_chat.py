"""``deepinfer chat``: conversations that grow, answers that can be stopped, commands."""

from __future__ import annotations

import builtins
import io
import sys

import pytest

from deepinfer.entrypoints.cli import main
from deepinfer.entrypoints.commands.chat import Chat, _command
from deepinfer.errors import RequestError
from deepinfer.sampling.params import SamplingParams
from tests.entrypoints.test_cli import FAST

PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


def test_turns_are_remembered_and_answers_are_streamed(llm):
    chat = Chat(llm, PARAMS)
    pieces: list[str] = []
    summary = chat.ask("Hello", pieces.append)
    assert "6 tokens" in summary
    assert "tokens/s" in summary
    assert chat.messages == [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "".join(pieces)},
    ]
    chat.ask("And now?", pieces.append)
    assert [message["role"] for message in chat.messages] == ["user", "assistant", "user", "assistant"]


def test_an_answer_depends_on_the_turns_before_it(llm):
    chat, fresh = Chat(llm, PARAMS), Chat(llm, PARAMS)
    chat.ask("Tell me about the river", lambda text: None)
    chat.ask("Hello", lambda text: None)
    fresh.ask("Hello", lambda text: None)
    assert chat.messages[-1] != fresh.messages[-1]
    chat.reset()
    chat.ask("Hello", lambda text: None)
    assert chat.messages == fresh.messages


def test_an_interrupted_answer_stays_and_the_chat_goes_on(llm):
    chat, pieces = Chat(llm, PARAMS), []

    def show(text: str) -> None:
        pieces.append(text)
        if len(pieces) == 2:
            raise KeyboardInterrupt

    assert "interrupted" in chat.ask("Hello", show)
    assert chat.messages[-1] == {"role": "assistant", "content": "".join(pieces)}
    assert not llm.engine.has_work()
    assert "length" in chat.ask("Go on", lambda text: None)


def test_a_conversation_that_is_too_long_is_refused_and_not_kept(llm):
    chat = Chat(llm, PARAMS)
    with pytest.raises(RequestError, match="/reset"):
        chat.ask("x " * 400, lambda text: None)
    assert chat.messages == []


def test_thoughts_are_kept_apart(llm):
    chat = Chat(llm, PARAMS, thinking=True)
    assert chat._answer("hm, well</think>Yes.") == {
        "role": "assistant",
        "reasoning_content": "hm, well",
        "content": "Yes.",
    }
    assert chat._answer("never finished") == {
        "role": "assistant",
        "reasoning_content": "never finished",
        "content": "",
    }


def test_commands(llm):
    chat = Chat(llm, PARAMS)
    chat.messages.append({"role": "user", "content": "x"})
    assert "on" in _command(chat, "/thinking on")
    assert chat.thinking
    assert "unknown" in _command(chat, "/thinking maybe")
    assert "unknown" in _command(chat, "/dance")
    assert "/exit" in _command(chat, "/help")
    _command(chat, "/system Be brief.")
    assert chat.messages == [{"role": "system", "content": "Be brief."}]
    _command(chat, "/reset")
    assert chat.messages == [{"role": "system", "content": "Be brief."}]
    _command(chat, "/system")
    assert chat.messages == []


def _chat(model_path, *more: str) -> int:
    return main(["chat", "--model", str(model_path), *FAST, "--temperature", "0", "--max-tokens", "4", *more])


def test_lines_from_a_pipe_are_answered(model_path, monkeypatch, capsys):
    monkeypatch.setattr(
        sys, "stdin", io.StringIO("Hello\n/thinking on\n/thinking off\n\n/reset\nBye\n/exit\nnever read\n")
    )
    assert _chat(model_path, "--ignore-eos") == 0
    out, err = capsys.readouterr()
    assert err.count("tokens/s") == 2
    assert "thinking is on" in err
    assert "new conversation" in err
    assert out.strip()


def test_a_mistake_does_not_end_the_chat(model_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("x " * 400 + "\nHello\n"))
    assert _chat(model_path) == 0
    err = capsys.readouterr().err
    assert "error" in err
    assert ".." not in err, "one full stop ends a sentence"
    assert "tokens/s" in err


def test_ctrl_c_at_the_prompt_leaves_the_second_time(model_path, monkeypatch, capsys):
    typed = iter([KeyboardInterrupt(), "/help", KeyboardInterrupt(), KeyboardInterrupt()])

    def read(prompt: str = "") -> str:
        event = next(typed)
        if isinstance(event, str):
            return event
        raise event

    monkeypatch.setattr(builtins, "input", read)
    assert _chat(model_path) == 0
    assert next(typed, None) is None  # a line in between starts the count again
    assert capsys.readouterr().err.count("Ctrl-C again") == 2


def test_one_answer_at_a_time(model_path, capsys):
    assert _chat(model_path, "--n", "2") == 2
    assert "n is 2" in capsys.readouterr().err
