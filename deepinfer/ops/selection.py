"""Chooses an implementation for every operator, once, at start-up, with a reason for each."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any

from deepinfer.errors import ConfigError
from deepinfer.ops import catalogue
from deepinfer.ops.registry import REGISTRY, Choice, Op, Ops


def all_ops() -> dict[str, Op]:
    """Every declared operator by name."""
    assert catalogue.__all__, "importing the catalogue declares the operators"
    return dict(REGISTRY)


def choose(operator: Op, platform: str, dims: Any, pin: str | None) -> tuple[Callable[..., Any], Choice]:
    """The first implementation that covers platform and sizes, or the pinned one.

    Raises:
        ConfigError: the pinned one can't run here.
    """
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
    wanted = pins.get("all")
    offered = {each.name for operator in all_ops().values() for each in operator.implementations} | {"reference"}
    if wanted is not None and wanted not in offered:
        raise ConfigError(
            f"ops pin all={wanted}",
            why="no operator has an implementation of that name",
            fix=f"choose from {', '.join(sorted(offered))}",
        )
    chosen = {}
    for name, operator in all_ops().items():
        pin = pins.get(name)
        if pin is None and wanted is not None:
            has_it = wanted == "reference" or any(i.name == wanted for i in operator.implementations)
            pin = wanted if has_it else None
        chosen[name] = choose(operator, platform, dims, pin)
    return Ops(chosen)
