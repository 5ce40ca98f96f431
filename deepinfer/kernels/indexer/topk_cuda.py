"""Launch of ``cuda/topk.cu``: exact selection in one launch, long rows by a cluster of CTAs."""

from __future__ import annotations

import ctypes

from torch import Tensor

from deepinfer.kernels import nvrtc

SHORT_KEYS = 8192
"""Rows up to this length are selected by one CTA."""
_MAX_CTAS = 1024


class _Arguments(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("keys", "visible", "sequence", "table", "blocks", "slots", "entries")),
        *((name, ctypes.c_int) for name in ("keys_stride", "table_stride")),
    )


def accepts(order_keys: Tensor, group: int) -> bool:
    """Whether the kernel reads keys like these. ``group``: entries per key, 1 or 8."""
    aligned = order_keys.stride(0) % 8 == 0 and order_keys.data_ptr() % 16 == 0
    return group in (1, 8) and aligned and nvrtc.is_available(order_keys.device)


def choose_cluster(rows: int, max_keys: int, short: int = SHORT_KEYS) -> int:
    """CTAs per row: more for longer rows, while all rows together do not fill the GPU."""
    cluster = 1
    while cluster < 8 and max_keys > short * cluster and 2 * cluster * rows <= _MAX_CTAS:
        cluster *= 2
    return cluster


def select(
    order_keys: Tensor,
    num_visible: Tensor,
    count: int,
    slots: Tensor | None,
    entries: Tensor | None,
    group: int = 1,
    row_sequence: Tensor | None = None,
    block_table: Tensor | None = None,
    entries_per_block: int = 1,
    candidate_blocks: Tensor | None = None,
    block_size: int = 1,
    cluster: int | None = None,
    threads: int = 512,
    short: int = SHORT_KEYS,
) -> None:
    """Select entries (``group`` 1) or candidate blocks (8) as :mod:`deepinfer.kernels.indexer.topk` does.

    Args:
        slots, entries: ``[rows, count]`` int32; what is given is written.
        cluster: CTAs per row: 1, 2, 4 or 8. threads: 256 or 512. Any choice gives the same result.
    """
    rows, capacity = order_keys.shape
    if rows == 0:
        return
    cluster = cluster or choose_cluster(rows, -(-capacity // group), short)
    defines = {
        "COUNT": count,
        "CLUSTER": cluster,
        "GROUP": group,
        "NUM_BLOCKS": 0 if candidate_blocks is None else candidate_blocks.shape[1],
        "BLOCK_SIZE": block_size,
        "PER_BLOCK": entries_per_block,
        "HAS_SLOTS": int(slots is not None),
        "HAS_ENTRIES": int(entries is not None),
        "THREADS": threads,
        "SHORT": short,
    }
    kernel = nvrtc.load_kernel("topk.cu", "select_top", defines, order_keys.device)
    arguments = _Arguments(
        order_keys.data_ptr(),
        num_visible.data_ptr(),
        nvrtc.pointer(row_sequence),
        nvrtc.pointer(block_table),
        nvrtc.pointer(candidate_blocks),
        nvrtc.pointer(slots),
        nvrtc.pointer(entries),
        order_keys.stride(0),
        0 if block_table is None else block_table.stride(0),
    )
    kernel.launch((cluster, rows, 1), threads, [arguments], cluster=cluster, overlap=True)
