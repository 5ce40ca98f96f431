"""Roundings and small formats inside Triton kernels: bf16, e2m1, e4m3 and power-of-two scales (spec 0.2).

Bits are those of :mod:`deepinfer.ops.number_formats`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def round_bf16(x):
    """float32 rounded to the nearest bf16 value, ties to even, still float32."""
    return x.to(tl.bfloat16).to(tl.float32)


@triton.jit
def power_of_two(exponent):
    """``2**exponent`` (int32 in [-126, 127]) as float32."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def e2m1_exponent(largest):
    """Smallest ``e`` with ``largest <= 6 * 2**e``: the scale of ``Q4u``. float32, positive and normal; gives int32."""
    bits = tl.maximum(largest, 7.052966104933725e-38).to(tl.int32, bitcast=True)  # 6 * 2**-126
    return ((bits + 0x3FFFFF) >> 23) - 129


@triton.jit
def e4m3_exponent(largest):
    """Smallest ``e`` with ``largest <= 448 * 2**e``: the scale of ``Q8``. float32, positive; gives int32."""
    bits = tl.maximum(largest, 1e-4).to(tl.int32, bitcast=True)
    return ((bits + 0x1FFFFF) >> 23) - 135


@triton.jit
def e2m1_code(x):
    """Nearest e2m1 code (int32, 0 to 15) of float32, ties to the even code, saturating at 6."""
    size = tl.abs(x)
    code = (size > 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32) + (size > 1.25).to(tl.int32)
    code += (size >= 1.75).to(tl.int32) + (size > 2.5).to(tl.int32) + (size >= 3.5).to(tl.int32)
    code += (size > 5.0).to(tl.int32)
    return code | ((x.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def e2m1_value(code):
    """Value (float32) of an e2m1 code in the low four bits of an int32; higher bits are ignored.

    Sign and the three magnitude bits are moved to the sign and to the boundary of exponent and fraction. That is the
    value times 2**-126, a subnormal for code 1.
    """
    bits = ((code & 8) << 28) | ((code & 7) << 22)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2**126


@triton.jit
def e4m3_code(x):
    """Nearest e4m3 code (int32, 0 to 255) of float32, ties to even, saturating at 448."""
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
