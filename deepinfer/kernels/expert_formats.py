"""Small parts of the experts' kernels: e2m1 times its scale in bf16, and a dot that is right in the interpreter too."""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer.kernels.fp4_bits import e2m1_value, power_of_two

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""The interpreter multiplies the raw bits of bf16 tiles: products there go through float32."""


@triton.jit
def exact_dot(a, b, acc):
    """``a @ b + acc`` of bf16 tiles in float32."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc)


@triton.jit
def e2m1_times(codes, exponent):
    """bf16 values of e2m1 codes (int32, 0 to 15) times ``2**exponent``, exact."""
    return (e2m1_value(codes) * power_of_two(exponent)).to(tl.bfloat16)
