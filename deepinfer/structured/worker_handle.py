"""One compile worker as the engine sees it: started when needed, asked one thing at a time, killed when stuck."""

from __future__ import annotations

import contextlib
import select
import signal
import subprocess
import sys
import threading
import time
from typing import IO, Any

from deepinfer.structured.frames import read_frame, write_frame
from deepinfer.structured.grammar_text import GrammarKey
from deepinfer.structured.worker_process import Compiled, Refused, WorkerSettings

_PROGRAM = "import sys; sys.path[:] = {path!r}; sys.modules['torch'] = None; " + (
    "from deepinfer.structured.worker_process import main; main()"
)
_START_TIMEOUT_S = 60.0


class WorkerGoneError(Exception):
    """The worker ended while it worked on a grammar.

    Args:
        how: a sentence. was_killed: by SIGKILL, which is either ours or the operating system's, never its own doing.
    """

    def __init__(self, how: str, was_killed: bool) -> None:
        super().__init__(how)
        self.was_killed = was_killed


class WorkerTimeoutError(Exception):
    """The worker did not answer in time; it was killed."""


class WorkerHandle:
    """Owns at most one process. :meth:`compile` and :meth:`close` are for one thread, :meth:`kill` for any.

    Args:
        shows_messages: let the process write to our standard error (for debugging); else its messages are dropped.
    """

    def __init__(self, settings: WorkerSettings, shows_messages: bool = False) -> None:
        self.settings = settings
        self.shows_messages = shows_messages
        self.num_starts = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._is_condemned = False
        self._is_closed = False
        self._lock = threading.Lock()

    @property
    def pid(self) -> int | None:
        process = self._process
        return None if process is None else process.pid

    def compile(self, key: GrammarKey, timeout_s: float) -> Compiled | Refused:
        """Have a grammar compiled.

        Raises:
            WorkerTimeoutError: it takes longer than ``timeout_s``, not counting the start of a process.
            WorkerGoneError: the process ended, by itself or through :meth:`kill`; the message says how.
        """
        try:
            stdin, stdout = self._running()
            write_frame(stdin, key)
            return _read_before(stdout, time.monotonic() + timeout_s)
        except TimeoutError:
            self.kill()
            self._reap()
            raise WorkerTimeoutError from None
        except (EOFError, OSError) as error:
            raise self._gone() from error

    def _running(self) -> tuple[IO[bytes], IO[bytes]]:
        """Pipes to and from a live process, which is started if there is none."""
        process = self._process
        is_alive = process is not None and process.poll() is None and not self._is_condemned
        if not is_alive:
            self._reap()
            process = self._start()
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        if not is_alive:
            write_frame(process.stdin, self.settings)
            _read_before(process.stdout, time.monotonic() + _START_TIMEOUT_S)  # it says that it is ready
        return process.stdin, process.stdout

    def _start(self) -> subprocess.Popen[bytes]:
        program = _PROGRAM.format(path=[entry or "." for entry in sys.path])
        with self._lock:
            if self._is_closed:
                raise EOFError("the worker is closed")
            self._process = subprocess.Popen(
                [sys.executable, "-c", program],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=None if self.shows_messages else subprocess.DEVNULL,
                start_new_session=True,  # an interrupt from the terminal is for the engine, which closes us
            )
            self.num_starts += 1
            return self._process

    def kill(self, forever: bool = False) -> None:
        """End the process, whatever it is doing; the next :meth:`compile` starts another, unless ``forever``.

        Only sends the signal: the thread that waits in :meth:`compile` sees the pipe end and cleans up.
        """
        with self._lock:
            self._is_closed |= forever
            if self._process is not None:
                self._is_condemned = True
                self._process.kill()

    def close(self) -> None:
        """End the process and wait until it is gone. For good."""
        self.kill(forever=True)
        self._reap()

    def _gone(self) -> WorkerGoneError:
        code = self._reap()
        if code is None or code >= 0:
            return WorkerGoneError(f"the compile process ended with status {code}", False)
        name = signal.Signals(-code).name
        if name == "SIGXCPU":
            return WorkerGoneError(f"it takes more than {self.settings.cpu_seconds} s of processor time", False)
        return WorkerGoneError(f"the compile process was ended by {name}", name == "SIGKILL")

    def _reap(self) -> int | None:
        """Clean up after a process that ended or is about to; its exit status, or None if there was none."""
        with self._lock:
            process, self._process, self._is_condemned = self._process, None, False
        if process is None:
            return None
        for stream in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):  # what was not yet written has nowhere to go
                if stream is not None:
                    stream.close()
        try:
            return process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()


def _read_before(stream: IO[bytes], deadline: float) -> Any:
    """The next message, whose first byte has to come before ``deadline``. Raises TimeoutError."""
    ready, _, _ = select.select([stream], [], [], max(0.0, deadline - time.monotonic()))
    if not ready:
        raise TimeoutError
    return read_frame(stream)
