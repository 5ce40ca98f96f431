"""Straight-through versions of every number format: the forward value is the rounded one, the gradient passes through.

The bit tricks keep each function free of branches and tables, so that a compiler fuses it into its neighbours. The
formats are those of spec 0.2; a test compares each with the executable specification's.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MANTISSA = (1 << 23) - 1


def _ceil_log2(value: Tensor) -> Tensor:
    """Smallest int32 ``e`` with ``value <= 2**e``, for positive normal float32 values."""
    bits = value.view(torch.int32)
    return (bits >> 23) - 127 + ((bits & _MANTISSA) != 0).to(torch.int32)


def _power_of_two(exponent: Tensor) -> Tensor:
    """``2**exponent`` in float32, -126 <= exponent <= 127."""
    return ((exponent.clamp(-126, 127) + 127) << 23).view(torch.float32)


def _e4m3(value: Tensor) -> Tensor:
    return value.clamp(-448, 448).to(torch.float8_e4m3fn).float()


def _e2m1(value: Tensor) -> Tensor:
    """Nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6 with ties to the even code: round() takes ties to even in each binade."""
    size = value.abs()
    low, middle, high = torch.round(size * 2) * 0.5, torch.round(size), torch.round(size * 0.5) * 2
    rounded = torch.where(size < 2, low, torch.where(size < 4, middle, high)).clamp(max=6)
    return torch.copysign(rounded, value)


def _pass_through(value: Tensor, rounded: Tensor) -> Tensor:
    return value + (rounded.to(value.dtype) - value).detach()


def _groups(value: Tensor, size: int) -> tuple[Tensor, Tensor]:
    groups = value.detach().float().unflatten(-1, (-1, size))
    return groups, groups.abs().amax(-1, keepdim=True)


def q8(value: Tensor) -> Tensor:
    """``deq(Q8(value))``: groups of 32, e4m3, power-of-two scale."""
    groups, largest = _groups(value, 32)
    exponent = _ceil_log2(largest.clamp(min=1e-4) / 448)
    rounded = _e4m3(groups * _power_of_two(-exponent)) * _power_of_two(exponent)
    return _pass_through(value, rounded.flatten(-2))


def q4u(value: Tensor) -> Tensor:
    """``deq(Q4u(value))``: groups of 32, e2m1, power-of-two scale. Gradient passes."""
    groups, largest = _groups(value, 32)
    exponent = _ceil_log2(largest.clamp(min=1e-30) / 6)
    rounded = _e2m1(groups * _power_of_two(-exponent)) * _power_of_two(exponent)
    return _pass_through(value, rounded.flatten(-2))


def q4e(value: Tensor) -> Tensor:
    """``deq(Q4e(value))``: groups of 16, e2m1, e4m3 scale."""
    groups, largest = _groups(value, 16)
    scale = _e4m3(largest.clamp(min=6 * 2.0**-9) / 6)
    return _pass_through(value, (_e2m1(groups * (1.0 / scale)) * scale).flatten(-2))


def fp8_weight(weight: Tensor) -> Tensor:
    """``[..., O, I]`` rounded to e4m3 with one power-of-two scale per 32 x 32 tile; O and I are padded as needed."""
    rows, columns = weight.shape[-2:]
    padded = torch.nn.functional.pad(weight.detach().float(), (0, -columns % 32, 0, -rows % 32))
    tiles = padded.unflatten(-1, (-1, 32)).unflatten(-3, (-1, 32))  # [..., O/32, 32, I/32, 32]
    exponent = _ceil_log2(tiles.abs().amax((-3, -1), keepdim=True).clamp(min=1e-30) / 448)
    rounded = _e4m3(tiles * _power_of_two(-exponent)) * _power_of_two(exponent)
    return _pass_through(weight, rounded.flatten(-4, -3).flatten(-2)[..., :rows, :columns])


def fp4_weight(weight: Tensor) -> Tensor:
    """``[..., O, I]`` rounded to e2m1 with one power-of-two scale per row and 32 columns."""
    return q4u(weight)


def table_rows(rows: Tensor) -> Tensor:
    """``[..., width]`` rounded to e4m3 with one power-of-two scale per 32 columns, as stored n-gram rows."""
    groups, largest = _groups(rows, 32)
    exponent = _ceil_log2(largest.clamp(min=1e-30) / 448)
    rounded = _e4m3(groups * _power_of_two(-exponent)) * _power_of_two(exponent)
    return _pass_through(rows, rounded.flatten(-2))


def bf16_weight(weight: Tensor) -> Tensor:
    """Rounded to bf16."""
    return _pass_through(weight, weight.detach().bfloat16())
