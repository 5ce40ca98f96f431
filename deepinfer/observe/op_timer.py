"""Where the time of a forward goes, by operator. Off unless somebody asks: only ``deepinfer bench`` does."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any


class OpTimer:
    """Times every operator of a model while its ``with`` block is open. Host clocks, as in ``StepTimer``.

    Layers call operators as attributes of one shared object, so putting timed functions there and taking them away
    again reaches all of them.

    Args:
        ops: the model's operators, an object with one function per attribute and ``explain()``.
    """

    def __init__(self, ops: Any) -> None:
        self._ops = ops
        self._originals: dict[str, Callable[..., Any]] = {}
        self.seconds: dict[str, float] = {}
        self.calls: dict[str, int] = {}

    def __enter__(self) -> OpTimer:
        assert not self._originals, "this timer is running already"
        for choice in self._ops.explain():
            original = getattr(self._ops, choice.op)
            self._originals[choice.op] = original
            setattr(self._ops, choice.op, self._timed(choice.op, original))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name, original in self._originals.items():
            setattr(self._ops, name, original)
        self._originals.clear()

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin
                self.calls[name] = self.calls.get(name, 0) + 1

        return timed
