"""Rounding to bf16, e4m3 and e2m1, and the three block quantisers of spec 0.2, written from their definitions.

Everything here is computed in float64, where each intermediate (a power-of-two scaling of a value with few bits) is
exact, so that float32 and float64 inputs follow one path. A value reaches a rounding as the float32 number that the
model's arithmetic produces: a float64 input is taken to float32 first. Functions named after an operator of the
specification return dequantised values in the dtype of their input and pass gradients straight through; ``*_codes``
functions return the stored form.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of the FP4 codes 0 to 7; codes 8 to 15 are their negatives."""


@dataclass(frozen=True, slots=True)
class FloatFormat:
    """A binary float format: all that rounding to it needs."""

    mantissa_bits: int
    min_exponent: int
    """Exponent of the smallest normal number; below it the spacing stays constant."""
    largest: float | None
    """Values beyond saturate here; None: no saturation (bf16, whose range we never leave)."""


BF16 = FloatFormat(mantissa_bits=7, min_exponent=-126, largest=None)
E4M3 = FloatFormat(mantissa_bits=3, min_exponent=-6, largest=448.0)
E2M1 = FloatFormat(mantissa_bits=1, min_exponent=0, largest=6.0)


class _StraightThrough(torch.autograd.Function):
    """Forward: the rounded value. Backward: as if nothing had been rounded."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, rounded: Tensor) -> Tensor:
        return rounded.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def straight_through(value: Tensor, rounded: Tensor) -> Tensor:
    """``rounded``, in the dtype of ``value``, with the gradient of ``value``."""
    return _StraightThrough.apply(value, rounded.detach().to(value.dtype))


def power_of_two(exponent: Tensor) -> Tensor:
    """``2**exponent`` in float64, exact: the exponent field is written directly. For -1022 <= exponent <= 1023."""
    return ((exponent.to(torch.int64) + 1023) << 52).view(torch.float64)


def ceil_log2(value: Tensor) -> Tensor:
    """``cl2`` of spec 0.2: the smallest integer e with ``value <= 2**e``, for positive values."""
    mantissa, exponent = torch.frexp(value.double())  # value = mantissa * 2**exponent, mantissa in [0.5, 1)
    return exponent.to(torch.int64) - (mantissa == 0.5).to(torch.int64)


def round_to(value: Tensor, form: FloatFormat) -> Tensor:
    """Nearest number of ``form`` to the float32 ``value``, ties to the even mantissa. Float64 out."""
    wide = value.detach().float().double()
    exponent = torch.frexp(wide).exponent.to(torch.int64) - 1  # value = 1.m * 2**exponent
    spacing = power_of_two(exponent.clamp(min=form.min_exponent) - form.mantissa_bits)
    rounded = torch.round(wide / spacing) * spacing  # torch.round takes ties to even
    return rounded if form.largest is None else rounded.clamp(-form.largest, form.largest)


def bf16(value: Tensor, on: bool = True) -> Tensor:
    """``bf`` of spec 0.2; the identity where its switch is off."""
    return straight_through(value, round_to(value, BF16)) if on else value


def fp32(value: Tensor, on: bool = True) -> Tensor:
    """Kept in fp32 between two uses: rounds a float64 value; the identity where its switch is off."""
    return straight_through(value, value.detach().float()) if on else value


@dataclass(frozen=True, slots=True)
class Quantised:
    """Codes and scales of the last axis in groups, in float64. ``codes`` are values of the format, not bits."""

    codes: Tensor  # [..., groups, group size]
    scales: Tensor  # [..., groups]

    def dequantise(self) -> Tensor:
        """``codes * scales`` with the groups joined again, [..., groups * size]."""
        return (self.codes * self.scales[..., None]).flatten(-2)


def _grouped(value: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Last axis split in groups of ``size``, and the largest magnitude of each."""
    assert value.shape[-1] % size == 0, f"width {value.shape[-1]} is not a multiple of the group size {size}"
    groups = value.detach().float().double().unflatten(-1, (-1, size))
    return groups, groups.abs().amax(-1)


def q8_codes(value: Tensor) -> Quantised:
    """``Q8``: groups of 32, e4m3 codes, power-of-two scale that brings the group maximum to at most 448."""
    groups, largest = _grouped(value, 32)
    scales = power_of_two(ceil_log2(largest.clamp(min=1e-4) / 448))
    return Quantised(round_to(groups / scales[..., None], E4M3), scales)


def q4u_codes(value: Tensor) -> Quantised:
    """``Q4u``: groups of 32, e2m1 codes, power-of-two scale that brings the group maximum to at most 6."""
    groups, largest = _grouped(value, 32)
    scales = power_of_two(ceil_log2(largest.clamp(min=6 * 2.0**-126) / 6))
    return Quantised(round_to(groups / scales[..., None], E2M1), scales)


def q4e_codes(value: Tensor) -> Quantised:
    """``Q4e``: groups of 16, e2m1 codes, e4m3 scale. A scale that was rounded down makes the group saturate at 6.

    The float32 reciprocal and product belong to the definition: they decide which side of a tie a value falls on.
    """
    groups, largest = _grouped(value, 16)
    scales = round_to((largest.clamp(min=6 * 2.0**-9).float() / 6).clamp(max=448.0), E4M3)
    scaled = groups.float() * (1.0 / scales.float())[..., None]
    return Quantised(round_to(scaled, E2M1), scales)


def q8(value: Tensor, on: bool = True) -> Tensor:
    """``deq(Q8(value))``; the identity where its switch is off."""
    return straight_through(value, q8_codes(value).dequantise()) if on else value


def q4u(value: Tensor, on: bool = True) -> Tensor:
    """``deq(Q4u(value))``; the identity where its switch is off."""
    return straight_through(value, q4u_codes(value).dequantise()) if on else value


def q4e(value: Tensor, on: bool = True) -> Tensor:
    """``deq(Q4e(value))``; the identity where its switch is off."""
    return straight_through(value, q4e_codes(value).dequantise()) if on else value
