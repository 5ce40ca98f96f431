"""Bit-exact codecs of the stored number formats: e4m3, e2m1, ue8m0, and the three ways they carry scales.

Source: spec 0.1 (formats), 0.2 (``cl2``), 3.2 (tiles and rows). Codes are ``uint8``: one byte per e4m3 or ue8m0 value,
two e2m1 values per byte with the even column in the low nibble.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 32
"""Columns per scale, and rows per scale of a tile."""

E4M3_MAX = 448.0
E2M1_MAX = 6.0
UE8M0_BIAS = 127
UE8M0_NAN = 255

_E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
# Where one magnitude code ends: (midpoint, does the midpoint itself already belong to the next code). A tie goes to the
# even code, so midpoints alternate.
_E2M1_STEPS = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))
# Every e4m3 or e2m1 value times a power of two has at most four significant bits: exact in these (spec 5.3).
_EXACT_DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def e4m3_encode(values: Tensor) -> Tensor:
    """Round float values to e4m3 codes: nearest even, saturating at 448; NaN becomes 0x7F.

    Returns:
        uint8, shape of ``values``.
    """
    clamped = values.float().clamp(-E4M3_MAX, E4M3_MAX)  # older torch turns values past 464 into NaN
    return clamped.to(torch.float8_e4m3fn).view(torch.uint8)


def e4m3_decode(codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Exact values of e4m3 codes (uint8 or float8_e4m3fn); 0x7F and 0xFF are NaN."""
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.bfloat16)
    return _look_up(codes, every.view(torch.int16)).view(torch.bfloat16).view(codes.shape).to(dtype)


def _look_up(codes: Tensor, table: Tensor) -> Tensor:
    """``table[codes]``, flat. Integer tables and 32-bit indices: the path on which a CPU is several times faster."""
    return table.to(codes.device).index_select(0, codes.reshape(-1).view(torch.uint8).int())


def e2m1_encode(values: Tensor) -> Tensor:
    """Round finite float values to e2m1 codes 0 to 15 (uint8): ties to the even code, saturating at 6.

    The format has no NaN, so a NaN gets code 0: callers refuse non-finite input.
    """
    values = values.float()
    magnitude = values.abs()
    codes = torch.zeros(values.shape, dtype=torch.uint8, device=values.device)
    for midpoint, tie_goes_up in _E2M1_STEPS:
        codes += magnitude >= midpoint if tie_goes_up else magnitude > midpoint
    return codes | (torch.signbit(values).to(torch.uint8) << 3)


def e2m1_decode(codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Exact values of unpacked e2m1 codes 0 to 15."""
    every = torch.tensor(_E2M1_VALUES, dtype=torch.bfloat16)
    return _look_up(codes, every.view(torch.int16)).view(torch.bfloat16).view(codes.shape).to(dtype)


def e2m1_decode_packed(packed: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Exact values ``[..., 2n]`` of packed codes ``[..., n]``: one look-up per byte gives both values."""
    pairs = e2m1_decode(unpack_e2m1(torch.arange(256, dtype=torch.uint8)[:, None]), torch.bfloat16)  # [256, 2]
    values = _look_up(packed, pairs.view(torch.int32).flatten()).view(torch.bfloat16)
    return values.view(*packed.shape[:-1], 2 * packed.shape[-1]).to(dtype)


def pack_e2m1(codes: Tensor) -> Tensor:
    """Two codes per byte: ``[..., 2n]`` to ``[..., n]``, even column in the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_e2m1(packed: Tensor) -> Tensor:
    """Inverse of :func:`pack_e2m1`: uint8 ``[..., n]`` to codes ``[..., 2n]``."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def ue8m0_decode(scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """``2**(byte - 127)`` exactly, also the subnormal ``2**-127`` of byte 0; byte 255 is NaN."""
    table = torch.exp2(torch.arange(256, dtype=torch.float64) - UE8M0_BIAS)
    table[UE8M0_NAN] = torch.nan
    exact = table.to(torch.bfloat16)
    return _look_up(scales, exact.view(torch.int16)).view(torch.bfloat16).view(scales.shape).to(dtype)


def ue8m0_encode(exponents: Tensor) -> Tensor:
    """Bytes of the scales ``2**exponents``, exponents clamped to [-127, 127]."""
    return (exponents.clamp(-UE8M0_BIAS, UE8M0_BIAS) + UE8M0_BIAS).to(torch.uint8)


def ceil_log2(values: Tensor) -> Tensor:
    """Smallest integer ``e`` (int32) with ``value <= 2**e``, exact, for positive values (``cl2`` of spec 0.2)."""
    mantissa, exponent = torch.frexp(values)  # mantissa in [0.5, 1)
    return torch.where(mantissa == 0.5, exponent - 1, exponent)


def group_exponents(maxima: Tensor, limit: float, min_exponents: Tensor | None = None) -> Tensor:
    """Scale exponents that bring group maxima to at most ``limit``; a zero group gets 0 (scale 1).

    Args:
        maxima: largest magnitude per group, any shape, finite.
        limit: largest magnitude of the code format (448 or 6).
        min_exponents: lower bounds, same shape; a larger scale than needed is legal and costs precision only.
    """
    # In float64 the quotient of a float32 cannot round across a power of two.
    needed = ceil_log2(maxima.double().clamp_min(torch.finfo(torch.float64).tiny) / limit)
    needed = torch.where(maxima > 0, needed, 0)
    if min_exponents is not None:
        needed = torch.maximum(needed, min_exponents.to(needed.dtype))
    return needed.clamp(-UE8M0_BIAS, UE8M0_BIAS)


def _require_finite(values: Tensor) -> None:
    if not torch.isfinite(values).all():
        raise ValueError(
            f"cannot quantise {int((~torch.isfinite(values)).sum())} NaN or infinite values: fix the weights"
        )


def _require_exact(dtype: torch.dtype) -> None:
    if dtype not in _EXACT_DTYPES:
        raise ValueError(f"dequantising to {dtype} would round or overflow: use one of {_EXACT_DTYPES}")


def _scaled(values: Tensor, exponents: Tensor) -> Tensor:
    """``values * 2**-exponents`` in float64, so that no power of two over- or underflows."""
    return torch.ldexp(values.double(), -exponents.double())


def tile_grid(rows: int, columns: int) -> tuple[int, int]:
    """Shape of the scale grid of an FP8 weight ``[rows, columns]``."""
    return -(-rows // GROUP), -(-columns // GROUP)


def _per_tile(grid: Tensor, rows: int, columns: int) -> Tensor:
    """Expand one value per 32x32 tile to ``[rows, columns]``."""
    return grid.repeat_interleave(GROUP, 0)[:rows].repeat_interleave(GROUP, 1)[:, :columns]


def quantize_fp8_tiles(weight: Tensor, min_exponents: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Encode ``[O, I]`` floats as e4m3 with one power-of-two scale per 32x32 tile, chosen from the tile's maximum.

    Args:
        weight: ``[O, I]``, finite; the axes need not be multiples of 32.
        min_exponents: optional lower bounds of the scale exponents, ``[ceil(O/32), ceil(I/32)]``.
    Returns:
        codes uint8 ``[O, I]`` and scales uint8 ``[ceil(O/32), ceil(I/32)]``.
    """
    _require_finite(weight)
    rows, columns = weight.shape
    grid_rows, grid_columns = tile_grid(rows, columns)
    padded = weight.new_zeros(grid_rows * GROUP, grid_columns * GROUP)
    padded[:rows, :columns] = weight.abs()
    maxima = padded.view(grid_rows, GROUP, grid_columns, GROUP).amax(dim=(1, 3))
    exponents = group_exponents(maxima, E4M3_MAX, min_exponents)
    codes = e4m3_encode(_scaled(weight, _per_tile(exponents, rows, columns)))
    return codes, ue8m0_encode(exponents)


def dequantize_fp8_tiles(codes: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Exact values ``[O, I]`` of an FP8 weight: codes ``[O, I]``, scales uint8 ``[ceil(O/32), ceil(I/32)]``."""
    _require_exact(dtype)
    rows, columns = codes.shape
    values = e4m3_decode(codes, dtype)
    factors = ue8m0_decode(scales, dtype)
    if rows % GROUP == 0 and columns % GROUP == 0:  # without expanding the scales: the released weights are large
        tiles = values.view(rows // GROUP, GROUP, columns // GROUP, GROUP)
        return tiles.mul_(factors[:, None, :, None]).view(rows, columns)
    return values.mul_(_per_tile(factors, rows, columns))


def _row_exponents(rows: Tensor, limit: float, min_exponents: Tensor | None) -> Tensor:
    if rows.shape[-1] % GROUP != 0:
        raise ValueError(f"rows of {rows.shape[-1]} columns have no whole groups: use a multiple of {GROUP} columns")
    _require_finite(rows)
    maxima = rows.unflatten(-1, (-1, GROUP)).abs().amax(-1)
    return group_exponents(maxima, limit, min_exponents)


def quantize_fp4_rows(weight: Tensor, min_exponents: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Encode ``[O, I]`` floats as packed e2m1 with one power-of-two scale per row and 32 columns.

    Returns:
        packed codes uint8 ``[O, I/2]`` and scales uint8 ``[O, I/32]``.
    """
    exponents = _row_exponents(weight, E2M1_MAX, min_exponents)
    codes = e2m1_encode(_scaled(weight, exponents.repeat_interleave(GROUP, -1)))
    return pack_e2m1(codes), ue8m0_encode(exponents)


def dequantize_fp4_rows(packed: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Exact values ``[O, I]`` of an FP4 weight: packed uint8 ``[O, I/2]``, scales uint8 ``[O, I/32]``."""
    _require_exact(dtype)
    values = e2m1_decode_packed(packed, dtype)
    return _times_groups(values, scales, dtype)


def quantize_table_rows(rows: Tensor, min_exponents: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Encode ``[n, width]`` floats as e4m3 with one power-of-two scale per row and 32 columns.

    Returns:
        codes uint8 ``[n, width]`` and scales uint8 ``[n, width/32]``.
    """
    exponents = _row_exponents(rows, E4M3_MAX, min_exponents)
    codes = e4m3_encode(_scaled(rows, exponents.repeat_interleave(GROUP, -1)))
    return codes, ue8m0_encode(exponents)


def dequantize_table_rows(codes: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Exact values ``[n, width]`` of table rows: codes ``[n, width]``, scales uint8 ``[n, width/32]``."""
    _require_exact(dtype)
    return _times_groups(e4m3_decode(codes, dtype), scales, dtype)


def _times_groups(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    factors = ue8m0_decode(scales, dtype)
    return values.unflatten(-1, (-1, GROUP)).mul_(factors[..., None]).flatten(-2)
