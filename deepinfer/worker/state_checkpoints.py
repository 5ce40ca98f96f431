"""States of sequences in host memory: all rings of one state slot, copied out and in (spec 6.3)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from deepinfer.layers.caches import ModelCaches
from deepinfer.messages import StateCopy


class StateCheckpoints:
    """Copies whole state slots: window rings of all layers, compressor state, draft rings.

    A position lies at the same place of a ring in every slot, so a state fits any slot. Whole rings are copied: of
    positions at or behind the boundary they hold what some step left there, and no row sees a position before it has
    been written again. Copies are queued on the stream that the layers run on, so they see all steps before and none
    behind; on an accelerator the host buffers are pinned and nobody waits.
    """

    def __init__(self, caches: ModelCaches) -> None:
        geometry = caches.geometry
        layers = [*caches.layers, *caches.draft]
        rings = [layer.window.data for layer in layers] + [layer.pairs for layer in layers if layer.pairs is not None]
        self._parts = [ring.unflatten(0, (geometry.num_slots, -1)) for ring in rings]
        self._kept: dict[int, list[Tensor]] = {}

    @property
    def num_bytes(self) -> int:
        """Host memory in use; it grows with the places that were ever used."""
        return sum(part.numel() * part.element_size() for parts in self._kept.values() for part in parts)

    def save(self, copies: Iterable[StateCopy]) -> None:
        """From state slots to places in host memory."""
        for copy in copies:
            kept = self._kept.get(copy.place)
            if kept is None:
                kept = self._kept[copy.place] = [self._buffer(part[copy.slot]) for part in self._parts]
            for buffer, part in zip(kept, self._parts, strict=True):
                buffer.copy_(part[copy.slot], non_blocking=True)

    def restore(self, copies: Iterable[StateCopy]) -> None:
        """From places in host memory to state slots."""
        for copy in copies:
            assert copy.place in self._kept, f"nothing was saved at place {copy.place}"
            for buffer, part in zip(self._kept[copy.place], self._parts, strict=True):
                part[copy.slot].copy_(buffer, non_blocking=True)

    @staticmethod
    def _buffer(state: Tensor) -> Tensor:
        return torch.empty(state.shape, dtype=state.dtype, device="cpu", pin_memory=state.device.type == "cuda")
