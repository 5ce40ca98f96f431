"""One function per operator: a PyTorch reference that defines it, accelerated implementations registered beside it.

``select_ops`` chooses once, at start-up, and the result is handed to the model. ``explain`` says which implementation
each operator uses and why the others were passed over; ``deepinfer doctor`` prints it.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from deepinfer.errors import ConfigError

_REGISTRY: dict[str, Op] = {}


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
    _REGISTRY[operator.name] = operator
    return operator


def all_ops() -> dict[str, Op]:
    """Every declared operator by name."""
    import deepinfer.ops.catalogue  # noqa: F401  (declares them all)

    return dict(_REGISTRY)


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


def _choose(operator: Op, platform: str, dims: Any, pin: str | None) -> tuple[Callable[..., Any], Choice]:
    passed_over = []
    for implementation in operator.implementations:
        if pin is not None and implementation.name != pin:
            passed_over.append(f"{implementation.name}: not the pinned one")
            continue
        if implementation.platforms and platform not in implementation.platforms:
            refusal: str | None = f"needs {' or '.join(implementation.platforms)}"
        else:
            refusal = implementation.accepts(dims)
        if refusal is None:
            why = "pinned" if pin else "best that covers this machine and model"
            return implementation.function, Choice(operator.name, implementation.name, why)
        passed_over.append(f"{implementation.name}: {refusal}")
    if pin not in (None, "reference"):
        raise ConfigError(
            f"ops pin {operator.name}={pin}",
            why="; ".join(passed_over) or "there is only the reference",
            fix=f"choose from {', '.join([i.name for i in operator.implementations] + ['reference'])}",
        )
    reason = "pinned" if pin else "; ".join(passed_over) or "the only implementation on this platform"
    return operator.reference, Choice(operator.name, "reference", reason)


def parse_pins(text: str) -> dict[str, str]:
    """``"moe=reference,attention=triton"`` to a mapping; ``all=...`` applies to every operator.

    Raises:
        ConfigError: a malformed pair or an unknown operator.
    """
    pins: dict[str, str] = {}
    known = [*all_ops(), "all"]
    for pair in filter(None, (part.strip() for part in text.split(","))):
        name, separator, implementation = pair.partition("=")
        if not separator or not implementation:
            raise ConfigError(f"ops pin {pair!r}", why="a pin is OP=IMPLEMENTATION", fix="for example all=reference")
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            raise ConfigError(
                f"ops pin {pair!r}",
                why=f"there is no operator {name!r}",
                fix=f"did you mean {near[0]!r}?" if near else f"choose from {', '.join(sorted(known))}",
            )
        pins[name] = implementation
    return pins


def select_ops(platform: str, dims: Any, pins: Mapping[str, str] | None = None) -> Ops:
    """Choose an implementation for every operator.

    Args:
        platform: ``"cpu"``, ``"nvidia"`` or ``"ascend"``.
        dims: the model's text configuration, asked by each implementation whether its sizes are covered.
        pins: from :func:`parse_pins`.
    Raises:
        ConfigError: a pinned implementation can't run here.
    """
    pins = pins or {}
    chosen = {}
    for name, operator in all_ops().items():
        pin = pins.get(name)
        if pin is None and pins.get("all"):
            wanted = pins["all"]
            has_it = wanted == "reference" or any(i.name == wanted for i in operator.implementations)
            pin = wanted if has_it else None
        chosen[name] = _choose(operator, platform, dims, pin)
    return Ops(chosen)
