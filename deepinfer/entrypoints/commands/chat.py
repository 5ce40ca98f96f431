"""``deepinfer chat``: a conversation in the terminal, or with lines from a pipe."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field

from deepinfer.engine.outputs import StreamDelta
from deepinfer.entrypoints.default_model import describe_model
from deepinfer.entrypoints.engine_args import add_model_arguments, load_llm
from deepinfer.entrypoints.interrupts import Terminated
from deepinfer.entrypoints.llm import LLM
from deepinfer.entrypoints.sampling_flags import add_sampling_flags, sampling_params
from deepinfer.entrypoints.terminal import write
from deepinfer.errors import EngineError, RequestError
from deepinfer.sampling.params import SamplingParams

_HELP = """\
/system TEXT      begin again with a system message (without TEXT: with none)
/thinking on|off  let the model think before it answers
/reset            forget the conversation
/help             this list
/exit             leave (also Ctrl-D, or Ctrl-C twice)
Ctrl-C stops an answer; what was said stays in the conversation."""

_DEFAULT_MAX_TOKENS = 256
_END_OF_THOUGHT = "</think>"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's flags."""
    parser.add_argument("--system", default="", metavar="TEXT", help="system message")
    parser.add_argument("--thinking", action="store_true", help="let the model think before it answers")
    add_sampling_flags(parser)
    add_model_arguments(parser)


def run(namespace: argparse.Namespace) -> int:
    """Talk until the input ends."""
    with load_llm(namespace, max_num_seqs=1) as llm:
        config = llm.engine.config
        params = sampling_params(namespace, config.sampling, max_tokens=_DEFAULT_MAX_TOKENS)
        if params.n != 1:
            raise RequestError("n", params.n, why="a conversation has one answer at a time", fix="leave n out")
        print(f"{describe_model(config.model.path)}\n/help lists the commands.", file=sys.stderr)
        chat = Chat(llm, params, namespace.system, namespace.thinking)
        _talk(chat)
    return 0


@dataclass(slots=True)
class Chat:
    """One conversation: its messages so far, and how they are answered."""

    llm: LLM
    params: SamplingParams
    system: str = ""
    thinking: bool = False
    messages: list[dict[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reset()
        # The mark between thought and answer is a special token, so it has to be shown.
        self.params = SamplingParams.from_dict({**self.params.to_dict(), "skip_special_tokens": False})

    def reset(self) -> None:
        """Forget everything but the system message."""
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def ask(self, text: str, show: Callable[[str], None]) -> str:
        """Answer one message, piece by piece through ``show``. Ctrl-C ends the answer; what was said is kept.

        Returns:
            a line about the answer: tokens, speed, why it ended.
        Raises:
            RequestError: the message, or the conversation with it, can't be answered; it is not kept.
        """
        asked = [*self.messages, {"role": "user", "content": text}]
        prompt = self.llm.encode_conversation(asked, thinking=self.thinking)
        said: list[str] = []
        begin, count = time.perf_counter(), 0
        last: StreamDelta | None = None
        reason: str | None = "interrupted"
        try:
            with closing(self.llm.stream(prompt, self.params)) as deltas:  # type: ignore[type-var]
                for last in deltas:
                    said.append(last.text)
                    count += len(last.token_ids)
                    show(last.text)
            reason = last.finish_reason if last else None
        except Terminated:
            raise
        except KeyboardInterrupt:
            pass  # "interrupted" it is
        if last is not None and last.error is not None and not count:
            raise RequestError("conversation", f"{len(prompt.ids)} tokens", why=last.error, fix="/reset, or ask less")
        self.messages = [*asked, self._answer("".join(said))]
        elapsed_s = max(time.perf_counter() - begin, 1e-9)
        return f"[{count} tokens, {count / elapsed_s:.1f} tokens/s, {reason}]"

    def _answer(self, text: str) -> dict[str, str]:
        """The assistant's message; its thoughts are kept apart, as the chat format wants them."""
        if not self.thinking:
            return {"role": "assistant", "content": text}
        thought, _, content = text.partition(_END_OF_THOUGHT)
        return {"role": "assistant", "reasoning_content": thought, "content": content}


def _talk(chat: Chat) -> None:
    interrupted = False
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        except Terminated:
            raise
        except KeyboardInterrupt:
            if interrupted:
                return
            interrupted = True
            print("\nCtrl-C again, or /exit, leaves", file=sys.stderr)
            continue
        interrupted = False
        if line in ("/exit", "/quit"):
            return
        if line.startswith("/"):
            print(_command(chat, line), file=sys.stderr)
        elif line:
            _answer(chat, line)


def _answer(chat: Chat, line: str) -> None:
    try:
        summary = chat.ask(line, write)
    except EngineError as error:  # also a tokenizer without the tokens of this conversation
        print(f"error: {error}", file=sys.stderr)
        return
    print(flush=True)
    print(summary, file=sys.stderr)


def _command(chat: Chat, line: str) -> str:
    """Carry out a line that starts with a slash; returns what to say about it."""
    name, _, rest = line.partition(" ")
    rest = rest.strip()
    match name:
        case "/reset":
            chat.reset()
            return "new conversation"
        case "/system":
            chat.system = rest
            chat.reset()
            return "new conversation, " + ("with this system message" if rest else "without a system message")
        case "/thinking" if rest in ("on", "off"):
            chat.thinking = rest == "on"
            return f"thinking is {rest}"
        case "/help":
            return _HELP
        case _:
            return f"unknown command {line!r}; /help lists them"
