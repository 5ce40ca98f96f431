"""Compile a function of tensors on its own, so that all layers share one compiled kernel."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])

_enabled = False


def enable_compilation() -> None:
    """From now on functions marked :func:`fused` run compiled. Call once, before the first of them runs."""
    global _enabled  # one switch for the process: compiled functions are module-level
    _enabled = True
    torch._dynamo.config.cache_size_limit = 64  # several sequence lengths and ratios


def fused(function: Function) -> Function:
    """Mark a pure function of tensors for compilation; eager until :func:`enable_compilation`."""
    compiled: Callable[..., Any] | None = None

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal compiled
        if not _enabled:
            return function(*args, **kwargs)
        if compiled is None:
            compiled = torch.compile(function, dynamic=False)
        return compiled(*args, **kwargs)

    return call  # type: ignore[return-value]
