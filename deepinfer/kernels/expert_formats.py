"""Number formats inside the experts' kernels: Q8 of a tile, e2m1 to bf16, and a dot that the interpreter gets right.

Everything here is bit-exact against :mod:`deepinfer.ops.number_formats`.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""The interpreter keeps bf16 as raw bits in products and truncates casts to e4m3: kernels take another way there."""


@triton.jit
def exact_dot(a, b, acc):
    """``a @ b + acc`` of bf16 tiles in float32."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc)


@triton.jit
def round_to_e4m3(x):
    """Nearest e4m3 value (ties to even) of float32 values in [-448, 448], as float32."""
    if INTERPRETED:
        bits = x.to(tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        normal = (magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) & -0x100000
        # Adding 2**14 leaves a spacing of 2**-9, that of the subnormals.
        fine = (magnitude.to(tl.float32, bitcast=True) + 16384.0) - 16384.0
        rounded = tl.where(magnitude >= 0x3C800000, normal, fine.to(tl.int32, bitcast=True))
        return (rounded | (bits & -0x80000000)).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float8e4nv).to(tl.float32)


@triton.jit
def e4m3_code(x):
    """Code (uint8) of the nearest e4m3 value of float32 values in [-448, 448]."""
    if INTERPRETED:
        value = round_to_e4m3(x)
        bits = value.to(tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        normal = (magnitude >> 20) - ((127 - 7) << 3)
        subnormal = (magnitude.to(tl.float32, bitcast=True) * 512.0).to(tl.int32)
        code = tl.where(magnitude >= 0x3C800000, normal, subnormal)
        return (code | ((bits >> 24) & 0x80)).to(tl.uint8)
    else:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def power_of_two(exponent):
    """``2**exponent`` as float32 for int32 exponents in [-126, 127]."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def q8_exponent(largest):
    """Exponent of the Q8 scale of a group whose largest magnitude is ``largest`` (float32).

    The smallest ``e`` with ``largest <= 448 * 2**e``, from the bits: 448 is 1.75 * 2**8. A float32 division and its
    rounding (spec 0.2) give the same.
    """
    bits = tl.maximum(largest, 1e-4).to(tl.int32, bitcast=True)
    return (bits >> 23) - (127 + 8) + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)


@triton.jit
def e2m1_times(nibbles, exponent):
    """bf16 values of e2m1 codes (int32, 0 to 15) times ``2**exponent``, exact.

    The three magnitude bits in the place of the last exponent bits and the first mantissa bit of a float32 are the
    value times 2**-126, subnormals included.
    """
    bits = ((nibbles & 8) << 28) | ((nibbles & 7) << 22)
    value = bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2**126
    return (value * power_of_two(exponent)).to(tl.bfloat16)
