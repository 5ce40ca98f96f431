"""The ``deepinfer`` command: arguments in, one command run, an exit code out.

Each command is a module of :mod:`deepinfer.entrypoints.commands` with ``add_arguments(parser)`` and ``run(namespace)``.
Only the module of the command that was asked for is imported, so that ``deepinfer --help`` answers at once.

Exit codes: 0, 1 (a check said no), 2 (a mistake in what was given; one message says what, why and what to do), 130
(Ctrl-C), 143 (SIGTERM).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import logging
import os
import signal
import sys
from collections.abc import Sequence

from deepinfer.entrypoints.argument_parser import ArgumentParser
from deepinfer.entrypoints.interrupts import termination_as_interrupt
from deepinfer.errors import EngineError

PROGRAM = "deepinfer"
INTERRUPTED, TERMINATED = 130, 143
"""Exit codes after Ctrl-C and SIGTERM: 128 and the number of the signal, as shells count."""

COMMANDS: dict[str, str] = {
    "generate": "complete prompts",
    "chat": "talk to a model in the terminal",
    "inspect": "sizes and layers of a checkpoint, from its headers",
    "doctor": "what this machine, this installation and this configuration come to",
    "make-checkpoint": "write a random checkpoint in the released format",
    "bench": "measure prefill, decoding, operators and engine overhead",
    "eval": "score answers, perplexity and drafts of an engine configuration",
    "calibrate": "fit the draft's confidence to what an engine logged",
    "demo": "generate from a few prompts with a small model",
}
"""Name and help; the module is the name with underscores."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: without the program's name; those of the process when None.
    Returns:
        the exit code. Malformed arguments leave through ``SystemExit(2)``, as always with argparse.
    """
    _have_streams()
    given = list(sys.argv[1:] if arguments is None else arguments)
    with termination_as_interrupt() as termination:
        code = _guarded(given)
    if arguments is None and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # All is said and flushed: Ctrl-C while the interpreter closes would only end in a traceback.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    return TERMINATED if code == INTERRUPTED and termination.is_requested else code


def _guarded(given: Sequence[str]) -> int:
    """Run one command, and turn what it can raise into a message and an exit code."""
    # Known before the flags are parsed: writing the help can fail as well.
    command, shows_traceback = PROGRAM, "--traceback" in given
    try:
        try:
            # Loads torch for most commands, so Ctrl-C may well come in here.
            parser = build_parser(next((word for word in given if not word.startswith("-")), None))
            namespace = parser.parse_args(given)
            if namespace.command is None:
                parser.print_help()
                return 0
            command = f"{PROGRAM} {namespace.command}"
            return _run(namespace)
        finally:
            sys.stdout.flush()  # here, where a failure is reported like every other one
    except EngineError as error:
        if shows_traceback:
            raise
        _complain(command, error.what, error.why, error.fix)
        return 2
    except KeyboardInterrupt:
        if shows_traceback:
            raise
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output left (`deepinfer ... | head`).
        _discard_output()
        return 0
    except OSError as error:
        if shows_traceback:
            raise
        _discard_output()
        what = "standard output or a file" if error.filename is None else repr(error.filename)
        _complain(
            command,
            f"{what} could not be read or written",
            str(error),
            "make room, check the permissions, or choose another place; --traceback shows where it happened",
        )
        return 2


def _run(namespace: argparse.Namespace) -> int:
    logging.basicConfig(
        level=logging.INFO if namespace.verbose else logging.WARNING, format="%(levelname)s %(name)s: %(message)s"
    )
    _never_fail_on_characters()
    code: int = namespace.run(namespace)
    return code


def _have_streams() -> None:
    """A process may be started without an output; what it prints then goes nowhere."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - as long as the process
    if sys.stderr is None:  # None as the file of a print would be standard output
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


def _complain(command: str, what: str, why: str, fix: str) -> None:
    with contextlib.suppress(OSError):  # nobody hears it where standard error can't be written: the exit code is left
        print(f"{command}: error: {what}\n  why: {why}\n  fix: {fix}", file=sys.stderr)


def _discard_output() -> None:
    """Let what is still buffered go nowhere where it cannot be written: Python would complain once more at its exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def build_parser(command: str | None = None) -> argparse.ArgumentParser:
    """The parser, with the arguments of ``command`` filled in; the other commands only show their help line."""
    parser = ArgumentParser(
        prog=PROGRAM,
        description="Inference engine for DeepSeek-V4.1-Flash.",
        epilog="deepinfer COMMAND --help lists what a command takes; docs/cli.md has examples.",
    )
    parser.add_argument(
        "--version", action="version", version=f"deepinfer {importlib.import_module('deepinfer').__version__}"
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, summary in COMMANDS.items():
        sub = commands.add_parser(name, help=summary, description=summary)
        if name == command:
            module = importlib.import_module(f"deepinfer.entrypoints.commands.{name.replace('-', '_')}")
            module.add_arguments(sub)
            sub.set_defaults(run=module.run)
        sub.add_argument("-v", "--verbose", action="store_true", help="log what the engine decides and does")
        sub.add_argument("--traceback", action="store_true", help="show where an error came from")
    return parser


def _never_fail_on_characters() -> None:
    """A terminal that can't show a character shows a replacement."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


if __name__ == "__main__":
    sys.exit(main())
