"""Collects named intermediates so that another implementation can be compared tensor by tensor."""

from __future__ import annotations

from typing import Any


class Recorder:
    """Writes into a dictionary under a prefix; without a dictionary it does nothing.

    Values are kept as they are, gradients included. A reader who wants numbers only runs under ``torch.no_grad``.
    """

    def __init__(self, store: dict[str, Any] | None, prefix: str = "") -> None:
        self._store = store
        self._prefix = prefix

    def __call__(self, name: str, value: Any) -> None:
        if self._store is not None:
            self._store[self._prefix + name] = value

    def scope(self, name: str) -> Recorder:
        """A recorder that puts ``name`` and a dot before every name."""
        return Recorder(self._store, f"{self._prefix}{name}.")
