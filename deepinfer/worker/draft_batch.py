"""Lays out the block of draft rows behind each request's last accepted token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from deepinfer.layers.caches import CacheGeometry
from deepinfer.ops.step_views import RingView


@dataclass(frozen=True, slots=True)
class DraftBatch:
    """Device tensors of one draft pass, int64."""

    positions: Tensor
    """``[requests * block]``"""
    window: RingView


def build_draft_batch(
    anchors: Sequence[int],
    floors: Sequence[int],
    slots: Sequence[int],
    block: int,
    geometry: CacheGeometry,
    device: torch.device,
) -> DraftBatch:
    """Rows ``anchor + 1 .. anchor + block`` of every request, each seeing the context window and its whole block.

    Args:
        anchors: position of the last token whose features are in the rings.
        floors: first position whose features are in the rings (0 unless they were skipped).
        slots: state slots.
        block: rows per request.
    """
    anchor = np.asarray(anchors, dtype=np.int64)
    floor = np.maximum(np.asarray(floors, dtype=np.int64), anchor - geometry.window + 1)
    counts = np.maximum(anchor - floor + 1, 0)
    begins = np.cumsum(counts) - counts
    request = np.repeat(np.arange(len(anchor)), counts)
    context = floor[request] + np.arange(int(counts.sum())) - begins[request]
    previous = np.asarray(slots, dtype=np.int64)[request] * geometry.ring_length + context % geometry.ring_length
    rows = len(anchor) * block
    width = int(counts.max())
    place = np.arange(width)
    keys = np.where(place < counts[:, None], rows + begins[:, None] + place, -1)  # [requests, width]
    own = np.arange(rows).reshape(-1, block)
    index = np.concatenate((keys, own), axis=1).repeat(block, axis=0)
    positions = (anchor[:, None] + 1 + np.arange(block)).reshape(-1)
    empty = torch.empty(0, dtype=torch.int64, device=device)
    return DraftBatch(
        positions=torch.from_numpy(positions).to(device),
        window=RingView(
            index=torch.from_numpy(index).to(device),
            previous=torch.from_numpy(previous).to(device),
            store_rows=empty,
            store_slots=empty,
        ),
    )
