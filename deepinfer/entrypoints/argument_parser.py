"""The parser of the command line: argparse, with errors of three lines that name what was probably meant."""

from __future__ import annotations

import argparse
import itertools
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from deepinfer.config.values import nearest

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

_MOST_LONGER_FLAGS = 4
_TRUTHS = ("true", "false")


class ArgumentParser(argparse.ArgumentParser):
    """Says what is wrong in three lines, like every other error, instead of after pages of usage.

    Flags are written out: an abbreviation would change its meaning with the next flag that begins like it.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **options})

    def error(self, message: str) -> NoReturn:
        self._refuse(message, *self._advice(message))

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Arguments that a command does not know are its own error: the library leaves them to the program above."""
        words = list(sys.argv[1:] if args is None else args)
        self._refuse_truths(words)
        namespace, unknown = super().parse_known_args(words, namespace)
        if unknown:
            self._refuse(f"unrecognized arguments: {' '.join(unknown)}", *self._about_unknown(words, unknown))
        return namespace, unknown

    def print_help(self, file: SupportsWrite[str] | None = None) -> None:
        """The library's ignores an output that cannot be written."""
        print(self.format_help(), end="", file=file)

    def _refuse(self, what: str, why: str, fix: str) -> NoReturn:
        print(f"{self.prog}: error: {what}\n  why: {why}\n  fix: {fix}", file=sys.stderr)
        self.exit(2)

    @property
    def _help_command(self) -> str:
        return f"`{self.prog} --help` lists the arguments and the form of their values"

    # ---- what the library says, and what is behind it ----------------------------------------------------------------

    def _advice(self, message: str) -> tuple[str, str]:
        """Why and fix for a message of the library's."""
        if "ignored explicit argument" in message:
            flag = _flag_of(message)
            more = "; a text that begins with a minus stands behind --" if self._takes_texts else ""
            return f"{flag} takes no value", self._alone(flag) + more
        found = re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message)
        if found is not None:
            choices = [choice.strip("'\" ") for choice in found[2].split(",")]
            similar = nearest(found[1], choices)
            hint = f"did you mean {similar}? " if similar else ""
            if "COMMAND" in message:
                return (
                    "there is no such command",
                    f"{hint}the command comes first, its flags behind it; {self._help_command}",
                )
            return "it is one of these", hint + self._help_command
        found = re.search(r": expected (one|\d+) argument", message)
        if found is not None:
            flag = _flag_of(message)
            if found[1] != "one":
                return f"it takes {found[1]} values", self._help_command
            why = "no value stands behind it, or one that begins with a minus and is no plain number"
            return why, f"write {flag} VALUE, or {flag}=-VALUE; {self._help_command}"
        if "arguments are required" in message:
            return "the command needs them", self._help_command
        if "not allowed with argument" in message:
            return "they contradict each other", "give one of the two"
        return "the value can't be used", self._help_command

    # ---- words that nothing takes ------------------------------------------------------------------------------------

    def _about_unknown(self, words: Sequence[str], unknown: Sequence[str]) -> tuple[str, str]:
        """Why and fix for words that the library left over. Those behind an unknown flag are its value."""
        flags = [word.split("=", 1)[0] for word in unknown if _is_flag(word)]
        if flags:
            hints = [hint for flag in flags if (hint := self._hint(flag))]
            why = f"there is no flag {flags[0]}" if len(flags) == 1 else f"there are no flags {', '.join(flags)}"
            return why, " ".join([*hints, self._help_command])
        before = words[_last_index(words, unknown[0]) - 1]
        text = next((word for word in unknown if word != "--"), unknown[0])
        if self._takes_no_value(before):
            more = f"; a further text is --prompt {text!r}" if self._takes_texts else ""
            return f"{before} takes no value", self._alone(before) + more
        if self._takes_texts:
            return (
                "texts stand side by side, and others came before a flag",
                f"write --prompt {text!r}, or put it first",
            )
        return f"nothing is left that takes {text!r}", f"leave it out; {self._help_command}"

    @property
    def _takes_texts(self) -> bool:
        return any(action.dest == "prompts" for action in self._actions)

    def _hint(self, flag: str) -> str | None:
        """Which flags may have been meant: those that begin like this one, otherwise the one that is most like it."""
        known = [name for name in self._option_string_actions if name.startswith("--")]
        flag = flag.replace("_", "-")
        longer = [name for name in known if name.startswith(flag)] if len(flag) > len("--") else []
        if not 0 < len(longer) <= _MOST_LONGER_FLAGS:
            # Without the dashes: they alone would make short names alike.
            similar = nearest(flag.lstrip("-"), [name.removeprefix("--") for name in known])
            longer = [f"--{similar}"] if similar else []
        return f"did you mean {' or '.join(longer)}?" if longer else None

    # ---- flags without a value ---------------------------------------------------------------------------------------

    def _refuse_truths(self, words: Sequence[str]) -> None:
        """``--ignore-eos true`` where texts are taken: true would become a text without anybody noticing."""
        for flag, word in itertools.pairwise(words):
            if flag == "--":
                return
            if isinstance(self._option_string_actions.get(flag), argparse._HelpAction):
                return  # the help is what it gives, whatever stands behind
            if word.lower() in _TRUTHS and self._takes_no_value(flag):
                self._refuse(f"{flag} {word}", f"{flag} takes no value", self._alone(flag))

    def _takes_no_value(self, word: str) -> bool:
        action = self._option_string_actions.get(word)
        return action is not None and action.nargs == 0

    def _alone(self, flag: str) -> str:
        """How a flag without a value is written."""
        action = self._option_string_actions.get(flag)
        if isinstance(action, argparse.BooleanOptionalAction):
            return f"write {action.option_strings[0]} alone, or {action.option_strings[-1]} for the opposite"
        return f"write {flag} alone, or leave it out"


def _is_flag(word: str) -> bool:
    return word.startswith("-") and word not in ("-", "--") and not re.fullmatch(r"-[\d.].*", word)


def _flag_of(message: str) -> str:
    """``--ignore-eos`` of ``argument --ignore-eos/--no-ignore-eos: ...``."""
    found = re.match(r"argument ([^/:]+)", message)
    return found[1] if found else "the flag"


def _last_index(words: Sequence[str], word: str) -> int:
    """Where ``word`` stands last: the library gives the first ones away, so what it leaves over is at the end."""
    return len(words) - 1 - list(reversed(words)).index(word)
