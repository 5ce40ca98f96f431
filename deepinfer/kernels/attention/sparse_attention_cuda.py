"""Launch of ``cuda/attention.cu``: sparse attention on Hopper's tensor cores for 512 channels and at most 64 heads."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from deepinfer.kernels import nvrtc

SOURCE = "attention.cu"
_TILE_BYTES = 64 * 512 * 2
_WEIGHT_BYTES = 64 * 64 * 2
_RAW_BYTES = 16 * 1024
_SMALL_BYTES = 1024
_THREADS = 384
MAX_SPLITS = 8


@functools.cache
def accepts(heads: int, head_dim: int, rope_width: int, device: torch.device) -> bool:
    """Whether the kernel covers the model's widths and runs on ``device``."""
    return head_dim == 512 and heads <= 64 and rope_width % 8 == 0 and rope_width <= 256 and nvrtc.is_available(device)


def leaves_codes(heads: int, groups: int) -> bool:
    """Whether the kernel can leave codes with one scale per row and group of heads: groups lie within 16 heads."""
    return heads % groups == 0 and heads // groups in (4, 8, 16)


def launch(
    q: Tensor,
    step_records: Tensor,
    ring: Tensor,
    window_index: Tensor,
    entries: Tensor,
    entry_slots: Tensor,
    fp4: bool,
    sink: Tensor,
    cos: Tensor,
    sin: Tensor,
    quantize_output: bool,
    out: Tensor,
    splits: int,
    split_weights: bool,
    scales: Tensor | None = None,
) -> None:
    """Arguments as :func:`.sparse_attention_triton.launch`; ``splits`` is 1, 2, 4 or 8.

    Args:
        scales: float32 ``[groups, rows]`` of ``row_scaled.RowCodes``: the rounded output leaves in that form,
            ``out`` is its codes. Where :func:`leaves_codes`, with one split.
    """
    rows, heads, _ = q.shape
    if rows == 0:
        return
    assert (q.stride(0) % 8, q.data_ptr() % 16) == (0, 0), f"rows of q are not aligned to 16 bytes: {q.stride()}"
    group_heads = 0 if scales is None else heads // len(scales)
    assert scales is None or (quantize_output and splits == 1 and leaves_codes(heads, len(scales)))
    defines = definitions(heads, 2 * cos.shape[1], fp4, splits, split_weights, group_heads)
    assert out.data_ptr() % 16 == 0, "the output is not aligned to 16 bytes"
    shared_bytes = 3 * _TILE_BYTES + (1 + split_weights) * _WEIGHT_BYTES + _RAW_BYTES + _SMALL_BYTES
    kernel = nvrtc.load_kernel(SOURCE, "sparse_attention", defines, q.device, shared_bytes=shared_bytes)
    ctas = min(rows, nvrtc.num_multiprocessors(q.device)) if splits == 1 else rows * splits
    arguments: list[Any] = [q, step_records, ring, window_index, entries, entry_slots, sink, cos, sin, out]
    arguments += [rows, q.stride(0), window_index.shape[1], entry_slots.shape[1], int(quantize_output)]
    if scales is not None:
        assert scales.stride() == (-(-rows // 4) * 4, 1), "the kernel takes each group's scales to be aligned"
        arguments.append(scales)
    kernel.launch((ctas, 1, 1), _THREADS, arguments, shared_bytes=shared_bytes, cluster=splits, overlap=True)


def definitions(
    heads: int, rope_width: int, fp4: bool, splits: int, split_weights: bool, group_heads: int = 0
) -> dict[str, int]:
    """Compile-time constants of a variant, for :func:`deepinfer.kernels.nvrtc.compile_cubin` ahead of time too."""
    return {
        "H": heads, "ROPE": rope_width, "FP4": int(fp4), "SPLITS": splits, "SPLIT_WEIGHTS": int(split_weights),
        "GROUP_HEADS": group_heads,
    }  # fmt: skip
