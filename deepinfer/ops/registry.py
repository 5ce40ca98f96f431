"""One function per operator: a PyTorch reference that defines it, accelerated implementations registered beside it.

Which implementation runs is chosen once, at start-up, by :mod:`deepinfer.ops.selection`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

REGISTRY: dict[str, Op] = {}
"""Every operator that was declared so far, by name."""


@dataclass(frozen=True)
class Implementation:
    """One way to compute an operator."""

    name: str
    function: Callable[..., Any]
    platforms: tuple[str, ...] = ()
    """Platforms that can run it; empty means all."""
    accepts: Callable[[Any], str | None] = lambda dims: None
    """Given the model's text configuration, None or the reason why its sizes are not covered."""


@dataclass
class Op:
    """An operator: call it to run the reference."""

    name: str
    reference: Callable[..., Any]
    implementations: list[Implementation] = field(default_factory=list)
    """Best first; the reference is always the last resort."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.reference(*args, **kwargs)

    def register(
        self,
        name: str,
        *,
        platforms: tuple[str, ...] = (),
        accepts: Callable[[Any], str | None] = lambda dims: None,
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Decorator that adds an implementation; those registered first are preferred."""

        def add(function: Callable[..., Any]) -> Callable[..., Any]:
            self.implementations.append(Implementation(name, function, platforms, accepts))
            return function

        return add


def op(function: Callable[..., Any]) -> Op:
    """Declare an operator; the decorated function is its reference."""
    operator = Op(function.__name__, function)
    operator.__doc__ = function.__doc__
    REGISTRY[operator.name] = operator
    return operator


@dataclass(frozen=True, slots=True)
class Choice:
    """Which implementation was selected and why."""

    op: str
    implementation: str
    reason: str


class Ops:
    """The selected implementation of every operator, as attributes: ``ops.rms_norm(x, w, eps)``."""

    def __init__(self, chosen: Mapping[str, tuple[Callable[..., Any], Choice]]) -> None:
        self._choices = tuple(choice for _, choice in chosen.values())
        for name, (function, _) in chosen.items():
            setattr(self, name, function)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        raise AttributeError(f"no operator named {name}")

    def explain(self) -> tuple[Choice, ...]:
        """One line per operator for ``deepinfer doctor``."""
        return self._choices
