"""Compile what a function would launch, many kernels at once and before anything waits for them.

A kernel is compiled where it is launched first, so a first step compiles dozens, one after the other. Inside
:func:`compiling` launches of ours only note what they need, CUDA C++ and Triton alike; at its end everything noted is
there, made by a thread for each processor. Results inside are whatever memory holds: run only what looks
at no value on the host and has no operator of torch that takes indices from our kernels.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from typing import Any

import triton
from tqdm import tqdm
from triton.runtime.jit import JITFunction

from deepinfer.kernels import nvrtc
from deepinfer.platforms.host_limits import num_processors

logger = logging.getLogger(__name__)

_MOST_THREADS = 32
"""Each compiler takes memory of its own, and an engine has about a hundred kernels."""
_ONE_AT_A_TIME = threading.Lock()
"""While it is held, ``JITFunction.run`` is ours: a second engine's start would put it back too early."""


@contextmanager
def compiling(name: str, show_progress: bool = False) -> Iterator[None]:
    """Launches of this thread are noted instead of run. A kernel that does not compile is left to its first launch.

    Args:
        name: of the bar that shows, with ``show_progress``, how far the threads are.
    """
    futures: list[Future[Any]] = []
    with (
        _ONE_AT_A_TIME,
        ThreadPoolExecutor(min(_MOST_THREADS, num_processors())) as pool,
        triton.AsyncCompileMode(pool, ignore_errors=True) as mode,
    ):
        try:
            with _triton_only_compiles(), nvrtc.noting(lambda compilation: futures.append(pool.submit(compilation))):
                yield
            every = [*futures, *mode.raw_futures]
            for _ in tqdm(as_completed(every), total=len(every), desc=name, disable=not show_progress):
                pass
        except BaseException:  # an interrupt shall not wait for what nobody wants any more
            for future in (*futures, *mode.raw_futures):
                future.cancel()
            raise
    failed = [error for error in (future.exception() for future in every) if error is not None]
    if failed:
        logger.warning(
            "%d of %d %s could not be compiled ahead, the first: %s", len(failed), len(every), name, failed[0]
        )


@contextmanager
def _triton_only_compiles() -> Iterator[None]:
    run, owner = JITFunction.run, threading.get_ident()

    def noted(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        is_ours = threading.get_ident() == owner
        return run(self, *args, grid=grid, warmup=warmup or is_ours, **kwargs)

    JITFunction.run = noted
    try:
        yield
    finally:
        JITFunction.run = run
