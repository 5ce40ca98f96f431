"""Sparse attention over the window and the selected entries, from the raw query to the input of the output projection.

Meaning: :func:`deepinfer.ops.attention.sparse_attention` with :func:`deepinfer.ops.rope.rotate` before and after it
and Q8 rounding at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from deepinfer.kernels.attention import sparse_attention_cuda, sparse_attention_few, sparse_attention_triton
from deepinfer.kernels.dense.row_scaled import RowCodes

EntryFormat = Literal["fp4", "fp8"]
Implementation = Literal["few", "cuda", "triton"]
INVARIANT_SPLITS = 2


def sparse_attention(
    q: Tensor,
    step_records: Tensor,
    ring: Tensor,
    window_index: Tensor,
    entries: Tensor | None,
    entry_format: EntryFormat,
    entry_slots: Tensor | None,
    sink: Tensor,
    cos: Tensor,
    sin: Tensor,
    quantize_output: bool,
    *,
    out: Tensor | None = None,
    split_weights: bool = False,
    invariant: bool = False,
    implementation: Implementation | None = None,
    splits: int | None = None,
) -> Tensor:
    """One softmax per head over window keys and selected entries; keys are also the values.

    Args:
        q: ``[rows, heads, dim]`` bf16, not rotated; rows may be strided, heads and channels are dense.
        step_records: ``[n, dim + dim / 32]`` uint8, window keys of this step (Fp8Record).
        ring: ``[slots, dim + dim / 32]`` uint8, window keys of earlier steps.
        window_index: ``[rows, w]`` int32, any ``w``: ``v >= 0`` row ``v`` of ``step_records``, ``v <= -2`` ring slot
            ``-2 - v``, -1 nothing.
        entries: ``[n, record]`` uint8, Fp4Record or Fp8Record by ``entry_format``.
        entry_slots: ``[rows, k]`` int32, -1 nothing; None (as ``entries``) where the layer has no entries.
        sink: ``[heads]`` float32, joins the denominator only.
        cos, sin: ``[rows, rope / 2]`` float32.
        quantize_output: round the result by Q8 (groups of 32 channels), kept as bf16 values.
        split_weights: multiply the values by softmax weights in two bf16 parts (16 bits) instead of one. One part adds
            an error of 0.7 times the rounding of the output to bf16 (root mean square), two parts add none that shows.
        invariant: the keys are split the same way whatever the number of rows, so that a row's result does not depend
            on the batch. Otherwise it depends on the number of rows through the split alone.
        implementation, splits: chosen here unless given (for tests and benchmarks): the kernel for few rows, the one
            that is efficient with many, or the one that runs everywhere.
    Returns:
        ``[rows, heads * dim]`` bf16, rotated back. A row without keys is zero.
    """
    rows, heads, dim = q.shape
    keys = _keys(q, step_records, ring, window_index, entries, entry_slots)
    if out is None:
        out = torch.empty(rows, heads * dim, dtype=torch.bfloat16, device=q.device)
    if implementation is None:
        implementation = _choose(rows, heads, dim, 2 * cos.shape[1], q.device, invariant)
    if splits is None and implementation == "few":
        splits = sparse_attention_few.choose_splits(rows, heads)
    elif splits is None:
        splits = _num_splits(rows, heads, _num_blocks(keys), invariant)
    arguments = (*keys, entry_format == "fp4", sink, cos, sin, quantize_output, out, splits, split_weights)
    if implementation == "few":
        sparse_attention_few.launch(*arguments)
    elif implementation == "cuda":
        sparse_attention_cuda.launch(*arguments)
    else:
        sparse_attention_triton.launch(*arguments)
    return out


def sparse_attention_codes(
    q: Tensor,
    step_records: Tensor,
    ring: Tensor,
    window_index: Tensor,
    entries: Tensor | None,
    entry_format: EntryFormat,
    entry_slots: Tensor | None,
    sink: Tensor,
    cos: Tensor,
    sin: Tensor,
    groups: int,
    *,
    split_weights: bool = False,
) -> RowCodes:
    """What :func:`sparse_attention` rounds, as codes with one scale for each row and group of heads.

    Args:
        groups: heads of a group follow each other.
    Returns:
        codes and scales of ``[rows, heads / groups * dim]`` for each group.
    """
    rows, heads, dim = q.shape
    is_cuda = _choose(rows, heads, dim, 2 * cos.shape[1], q.device, False) == "cuda"
    keys = _keys(q, step_records, ring, window_index, entries, entry_slots)
    is_whole = _num_splits(rows, heads, _num_blocks(keys), False) == 1
    if not (is_cuda and is_whole and sparse_attention_cuda.leaves_codes(heads, groups)):
        values = sparse_attention(
            q, step_records, ring, window_index, entries, entry_format, entry_slots, sink, cos, sin, True,
            split_weights=split_weights,
        )  # fmt: skip
        return RowCodes.of(values, groups)
    made = RowCodes.empty(groups, rows, heads // groups * dim, q.device)
    sparse_attention_cuda.launch(
        *keys, entry_format == "fp4", sink, cos, sin, True, made.codes, 1, split_weights, made.scales
    )
    return made


def _keys(
    q: Tensor,
    step_records: Tensor,
    ring: Tensor,
    window_index: Tensor,
    entries: Tensor | None,
    entry_slots: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The same as the launches take them."""
    assert q.stride()[1:] == (q.shape[2], 1), f"heads of q are not dense: strides {q.stride()}"
    if entries is None or entry_slots is None:
        entries, entry_slots = step_records, window_index[:, :0]
    return q, step_records, ring, window_index.contiguous(), entries, entry_slots.contiguous()


def _num_blocks(keys: Sequence[Tensor]) -> int:
    """Blocks of 64 keys of a row."""
    window_index, entry_slots = keys[3], keys[5]
    return -(-window_index.shape[1] // 64) - (-entry_slots.shape[1] // 64)


def _choose(rows: int, heads: int, dim: int, rope_width: int, device: torch.device, invariant: bool) -> Implementation:
    few = rows <= sparse_attention_few.MAX_ROWS and not invariant  # one kernel for all row counts, if invariant
    if few and sparse_attention_few.accepts(heads, dim, rope_width, device):
        return "few"
    return "cuda" if sparse_attention_cuda.accepts(heads, dim, rope_width, device) else "triton"


def _num_splits(rows: int, heads: int, num_blocks: int, invariant: bool) -> int:
    """Parts into which a row's blocks of 64 keys are cut, so that a small batch still fills the GPU."""
    if invariant:
        return INVARIANT_SPLITS
    programs = rows * -(-heads // 64)
    # Measured on an H200: 32 rows take 22.8 us with 2 splits, 35.3 with 4 (clusters of 4 do not fill all 132 SMs).
    wanted = 8 if programs <= 16 else 2 if programs <= 66 else 1
    while wanted > max(num_blocks, 1):
        wanted //= 2
    return wanted
