"""FP8 inside Triton kernels: e4m3 codes and values, and Q8, which is e4m3 in groups of 32 that share a power of two.

Bits are those of :mod:`deepinfer.ops.number_formats`. Rounding is done with float32 additions or with integers, so the
interpreter, every compiler and every device agree on it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer.kernels.formats.float32 import power_of_two

LARGEST = tl.constexpr(3.4028234663852886e38)
"""Of float32."""


@triton.jit
def q8_exponent(largest):
    """Exponent ``e`` (int32) of a group's scale ``2**e``, from its largest magnitude (float32).

    The smallest ``e`` with ``max(largest, 1e-4) / 448 <= 2**e``; 448 is ``1.75 * 2**8``, hence the constants.
    """
    bits = tl.maximum(largest, 1e-4).to(tl.int32, bitcast=True)
    return ((bits + 0x1FFFFF) >> 23) - 135


@triton.jit
def e4m3_round(x):
    """The nearest e4m3 value of float32 ``x``, ``|x| <= 448``, ties to even. A zero result is +0."""
    exponent = tl.maximum((x.to(tl.int32, bitcast=True) >> 23) & 0xFF, 121)  # below 2**-6 the spacing stays
    anchor = (((exponent + 20) << 23) | 0x400000).to(tl.float32, bitcast=True)  # its last bit is worth one spacing
    return (x + anchor) - anchor


@triton.jit
def e4m3_code(value, x):
    """Code (uint8) of an exact e4m3 ``value`` (float32) that was rounded from ``x``, which gives the sign of a zero."""
    magnitude = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    subnormal = (tl.abs(value) * 512.0).to(tl.int32)
    code = tl.where(magnitude < (121 << 23), subnormal, (magnitude >> 20) - 960)
    return (code | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def e4m3_nearest_code(x):
    """Nearest e4m3 code (int32, 0 to 255) of any float32, ties to even, saturating at 448: needs no rounded value."""
    size = tl.minimum(tl.abs(x), 448.0)
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960  # rebias the exponent: (127 - 7) << 3
    # Below 2**-6 the spacing is 2**-9, which is the spacing of float32 at 2**14.
    subnormal = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < 0.015625, subnormal, normal)
    return code | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)


@triton.jit
def e4m3_value(code):
    """Value (float32) of a non-negative e4m3 code (int32, 0 to 126)."""
    return (code << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2**120


@triton.jit
def q8_groups(x):
    """Round groups along the last axis of float32 ``x`` (2 or 3 axes, the last of 32).

    Returns: x divided by the scales, the same rounded to e4m3 values (both float32), exponents without the last axis.
    """
    exponent = q8_exponent(tl.max(tl.abs(x), axis=len(x.shape) - 1))
    scaled = x * tl.expand_dims(power_of_two(-exponent), len(x.shape) - 1)
    return scaled, e4m3_round(scaled), exponent


@triton.jit
def e4m3_row(x):
    """Codes (uint8) of a row, float32 ``[groups, 32]``, under one power of two, and its exponent (int32).

    The exponent is that of Q8 for the largest magnitude of all. What is not finite becomes NaN.
    """
    size = tl.abs(x)
    largest = tl.max(tl.max(size, axis=1), axis=0)
    exponent = q8_exponent(tl.minimum(largest, LARGEST))
    codes = tl.where(size <= LARGEST, x * power_of_two(-exponent), float("nan")).to(tl.float8e4nv)
    return codes.to(tl.uint8, bitcast=True), exponent
