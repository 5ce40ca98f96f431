"""The rows of draft blocks in fixed shapes, from three integers per request: a graph can make them, as in
:mod:`deepinfer.layers.fused.device_rows`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.layers.caches import CacheGeometry
from deepinfer.layers.fused.device_rows import Angles, DeviceRows
from deepinfer.ops.rope import rope_angles


@dataclass(frozen=True, slots=True)
class DraftExpander:
    """Lays out the block behind each request's last accepted token, without looking at a value.

    Args (fields): block: rows per request. frequencies: of plain layers, float64 on the device.
    """

    geometry: CacheGeometry
    block: int
    frequencies: Tensor

    def expand(self, anchors: Tensor, floors: Tensor, slots: Tensor) -> DeviceRows:
        """Rows ``anchor + 1 .. anchor + block`` of every request; each sees the context window and its whole block.

        Args:
            anchors: ``[requests]`` int32, position of the last token whose features are in the rings; -1 for padding,
                whose rows see nothing and reach no expert.
            floors: ``[requests]`` int32, first position whose features are in the rings.
            slots: ``[requests]`` int32 state slots.
        """
        if anchors.is_cuda:
            from deepinfer.kernels.draft_tables import draft_tables  # Triton is there where CUDA is

            geometry = self.geometry
            tables = draft_tables(
                anchors,
                floors,
                slots,
                self.frequencies,
                block=self.block,
                window=geometry.window,
                ring_length=geometry.ring_length,
            )
            return draft_rows(*tables)
        return draft_rows(*self.reference(anchors, floors, slots))

    def reference(self, anchors: Tensor, floors: Tensor, slots: Tensor) -> tuple[Tensor, Tensor, Angles]:
        """Positions, window index and angles in PyTorch: the meaning of the kernel."""
        window, ring = self.geometry.window, self.geometry.ring_length
        device, requests = anchors.device, len(anchors)
        is_live = anchors[:, None] >= 0
        own = torch.arange(self.block, device=device, dtype=torch.int32)
        positions = torch.where(is_live, anchors[:, None] + 1 + own, -1).flatten()
        seen = anchors[:, None] - torch.arange(window - 1, -1, -1, device=device, dtype=torch.int32)
        context = torch.where(seen >= floors[:, None].clamp_min(0), -2 - (slots[:, None] * ring + seen % ring), -1)
        first = torch.arange(requests, device=device, dtype=torch.int32)[:, None] * self.block
        index = torch.where(is_live, torch.cat((context, first + own), dim=1), -1)  # [requests, window + block]
        index = index.repeat_interleave(self.block, dim=0).to(torch.int32)
        return positions, index, rope_angles(positions.clamp_min(0), self.frequencies)


def draft_rows(positions: Tensor, window_index: Tensor, angles: Angles) -> DeviceRows:
    """Rows that see context keys in the rings and their own block, and store nothing.

    Args:
        positions: ``[rows]`` int32, -1 for padding. window_index: ``[rows, w]`` int32.
        angles: ``[rows, rope / 2]`` float32 each.
    """
    nothing = torch.full_like(positions, -1)
    return DeviceRows(
        token_ids=nothing,
        positions=positions,
        sequence=nothing,
        block_tables=nothing[:1, None],
        ring_slot=nothing,
        keys_first=False,
        window_index=window_index,
        plain_angles=angles,
        compressed_angles=angles,
        streams={},
        spans=None,
    )
