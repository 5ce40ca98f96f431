"""What the draft's layers need to know of the rows of a block, made on the device in one launch: windows and angles.

Meaning: :meth:`deepinfer.layers.fused.draft_rows.DraftExpander.reference`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.step_tables import Angles, _store_angles


@triton.jit(do_not_specialize=["num_rows"])
def _draft_tables_kernel(
    anchors, floors, slots, frequencies, positions, window_index, angles, num_rows,
    BLOCK: tl.constexpr, WINDOW: tl.constexpr, WIDTH_P2: tl.constexpr, RING: tl.constexpr,
    HALF: tl.constexpr, HALF_P2: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    request, offset = row // BLOCK, row % BLOCK
    anchor = tl.load(anchors + request)
    position = tl.where(anchor >= 0, anchor + 1 + offset, -1)
    tl.store(positions + row, position)
    floor = tl.maximum(tl.load(floors + request), 0)
    slot = tl.load(slots + request)
    column = tl.arange(0, WIDTH_P2)
    seen = anchor - (WINDOW - 1) + column
    index = tl.where(seen >= floor, -2 - (slot * RING + seen % RING), -1)
    index = tl.where(column < WINDOW, index, request * BLOCK + column - WINDOW)
    index = tl.where(anchor >= 0, index, -1)
    width = WINDOW + BLOCK
    tl.store(window_index + row.to(tl.int64) * width + column, index, column < width)
    _store_angles(angles, frequencies, tl.maximum(position, 0), row, num_rows, HALF, HALF_P2)


def draft_tables(
    anchors: Tensor, floors: Tensor, slots: Tensor, frequencies: Tensor, *, block: int, window: int, ring_length: int
) -> tuple[Tensor, Tensor, Angles]:
    """Lay out the blocks behind some anchors.

    Args:
        anchors: ``[requests]`` int32, position of the last token whose context key is in the rings; -1 for padding.
        floors: ``[requests]`` int32, first position whose context key is there.
        slots: ``[requests]`` int32 state slots.
        frequencies: ``[rope / 2]`` float64.
        block: rows per request. window, ring_length: of the caches' geometry.
    Returns:
        positions ``[requests * block]`` int32 (-1 for padding), window index ``[requests * block, window + block]``
        int32 (context, oldest first, then the block's own rows), cosines and sines ``[requests * block, rope / 2]``.
    """
    rows, half, width = len(anchors) * block, frequencies.shape[0], window + block
    for tensor in (anchors, floors, slots):
        assert tensor.dtype == torch.int32, f"{tensor.dtype=}"
        assert len(tensor) == 1 or tensor.stride(0) == 1, f"{tensor.stride()=}"
    positions, window_index = anchors.new_empty(rows), anchors.new_empty(rows, width)
    angles = frequencies.new_empty(2, rows, half, dtype=torch.float32)
    _draft_tables_kernel[(rows,)](
        anchors, floors, slots, frequencies, positions, window_index, angles, rows,
        BLOCK=block, WINDOW=window, WIDTH_P2=triton.next_power_of_2(width), RING=ring_length,
        HALF=half, HALF_P2=triton.next_power_of_2(half), num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    return positions, window_index, (angles[0], angles[1])
