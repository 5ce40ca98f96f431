"""Compile what a function would launch, many kernels at once and before anything waits for them.

A kernel is compiled where it is launched first, so a first step compiles dozens, one after the other. Inside
:func:`compiling` launches of ours only note what they need, CUDA C++ and Triton alike; at its end everything noted is
there, made by as many threads as there are processors. Results inside are whatever memory holds: run only what looks
at no value on the host and has no operator of torch that takes indices from our kernels.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from typing import Any

import triton
from tqdm import tqdm
from triton.runtime.jit import JITFunction

from deepinfer.kernels import nvrtc


@contextmanager
def compiling(name: str, show_progress: bool = False) -> Iterator[None]:
    """Launches of this thread are noted instead of run. A kernel that does not compile is left to its first launch.

    Args:
        name: of the bar that shows, with ``show_progress``, how far the threads are.
    """
    futures: list[Future[Any]] = []
    with (
        ThreadPoolExecutor(os.cpu_count() or 1) as pool,
        _triton_only_compiles(pool, futures, name if show_progress else None),
        nvrtc.noting(lambda compilation: futures.append(pool.submit(compilation))),
    ):
        yield


@contextmanager
def _triton_only_compiles(pool: ThreadPoolExecutor, futures: list[Future[Any]], bar: str | None) -> Iterator[None]:
    """Triton's mode for this waits for its own compilations at the end; that for ``futures``, too, comes before."""
    run, owner = JITFunction.run, threading.get_ident()

    def noted(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        is_ours = threading.get_ident() == owner
        return run(self, *args, grid=grid, warmup=warmup or is_ours, **kwargs)

    with triton.AsyncCompileMode(pool, ignore_errors=True) as mode:
        JITFunction.run = noted
        try:
            yield
        finally:
            JITFunction.run = run
        every = [*futures, *mode.raw_futures]
        for _ in tqdm(as_completed(every), total=len(every), desc=bar, disable=bar is None):
            pass
