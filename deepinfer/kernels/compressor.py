"""The compressor's kernels: pool, norm, rotate, quantise and publish entries and index keys (spec 4.6).

One program per row, and a row touches only its own record: nothing depends on the other rows of the batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels import overlap
from deepinfer.kernels.formats.e2m1 import e2m1_code, e2m1_exponent
from deepinfer.kernels.formats.e4m3 import e4m3_nearest_code, e4m3_value, q8_exponent
from deepinfer.kernels.formats.float32 import power_of_two, round_bf16


@triton.jit
def _rms_norm_pairs(first, second, weight_ptr, columns, inside, width, eps):
    """Norm of a vector held as even and odd columns, rounded to bf16 values."""
    mean = (tl.sum(first * first) + tl.sum(second * second)) / width
    scale = 1.0 / tl.sqrt_rn(mean + eps)
    first *= scale * tl.load(weight_ptr + columns, inside, other=0.0).to(tl.float32)
    second *= scale * tl.load(weight_ptr + columns + 1, inside, other=0.0).to(tl.float32)
    return round_bf16(first), round_bf16(second)


@triton.jit
def _rotate_pairs(first, second, cos_ptr, sin_ptr, row, pairs, width, half_rope):
    """Rotate the last ``2 * half_rope`` columns, rounded to bf16 values (spec 4.4)."""
    turn = pairs - (width // 2 - half_rope)
    is_turned = (turn >= 0) & (turn < half_rope)
    cos = tl.load(cos_ptr + row * half_rope + turn, is_turned, other=1.0)
    sin = tl.load(sin_ptr + row * half_rope + turn, is_turned, other=0.0)
    return round_bf16(first * cos - second * sin), round_bf16(first * sin + second * cos)


@triton.jit
def _publish_entries_kernel(
    projected_ptr,
    ring_ptr,
    partner_ptr,
    store_ptr,
    norm_ptr,
    cos_ptr,
    sin_ptr,
    emit_ptr,
    entries_ptr,
    latent_ptr,
    width,
    half_rope,
    record_bytes,
    eps,
    RATIO: tl.constexpr,
    STORES: tl.constexpr,
    IS_FP4: tl.constexpr,
    PAIRS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    overlap.wait_for_earlier_kernels(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    pairs = tl.arange(0, PAIRS)
    columns = 2 * pairs
    inside = columns < width
    emit = tl.load(emit_ptr + row).to(tl.int64)
    if STORES:
        _store_pair(projected_ptr, ring_ptr, store_ptr, row, width, PAIRS)
    if emit < 0:
        zero = tl.zeros([PAIRS], latent_ptr.dtype.element_ty)
        tl.store(latent_ptr + row * width + columns, zero, inside)
        tl.store(latent_ptr + row * width + columns + 1, zero, inside)
        return
    if RATIO == 2:
        first, second = _pool(projected_ptr, ring_ptr, partner_ptr, row, columns, inside, width)
    else:
        first = tl.load(projected_ptr + row * width + columns, inside, other=0.0).to(tl.float32)
        second = tl.load(projected_ptr + row * width + columns + 1, inside, other=0.0).to(tl.float32)
    first, second = _rms_norm_pairs(first, second, norm_ptr, columns, inside, width, eps)
    tl.store(latent_ptr + row * width + columns, first.to(latent_ptr.dtype.element_ty), inside)
    tl.store(latent_ptr + row * width + columns + 1, second.to(latent_ptr.dtype.element_ty), inside)
    first, second = _rotate_pairs(first, second, cos_ptr, sin_ptr, row, pairs, width, half_rope)
    record_ptr = entries_ptr + emit * record_bytes
    if IS_FP4:
        _store_fp4_record(record_ptr, first, second, pairs, width, PAIRS)
    else:
        _store_fp8_record(record_ptr, first, second, pairs, width, PAIRS)


@triton.jit
def _pool(projected_ptr, ring_ptr, partner_ptr, row, columns, inside, width):
    """Per channel the softmax-weighted mean of two tokens, rounded to bf16 values; even and odd columns."""
    partner = tl.load(partner_ptr + row).to(tl.int64)
    own_ptr = projected_ptr + row * 2 * width
    source = tl.where(partner >= 0, partner, tl.maximum(-2 - partner, 0)) * 2 * width
    in_step = inside & (partner >= 0)
    in_ring = inside & (partner < -1)
    step_ptr, past_ptr = projected_ptr + source, ring_ptr + source
    first = _pool_column(step_ptr, past_ptr, own_ptr, columns, in_step, in_ring, inside, width)
    second = _pool_column(step_ptr, past_ptr, own_ptr, columns + 1, in_step, in_ring, inside, width)
    return first, second


@triton.jit
def _pool_column(step_ptr, ring_ptr, own_ptr, columns, in_step, in_ring, inside, width):
    value_columns = width + columns
    score = tl.load(step_ptr + columns, in_step, other=0.0) + tl.load(ring_ptr + columns, in_ring, other=0.0)
    value = tl.load(step_ptr + value_columns, in_step, other=0.0)
    value += tl.load(ring_ptr + value_columns, in_ring, other=0.0)
    own_score = tl.load(own_ptr + columns, inside, other=0.0)
    own_value = tl.load(own_ptr + value_columns, inside, other=0.0)
    largest = tl.maximum(score, own_score)
    weight, own_weight = tl.exp(score - largest), tl.exp(own_score - largest)
    return round_bf16((weight * value + own_weight * own_value) / (weight + own_weight))


@triton.jit
def _store_pair(projected_ptr, ring_ptr, store_ptr, row, width, PAIRS: tl.constexpr):
    """Copy this row's gate scores and values into the pair ring."""
    slot = tl.load(store_ptr + row).to(tl.int64)
    columns = tl.arange(0, 4 * PAIRS)
    inside = (columns < 2 * width) & (slot >= 0)
    kept = tl.load(projected_ptr + row * 2 * width + columns, inside, other=0.0)
    tl.store(ring_ptr + slot * 2 * width + columns, kept, inside)


@triton.jit
def _store_pairs_kernel(projected_ptr, ring_ptr, store_ptr, width, PAIRS: tl.constexpr):
    _store_pair(projected_ptr, ring_ptr, store_ptr, tl.program_id(0).to(tl.int64), width, PAIRS)


@triton.jit
def _group_max(first, second, PAIRS: tl.constexpr, SIZE: tl.constexpr):
    """Largest magnitude of each group of ``2 * SIZE`` columns: ``[PAIRS / SIZE, 1]``, and both parts as groups."""
    first = tl.reshape(first, [PAIRS // SIZE, SIZE])
    second = tl.reshape(second, [PAIRS // SIZE, SIZE])
    largest = tl.max(tl.maximum(tl.abs(first), tl.abs(second)), axis=1, keep_dims=True)
    return first, second, largest


@triton.jit
def _store_fp4_record(record_ptr, first, second, pairs, width, PAIRS: tl.constexpr):
    """``Q4e``: e2m1 codes, even column in the low nibble, then one e4m3 scale per 16 columns."""
    first, second, largest = _group_max(first, second, PAIRS, 8)
    scale_code = e4m3_nearest_code(tl.div_rn(tl.maximum(largest, 0.01171875), 6.0))  # at least 6 * 2**-9
    inverse = tl.div_rn(1.0, e4m3_value(scale_code))
    packed = e2m1_code(first * inverse) | (e2m1_code(second * inverse) << 4)
    tl.store(record_ptr + pairs, tl.reshape(packed, [PAIRS]).to(tl.uint8), pairs < width // 2)
    group = tl.arange(0, PAIRS // 8)
    scales = tl.reshape(scale_code, [PAIRS // 8]).to(tl.uint8)
    tl.store(record_ptr + width // 2 + group, scales, group < width // 16)


@triton.jit
def _store_fp8_record(record_ptr, first, second, pairs, width, PAIRS: tl.constexpr):
    """``Q8``: e4m3 codes, then one power-of-two scale byte per 32 columns."""
    first, second, largest = _group_max(first, second, PAIRS, 16)
    exponent = q8_exponent(largest)
    inverse = power_of_two(-exponent)
    inside = pairs < width // 2
    tl.store(record_ptr + 2 * pairs, tl.reshape(e4m3_nearest_code(first * inverse), [PAIRS]).to(tl.uint8), inside)
    tl.store(record_ptr + 2 * pairs + 1, tl.reshape(e4m3_nearest_code(second * inverse), [PAIRS]).to(tl.uint8), inside)
    group = tl.arange(0, PAIRS // 16)
    scales = tl.reshape(exponent + 127, [PAIRS // 16]).to(tl.uint8)
    tl.store(record_ptr + width + group, scales, group < width // 32)


@triton.jit
def _publish_index_keys_kernel(
    key_ptr,
    key_stride,
    norm_ptr,
    cos_ptr,
    sin_ptr,
    emit_ptr,
    index_keys_ptr,
    width,
    half_rope,
    eps,
    PAIRS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    overlap.wait_for_earlier_kernels(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    emit = tl.load(emit_ptr + row).to(tl.int64)
    if emit < 0:
        return
    pairs = tl.arange(0, PAIRS)
    columns = 2 * pairs
    inside = columns < width
    first = tl.load(key_ptr + row * key_stride + columns, inside, other=0.0).to(tl.float32)
    second = tl.load(key_ptr + row * key_stride + columns + 1, inside, other=0.0).to(tl.float32)
    first, second = _rms_norm_pairs(first, second, norm_ptr, columns, inside, width, eps)
    first, second = _rotate_pairs(first, second, cos_ptr, sin_ptr, row, pairs, width, half_rope)
    first, second, largest = _group_max(first, second, PAIRS, 16)
    exponent = e2m1_exponent(largest)
    inverse = power_of_two(-exponent)
    packed = e2m1_code(first * inverse) | (e2m1_code(second * inverse) << 4)
    record_ptr = index_keys_ptr + emit * (width // 2 + width // 32)
    tl.store(record_ptr + pairs, tl.reshape(packed, [PAIRS]).to(tl.uint8), pairs < width // 2)
    group = tl.arange(0, PAIRS // 16)
    scales = tl.reshape(exponent + 127, [PAIRS // 16]).to(tl.uint8)
    tl.store(record_ptr + width // 2 + group, scales, group < width // 32)


def publish_entries(
    projected: Tensor,
    ratio: int,
    norm_weight: Tensor,
    eps: float,
    cosines: Tensor,
    sines: Tensor,
    emit_slot: Tensor,
    entries: Tensor,
    pair_ring: Tensor | None = None,
    partner: Tensor | None = None,
    pair_store_slot: Tensor | None = None,
    stores_in_place: bool = False,
    latent: Tensor | None = None,
) -> Tensor:
    """Turn the projections of attention inputs into entries and write those that are complete.

    Args:
        projected: ratio 2: ``[rows, 2 * D]`` float32, gate scores then values; ratio 1: ``[rows, D]`` bf16.
        norm_weight: ``[D]``, any float dtype. cosines, sines: ``[rows, rope / 2]`` float32 of the entry's position.
        emit_slot: ``[rows]`` int32 record that a row's entry goes to; -1: the row completes none.
        entries: ``[num_entries, record]`` uint8, Fp4Record or Fp8Record of width D, told apart by the record's size.
        pair_ring: ratio 2: ``[num_slots, 2, D]`` float32.
        partner: ratio 2: ``[rows]`` int32, where the even token is: a row of this step (>= 0), ring slot ``-2 - v``.
        pair_store_slot: ratio 2: ``[rows]`` int32 ring slot that a row is kept in, -1: none.
        stores_in_place: keep rows in the ring in the same launch. Right only if no chunk is as long as the ring: in a
            longer one a late row overwrites the very slot that the first row reads. Default: a second, tiny launch.
        latent: ``[rows, D]`` bf16, written.
    Returns:
        normed latents ``[rows, D]`` bf16, not rotated; zeros where no entry is complete.
    """
    rows, width = projected.shape[0], projected.shape[1] // ratio
    assert ratio in (1, 2)
    assert width % 32 == 0
    assert projected.is_contiguous()
    assert projected.dtype == (torch.float32 if ratio == 2 else torch.bfloat16)
    assert cosines.is_contiguous() and sines.is_contiguous()  # noqa: PT018
    record_bytes = entries.shape[1]
    assert entries.is_contiguous()
    assert record_bytes in (width // 2 + width // 16, width + width // 32)
    latent = projected.new_empty((rows, width), dtype=torch.bfloat16) if latent is None else latent
    if rows == 0:
        return latent
    pairs = triton.next_power_of_2(width) // 2
    ring, partners, stores = (emit_slot, emit_slot, emit_slot)  # unused pointers for ratio 1
    if ratio == 2:
        assert pair_ring is not None
        assert partner is not None
        assert pair_store_slot is not None
        assert pair_ring.is_contiguous()
        ring, partners, stores = pair_ring, partner, pair_store_slot
    _publish_entries_kernel[(rows,)](
        projected,
        ring,
        partners,
        stores,
        norm_weight,
        cosines,
        sines,
        emit_slot,
        entries,
        latent,
        width,
        cosines.shape[1],
        record_bytes,
        eps,
        RATIO=ratio,
        STORES=ratio == 2 and stores_in_place,
        IS_FP4=record_bytes < width,
        PAIRS=pairs,
        num_warps=4,
        **overlap.launch_options(projected.device),
    )
    if ratio == 2 and not stores_in_place:
        _store_pairs_kernel[(rows,)](projected, ring, stores, width, PAIRS=pairs, num_warps=4)
    return latent


def publish_index_keys(
    key: Tensor,
    norm_weight: Tensor,
    eps: float,
    cosines: Tensor,
    sines: Tensor,
    emit_slot: Tensor,
    index_keys: Tensor,
) -> None:
    """Norm, rotate, quantise (``Q4u``) and write the index keys of completed entries.

    Args:
        key: ``[rows, Di]`` bf16, latents times ``wk``; rows may be strided.
        norm_weight: ``[Di]``. cosines, sines, emit_slot: as in :func:`publish_entries`.
        index_keys: ``[num_entries, Di / 2 + Di / 32]`` uint8.
    """
    rows, width = key.shape
    assert width % 32 == 0
    assert key.stride(1) == 1
    assert index_keys.is_contiguous()
    assert index_keys.shape[1] == width // 2 + width // 32
    if rows == 0:
        return
    _publish_index_keys_kernel[(rows,)](
        key,
        key.stride(0),
        norm_weight,
        cosines,
        sines,
        emit_slot,
        index_keys,
        width,
        cosines.shape[1],
        eps,
        PAIRS=triton.next_power_of_2(width) // 2,
        num_warps=1,
        **overlap.launch_options(key.device),
    )
