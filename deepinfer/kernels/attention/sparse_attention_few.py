"""Launch of ``cuda/attention_few.cu``: sparse attention of few rows on Hopper, spread over many multiprocessors."""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from deepinfer.kernels import nvrtc

SOURCE = "attention_few.cu"
_THREADS = 256
_GROUP_HEADS = 16
SPLITS = (4, 8, 16)
MAX_ROWS = 4
"""Rows up to which this kernel takes the place of ``attention.cu``. Microseconds that attention adds between the
products before and behind it, on an H200 (``bench/gpu/check_attention_few.py``): 9.8, 13.7 and 22.7 for 1, 4 and 8
rows, with the other kernel 17.1, 17.7 and 18.3. To run the code once ahead, beside the kernel before, made it 5 to 10
slower."""


class _Arguments(ctypes.Structure):
    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in (
                *("query", "step_records", "ring", "window_index", "entries", "entry_slots"),
                *("sink", "cosines", "sines", "out"),
            )
        ),
        *(
            (name, ctypes.c_int)
            for name in (*("rows", "query_stride", "width", "num_selected", "quantize", "log_splits"),)
        ),
    )


@functools.cache
def accepts(heads: int, head_dim: int, rope_width: int, device: torch.device) -> bool:
    """Whether the kernel covers the model's widths and runs on ``device``."""
    return head_dim == 512 and heads >= 1 and rope_width % 16 == 0 and rope_width <= 256 and nvrtc.is_available(device)


def choose_splits(rows: int, heads: int) -> int:
    """Parts of a row's keys: as many as leave each CTA of the launch an SM of its own."""
    groups = -(-heads // _GROUP_HEADS)
    return next((s for s in reversed(SPLITS) if rows * groups * s <= 132), SPLITS[0])


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
) -> None:
    """Arguments as :func:`.sparse_attention_triton.launch`; ``splits`` is 4, 8 or 16."""
    rows, heads, _ = q.shape
    if rows == 0:
        return
    groups = -(-heads // _GROUP_HEADS)
    packed = arguments(
        q, step_records, ring, window_index, entries, entry_slots, sink, cos, sin, quantize_output, out, splits
    )
    defines = definitions(heads, 2 * cos.shape[1], fp4, split_weights)
    kernel = nvrtc.load_kernel(SOURCE, "sparse_attention_few", defines, q.device)
    kernel.launch((rows * groups * splits, 1, 1), _THREADS, [packed], cluster=splits, overlap=True)


def arguments(
    q: Tensor,
    step_records: Tensor,
    ring: Tensor,
    window_index: Tensor,
    entries: Tensor,
    entry_slots: Tensor,
    sink: Tensor,
    cos: Tensor,
    sin: Tensor,
    quantize_output: bool,
    out: Tensor,
    splits: int,
) -> ctypes.Structure:
    """What the kernel takes."""
    assert splits in SPLITS, f"{splits=}"
    assert (q.stride(0) % 8, q.data_ptr() % 16, out.data_ptr() % 16) == (0, 0, 0), f"not aligned: {q.stride()}"
    assert len(step_records) > 0, "there is no record to read where a key is missing"
    tensors = (q, step_records, ring, window_index, entries, entry_slots, sink, cos, sin, out)
    return _Arguments(
        *(t.data_ptr() for t in tensors), len(q), q.stride(0), window_index.shape[1], entry_slots.shape[1],
        int(quantize_output), splits.bit_length() - 1,
    )  # fmt: skip


def definitions(heads: int, rope_width: int, fp4: bool, split_weights: bool) -> dict[str, int]:
    """Compile-time constants of a variant, for :func:`deepinfer.kernels.nvrtc.compile_cubin` ahead of time too."""
    return {"H": heads, "ROPE": rope_width, "FP4": int(fp4), "SPLIT_WEIGHTS": int(split_weights)}
