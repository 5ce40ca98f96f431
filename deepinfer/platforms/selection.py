"""Which platform the engine runs on, decided once at start-up."""

from __future__ import annotations

from deepinfer.errors import ConfigError
from deepinfer.platforms.ascend import AscendPlatform
from deepinfer.platforms.cpu import CpuPlatform
from deepinfer.platforms.interface import Platform
from deepinfer.platforms.nvidia import NvidiaPlatform

PREFERENCE: tuple[Platform, ...] = (NvidiaPlatform(), AscendPlatform(), CpuPlatform())
"""Best first; the CPU is always available, so it comes last."""


def select_platform(accelerator: str | None, known: tuple[Platform, ...] = PREFERENCE) -> Platform:
    """The named platform, or the best available one when ``accelerator`` is None.

    Raises:
        ConfigError: the name is unknown, or that platform cannot be used here; the message says why not.
    """
    if accelerator is None:
        return next(
            platform for platform in known if not platform.is_preview and platform.unavailable_because() is None
        )
    by_name = {platform.name: platform for platform in known}
    if accelerator not in by_name:
        names = ", ".join(sorted(by_name))
        raise ConfigError(
            f"accelerator is {accelerator!r}",
            why=f"the engine knows {names}",
            fix=f"set it to one of {names}, or leave it unset to detect",
        )
    reason = by_name[accelerator].unavailable_because()
    if reason is not None:
        usable = ", ".join(platform.name for platform in known if platform.unavailable_because() is None)
        raise ConfigError(
            f"accelerator is {accelerator!r}", why=f"it is not available, because {reason}", fix=f"use {usable}"
        )
    return by_name[accelerator]


def passed_over(chosen: Platform, known: tuple[Platform, ...] = PREFERENCE) -> dict[str, str]:
    """Platforms that would have been preferred to ``chosen``, and why each was passed over."""
    reasons = {}
    for platform in known:
        if platform.name == chosen.name:
            break
        reason = platform.unavailable_because()
        if reason is None and platform.is_preview:
            reason = "not all of it has been tried on hardware yet: taken when asked for by name"
        if reason is not None:
            reasons[platform.name] = reason
    return reasons
