"""FP4 inside Triton kernels: codes and values of e2m1, and the exponent of a group's scale (spec 0.2 ``Q4u``).

Bits are those of :mod:`deepinfer.ops.number_formats`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def e2m1_exponent(largest):
    """Smallest ``e`` with ``largest <= 6 * 2**e``: the scale of ``Q4u``. float32, positive and normal; gives int32."""
    bits = tl.maximum(largest, 7.052966104933725e-38).to(tl.int32, bitcast=True)  # 6 * 2**-126
    return ((bits + 0x3FFFFF) >> 23) - 129


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
