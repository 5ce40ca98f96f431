"""Queries' latent and window key of every row: norms, rotation, rounding, and the key's way into the cache (spec 4.5).

One program makes one part of one row, so a row's bits never depend on other rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels import overlap
from deepinfer.kernels.dense.row_scaled import RowCodes
from deepinfer.kernels.formats.e4m3 import e4m3_code, e4m3_row, q8_groups
from deepinfer.kernels.formats.float32 import power_of_two


@triton.jit
def _load_projected(
    projected, row, columns, mask, num_rows, row_stride, COLUMN: tl.constexpr, SPLITS: tl.constexpr
):  # fmt: skip
    """bf16 values (as float32) of one row from column COLUMN on; SPLITS > 0: of float32 partial sums, rounded once."""
    pointer = projected + row * row_stride + COLUMN + columns
    total = tl.load(pointer, mask, other=0.0).to(tl.float32)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(pointer + split * num_rows * row_stride, mask, other=0.0)
    return total.to(tl.bfloat16).to(tl.float32)


@triton.jit
def _rms_norm(x, weight, eps, WIDTH: tl.constexpr):
    """bf16 norm of float32 ``x`` (zero where masked), of two axes."""
    inverse = tl.rsqrt(tl.sum(tl.sum(x * x, axis=1), axis=0) / WIDTH + eps)
    return (x * inverse * weight).to(tl.bfloat16)


@triton.jit
def _load_angles(cos, sin, columns, row, WIDTH: tl.constexpr, ROPE: tl.constexpr):
    """Cosine and sine of each adjacent pair of channels, ``[groups, 16]``: 1 and 0 before the last ROPE channels."""
    pairs, _ = tl.split(tl.reshape(columns, [columns.shape[0], 16, 2]))
    pairs = pairs // 2 - (WIDTH - ROPE) // 2
    turns = (pairs >= 0) & (pairs < ROPE // 2)
    cosine = tl.load(cos + row * (ROPE // 2) + pairs, turns, other=1.0)
    return cosine, tl.load(sin + row * (ROPE // 2) + pairs, turns, other=0.0)


@triton.jit
def _rotate(x, cosine, sine):
    """Rotate adjacent channels of bf16 ``x`` ``[groups, 32]``, one rounding."""
    first, second = tl.split(tl.reshape(x.to(tl.float32), [x.shape[0], 16, 2]))
    turned = tl.join(first * cosine - second * sine, first * sine + second * cosine)
    return tl.reshape(turned, [x.shape[0], 32]).to(tl.bfloat16)


@triton.jit
def _norm_rounded_row(
    projected, norm, normed, rounded, codes, scales, row, num_rows, row_stride, eps,
    COLUMN: tl.constexpr, SPLITS: tl.constexpr, WIDTH: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, GROUPS)[:, None] * 32 + tl.arange(0, 32)[None, :]
    mask = columns < WIDTH
    weight = tl.load(norm + columns, mask, other=0.0).to(tl.float32)
    x = _load_projected(projected, row, columns, mask, num_rows, row_stride, COLUMN, SPLITS)
    tl.debug_barrier()  # a fence for the compiler: every load is on its way before any is waited for
    x = _rms_norm(x, weight, eps, WIDTH)
    if normed is not None:
        tl.store(normed + row * WIDTH + columns, x, mask)
    if rounded is not None:
        _, values, exponent = q8_groups(x.to(tl.float32))
        tl.store(rounded + row * WIDTH + columns, (values * power_of_two(exponent)[:, None]).to(tl.bfloat16), mask)
    if codes is not None:
        _, values, exponent = q8_groups(x.to(tl.float32))
        of_row, exponent = e4m3_row(values * power_of_two(exponent)[:, None])
        tl.store(codes + row * WIDTH + columns, of_row, mask)
        tl.store(scales + row, power_of_two(exponent))


@triton.jit
def _key_row(
    projected, norm, cos, sin, records, ring, ring_slot, row, num_rows, row_stride, eps,
    COLUMN: tl.constexpr, SPLITS: tl.constexpr, WIDTH: tl.constexpr, GROUPS: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
    group = tl.arange(0, GROUPS)
    columns = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    mask = columns < WIDTH
    slot = row * 0
    if ring is not None:
        slot = tl.load(ring_slot + row).to(tl.int64)
    weight = tl.load(norm + columns, mask, other=0.0).to(tl.float32)
    x = _load_projected(projected, row, columns, mask, num_rows, row_stride, COLUMN, SPLITS)
    cosine, sine = _load_angles(cos, sin, columns, row, WIDTH, ROPE)
    tl.debug_barrier()  # as above
    x = _rotate(_rms_norm(x, weight, eps, WIDTH), cosine, sine)
    scaled, values, exponent = q8_groups(x.to(tl.float32))
    codes, scales = e4m3_code(values, scaled), (exponent + 127).to(tl.uint8)
    record: tl.constexpr = WIDTH + WIDTH // 32
    if records is not None:
        tl.store(records + row * record + columns, codes, mask)
        tl.store(records + row * record + WIDTH + group, scales, group * 32 < WIDTH)
    if ring is not None:
        tl.store(ring + slot * record + columns, codes, mask & (slot >= 0))
        tl.store(ring + slot * record + WIDTH + group, scales, (group * 32 < WIDTH) & (slot >= 0))


@triton.jit(do_not_specialize=["num_rows"])
def _query_key_kernel(
    projected, query_norm, key_norm, cos, sin, latent, rounded, codes, scales, records, ring, ring_slot, num_rows,
    row_stride, eps,
    QUERY: tl.constexpr, KEY: tl.constexpr, ROPE: tl.constexpr, SPLITS: tl.constexpr,
    QUERY_GROUPS: tl.constexpr, KEY_GROUPS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    overlap.wait_for_earlier_kernels(OVERLAP)
    if KEY == 0:
        _norm_rounded_row(
            projected, query_norm, latent, rounded, codes, scales, row, num_rows, row_stride, eps,
            0, SPLITS, QUERY, QUERY_GROUPS,
        )  # fmt: skip
    elif QUERY == 0 or tl.program_id(1) == 1:
        _key_row(
            projected, key_norm, cos, sin, records, ring, ring_slot, row, num_rows, row_stride, eps,
            QUERY, SPLITS, KEY, KEY_GROUPS, ROPE,
        )  # fmt: skip
    else:
        _norm_rounded_row(
            projected, query_norm, latent, rounded, codes, scales, row, num_rows, row_stride, eps,
            0, SPLITS, QUERY, QUERY_GROUPS,
        )  # fmt: skip


def _groups(width: int) -> int:
    assert width % 32 == 0
    return triton.next_power_of_2(width // 32)


def _launch(
    projected: Tensor,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    eps: float,
    outputs: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None],
    angles: tuple[Tensor | None, Tensor | None] = (None, None),
    stores: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None),
) -> None:
    """Args: outputs: latent, rounded, their codes and scales; angles: cos, sin; stores: records, ring, ring slots."""
    query = 0 if query_norm is None else query_norm.shape[0]
    key = 0 if key_norm is None else key_norm.shape[0]
    splits = projected.shape[0] if projected.dim() == 3 else 0
    rows, width = projected.shape[-2:]
    assert width == query + key
    assert projected.stride(-1) == 1
    assert projected.dtype == (torch.float32 if splits else torch.bfloat16)
    assert not splits or projected.is_contiguous()
    for table in angles:
        assert table is None or (table.is_contiguous() and table.dtype == torch.float32)
    for store in stores[:2]:
        assert store is None or (store.is_contiguous() and store.shape[1] == key + key // 32)
    rope = 0 if angles[0] is None else 2 * angles[0].shape[1]
    num_warps = 4 if query else 1
    _query_key_kernel[(rows, 2 if query and key else 1)](
        projected, query_norm, key_norm, *angles, *outputs, *stores, rows, projected.stride(-2), eps,
        QUERY=query, KEY=key, ROPE=rope, SPLITS=splits,
        QUERY_GROUPS=_groups(query), KEY_GROUPS=_groups(key), num_warps=num_warps,
        **overlap.launch_options(projected.device),
    )  # fmt: skip


def query_key(
    projected: Tensor,
    query_norm: Tensor,
    key_norm: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    *,
    step_records: Tensor | None = None,
    ring: Tensor | None = None,
    ring_slot: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """From the first attention product to the queries' latent and the window key's record.

    Args:
        projected: ``[rows, query width + key width]`` bf16 (rows may be strided), or its partial sums
            ``[splits, rows, ...]`` float32, which are added and rounded once.
        query_norm, key_norm: weights ``[width]``, bf16 or float32; eps: of both norms.
        cos, sin: ``[rows, rope / 2]`` float32, for the key.
        step_records: ``[rows, record]`` uint8, gets every row's key.
        ring, ring_slot: ``[slots, record]`` uint8 and ``[rows]`` int32: where a row's key goes too, -1 = nowhere.
    Returns:
        the normed latent ``[rows, query width]`` bf16, and the same rounded by Q8, in bf16.
    """
    assert (ring is None) == (ring_slot is None)
    latent = projected.new_empty(projected.shape[-2], query_norm.shape[0], dtype=torch.bfloat16)
    rounded = torch.empty_like(latent)
    _launch(
        projected, query_norm, key_norm, eps, (latent, rounded, None, None), (cos, sin), (step_records, ring, ring_slot)
    )  # fmt: skip
    return latent, rounded


def query_key_codes(
    projected: Tensor,
    query_norm: Tensor,
    key_norm: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    *,
    step_records: Tensor | None = None,
    ring: Tensor | None = None,
    ring_slot: Tensor | None = None,
) -> RowCodes:
    """:func:`query_key` for a product in FP8: the rounded latent as codes with one scale per row, and nothing else."""
    assert (ring is None) == (ring_slot is None)
    made = RowCodes.empty(1, projected.shape[-2], query_norm.shape[0], projected.device)
    outputs = (None, None, made.codes, made.scales)
    _launch(projected, query_norm, key_norm, eps, outputs, (cos, sin), (step_records, ring, ring_slot))
    return made


def key_records(
    projected: Tensor, key_norm: Tensor, eps: float, cos: Tensor, sin: Tensor, ring: Tensor, ring_slot: Tensor
) -> None:
    """The key's half of :func:`query_key` alone, into the ring: ``projected`` ``[rows, key width]``."""
    _launch(projected, None, key_norm, eps, (None, None, None, None), (cos, sin), (None, ring, ring_slot))


def norm_rounded(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """RMS norm of ``[rows, width]`` bf16 (or of partial sums, as above): the result and the same rounded by Q8."""
    normed = x.new_empty(x.shape[-2], weight.shape[0], dtype=torch.bfloat16)
    rounded = torch.empty_like(normed)
    _launch(x, weight, None, eps, (normed, rounded, None, None))
    return normed, rounded


@triton.jit
def _store_ring_kernel(records, ring_slot, ring, RECORD: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(ring_slot + row).to(tl.int64)
    place = tl.arange(0, BLOCK)
    mask = (place < RECORD) & (slot >= 0)
    tl.store(ring + slot * RECORD + place, tl.load(records + row * RECORD + place, mask), mask)


def store_ring(step_records: Tensor, ring_slot: Tensor, ring: Tensor) -> None:
    """Copy records ``[rows, record]`` uint8 into ring slots ``[slots, record]`` where ``ring_slot`` ``[rows]`` >= 0."""
    assert step_records.is_contiguous()
    assert ring.is_contiguous()
    record = ring.shape[1]
    if record % 4 == 0:
        step_records, ring, record = step_records.view(torch.int32), ring.view(torch.int32), record // 4
    _store_ring_kernel[(step_records.shape[0],)](
        step_records, ring_slot, ring, RECORD=record, BLOCK=triton.next_power_of_2(record), num_warps=1
    )
