"""Launch of ``cuda/index_scores.cu``: scores of rows one by one, for the released widths on Hopper."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from deepinfer.kernels import nvrtc

MAX_ROWS = 4096
_TILE, _STAGES, _WARPS = 16, 4, 8
_RING_BYTES = _WARPS * _STAGES * _TILE * 68
_CTAS_PER_SM = 2


_POINTERS = ("query", "weights", "keys", "table", "sequence", "visible", "blocks", "out")
_NUMBERS = ("weights_stride", "table_stride", "out_stride", "rows", "min_scored")


class _Arguments(ctypes.Structure):
    _fields_ = (*((name, ctypes.c_void_p) for name in _POINTERS), *((name, ctypes.c_int) for name in _NUMBERS))


def accepts(heads: int, width: int, entries_per_block: int, block_size: int, device: torch.device) -> bool:
    """Whether the kernel covers the model's widths and runs on ``device``. ``block_size``: of candidate blocks."""
    aligned = entries_per_block % 8 == 0 and block_size % 8 == 0  # runs of 8 keys are contiguous and aligned
    return width == 128 and heads % 8 == 0 and heads <= 32 and aligned and nvrtc.is_available(device)


def score_rows(
    query: Tensor,
    head_weights: Tensor,
    index_keys: Tensor,
    block_table: Tensor,
    row_sequence: Tensor,
    num_visible: Tensor,
    order_keys: Tensor,
    min_scored: int,
    entries_per_block: int,
    candidate_blocks: Tensor | None = None,
    block_size: int = 8,
    num_ctas: int | None = None,
) -> None:
    """Arguments as :func:`deepinfer.kernels.indexer.scores.score_rows`; any ``num_ctas`` gives the same result."""
    rows, heads, _ = query.shape
    assert rows <= MAX_ROWS
    if rows == 0:
        return
    num_blocks = 0 if candidate_blocks is None else candidate_blocks.shape[1]
    defines = {"HEADS": heads, "PER_BLOCK": entries_per_block, "NUM_BLOCKS": num_blocks, "BLOCK_SIZE": block_size}
    kernel = nvrtc.load_kernel(
        "index_scores.cu", "score_rows", defines, query.device, shared_bytes=_RING_BYTES + 4 * MAX_ROWS
    )
    tiles = rows * -(-order_keys.shape[1] // _TILE)
    ctas = min(num_ctas or _CTAS_PER_SM * nvrtc.num_multiprocessors(query.device), tiles)
    arguments = _Arguments(
        query.data_ptr(),
        head_weights.data_ptr(),
        index_keys.data_ptr(),
        block_table.data_ptr(),
        row_sequence.data_ptr(),
        num_visible.data_ptr(),
        0 if candidate_blocks is None else candidate_blocks.data_ptr(),
        order_keys.data_ptr(),
        head_weights.stride(0),
        block_table.stride(0),
        order_keys.stride(0),
        rows,
        min_scored,
    )
    kernel.launch((ctas, 1, 1), 32 * _WARPS, [arguments], shared_bytes=_RING_BYTES + 4 * rows, overlap=True)
