"""What the engine asks of the machine that it runs on."""

from __future__ import annotations

from typing import Protocol

import torch


class Platform(Protocol):
    """One kind of accelerator. Holds no state: every method reads the machine when it is called."""

    name: str
    """``cpu``, ``nvidia`` or ``ascend``: the values of ``DEEPINFER_ACCELERATOR``."""

    is_preview: bool
    """Works, but is not taken unless somebody asks for it by name."""

    def unavailable_because(self) -> str | None:
        """Why the engine cannot run here, as the end of a sentence; None when it can."""

    def device(self) -> torch.device:
        """Where weights and caches live. Only for a platform that is available."""

    def available_memory_bytes(self) -> int:
        """Memory of the device that this process may still take. Only for a platform that is available."""

    def num_threads(self) -> int:
        """Host threads that one forward may use, >= 1."""

    def facts(self) -> dict[str, str]:
        """Name and value of what a bug report should say about the machine."""
