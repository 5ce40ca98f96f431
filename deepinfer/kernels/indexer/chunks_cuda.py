"""Launch of ``cuda/index_chunks.cu``: scores of chunks of rows, for the released widths on Hopper."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.kernels import nvrtc

MAX_ROWS = 8192
"""Of a launch; more take several."""
_RECORD = 68
_POINTERS = ("weights", "keys", "table", "sequence", "visible", "out")
_NUMBERS = ("weights_stride", "table_stride", "out_stride", "rows", "min_scored")


class _Arguments(ctypes.Structure):
    _fields_ = (*((name, ctypes.c_void_p) for name in _POINTERS), *((name, ctypes.c_int) for name in _NUMBERS))


@dataclass(frozen=True, slots=True)
class Geometry:
    """Size and pipeline of a CTA. Without influence on a result."""

    columns: int = 128
    """Rows times heads of a query tile: a multiple of the heads; 64, 96 or 128."""
    warpgroups: int = 2
    """That multiply, 128 keys each: 2 or 3."""
    stages: int = 4
    """Query tiles in flight."""
    group_rows: int = 512
    """Rows that share expanded keys: a multiple of a tile's rows."""
    piece_units: int = 128
    """Units of work that a CTA takes at a time, about: query tiles, each times the CTA's keys."""

    def shared_bytes(self, rows: int, heads: int) -> int:
        """Dynamic shared memory for ``rows`` rows."""
        work_bytes = 16 + 4 * -(-self.columns // heads // 4) * 4
        ring = self.stages * (self.columns * (2 * 128 + 2) + work_bytes + 16)
        return 1024 + ring + self.warpgroups * 128 * _RECORD + 8 + 16 * (self.warpgroups + 1) + 4 * rows


def default_geometry(heads: int) -> Geometry:
    """Four rows in a tile, or as many as fit."""
    return Geometry(columns=min(128, 4 * heads))


def constants(geometry: Geometry, heads: int, entries_per_block: int) -> dict[str, int]:
    """What the kernel is compiled for."""
    return {
        "HEADS": heads,
        "PER_BLOCK": entries_per_block,
        "WGS": geometry.warpgroups,
        "N": geometry.columns,
        "STAGES": geometry.stages,
        "GROUP": geometry.group_rows,
        "PIECE": geometry.piece_units,
    }


def accepts(heads: int, width: int, entries_per_block: int, device: torch.device) -> bool:
    """Whether the kernel covers the model's widths and runs on ``device``. Says nothing of a step."""
    aligned = entries_per_block % 8 == 0  # runs of 8 keys are contiguous and aligned
    return width == 128 and heads in (16, 32, 64) and aligned and nvrtc.is_available(device)


def score_chunks(
    query: Tensor,
    head_weights: Tensor,
    index_keys: Tensor,
    block_table: Tensor,
    row_sequence: Tensor,
    num_visible: Tensor,
    order_keys: Tensor,
    min_scored: int,
    entries_per_block: int,
    max_visible: int | None = None,
    geometry: Geometry | None = None,
    num_ctas: int | None = None,
) -> None:
    """Arguments as :func:`deepinfer.kernels.indexer.scores.score_chunks`; geometry and CTAs without influence.

    ``num_visible`` must not fall from row to row of a sequence, but for rows that score nothing. The row strides of
    ``head_weights`` and ``order_keys`` are even.
    """
    rows, heads, width = query.shape
    assert head_weights.stride(0) % 2 == 0
    assert order_keys.stride(0) % 2 == 0
    assert order_keys.data_ptr() % 4 == head_weights.data_ptr() % 4 == 0
    tile = geometry or default_geometry(heads)
    defines = constants(tile, heads, entries_per_block)
    most = min(MAX_ROWS, (nvrtc.MAX_SHARED_BYTES - tile.shared_bytes(0, heads)) // 4)
    kernel = nvrtc.load_kernel(
        "index_chunks.cu", "index_chunks", defines, query.device, shared_bytes=tile.shared_bytes(most, heads)
    )
    capacity = order_keys.shape[1] if max_visible is None else max_visible
    key_tiles = -(-capacity // (128 * tile.warpgroups))
    for begin in range(0, rows, most):
        part = slice(begin, min(begin + most, rows))
        count = part.stop - begin
        arguments = _Arguments(
            head_weights[part].data_ptr(),
            index_keys.data_ptr(),
            block_table.data_ptr(),
            row_sequence[part].data_ptr(),
            num_visible[part].data_ptr(),
            order_keys[part].data_ptr(),
            head_weights.stride(0),
            block_table.stride(0),
            order_keys.stride(0),
            count,
            min_scored,
        )
        query_map = nvrtc.tensor_map(query[part].view(count * heads, width), tile.columns, 64)
        ctas = min(num_ctas or nvrtc.num_multiprocessors(query.device), max(count * key_tiles, 1))
        kernel.launch(
            (ctas, 1, 1),
            128 * (tile.warpgroups + 1),
            [arguments, query_map],
            shared_bytes=tile.shared_bytes(count, heads),
            overlap=True,
        )
