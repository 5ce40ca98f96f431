"""float32 numbers by their bits: powers of two from an exponent, and what bf16 keeps of a number (spec 0.2)."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def power_of_two(exponent):
    """``2**exponent`` (int32 in [-126, 127]) as float32."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def round_bf16(x):
    """float32 rounded to the nearest bf16 value, ties to even, still float32."""
    return x.to(tl.bfloat16).to(tl.float32)
