"""Q8 inside kernels is bit-equal to ``ops.number_formats`` on every bf16 magnitude."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.formats.e4m3 import e4m3_code, q8_groups
from deepinfer.kernels.formats.float32 import power_of_two
from deepinfer.ops import number_formats as nf

pytestmark = pytest.mark.gpu


@triton.jit
def _q8_kernel(x, values, codes, scales):
    group = tl.program_id(0) * 16 + tl.arange(0, 16)
    offsets = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    scaled, rounded, exponent = q8_groups(tl.load(x + offsets))
    tl.store(values + offsets, rounded * power_of_two(exponent)[:, None])
    tl.store(codes + offsets, e4m3_code(rounded, scaled))
    tl.store(scales + group, (exponent + 127).to(tl.uint8))


def _check(x: Tensor) -> None:
    values, codes = torch.empty_like(x), torch.empty_like(x, dtype=torch.uint8)
    scales = x.new_empty(x.shape[0], dtype=torch.uint8)
    _q8_kernel[(x.shape[0] // 16,)](x, values, codes, scales)
    expected_codes, expected_scales = nf.q8(x)
    assert torch.equal(codes, expected_codes)
    assert torch.equal(scales, expected_scales.flatten())
    assert torch.equal(values, nf.q8_round(x))


def test_random_groups_of_all_magnitudes(device: torch.device):
    size = torch.exp2(torch.randint(-40, 100, (64, 1)).float())
    _check((torch.randn(64, 32) * size).to(device))


def test_scale_steps_and_ties(device: torch.device):
    """Group maxima at and beside 448 * 2**k; elements half-way between codes, subnormal codes, signed zeros."""
    largest = 448.0 * torch.exp2(torch.arange(-30.0, 34.0))
    beside = torch.stack((largest, largest.nextafter(largest * 2), largest.nextafter(largest * 0)), dim=1)
    x = torch.zeros(64, 32)
    steps = torch.tensor([0.5, 1.5, 2.5, 7.5, 8.5, 17.0, 19.0, 30.0, 34.0, 38.0, -0.5, -0.25, -0.0, -1.5]) * 2.0**-9
    x[:, 3 : 3 + len(steps)] = steps * torch.exp2(torch.arange(-30.0, 34.0)).unsqueeze(1)
    for which in range(3):
        x[:, 0] = beside[:, which]
        x[:, 1:3] = 0
        _check(x.to(device))
