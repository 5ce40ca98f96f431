"""Number formats against their definition: every code, every tie, the vectors of spec A.6."""

import numpy as np
import pytest
import torch

from deepinfer.ops import number_formats as nf

E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def nearest_e2m1(x: float) -> float:
    """Nearest value, ties to the even code, by search."""
    magnitude = min(abs(x), 6.0)
    best = min(range(8), key=lambda code: (abs(E2M1[code] - magnitude), code % 2))
    return float(np.copysign(E2M1[best], x))


def test_e2m1_rounding_matches_search_including_ties():
    values = torch.cat((torch.arange(-112, 113) / 16, torch.randn(500, generator=torch.Generator().manual_seed(1)) * 4))
    expected = torch.tensor([nearest_e2m1(float(x)) for x in values])
    assert torch.equal(nf.e2m1_round(values.float()), expected)


def test_packing_is_low_nibble_first_and_reversible_for_all_codes():
    codes = torch.arange(256, dtype=torch.uint8)
    values = nf.e2m1_unpack(codes.view(1, 256))
    assert values[0, 2 * 0x3A].item() == -1.0  # low nibble 0xA
    assert values[0, 2 * 0x3A + 1].item() == 1.5  # high nibble 0x3
    assert torch.equal(nf.e2m1_pack(values), codes.view(1, 256))


def test_scale_bytes_are_powers_of_two_down_to_the_subnormal():
    values = nf.scale_from_byte(torch.arange(255, dtype=torch.uint8)).double()
    assert torch.equal(values, torch.exp2(torch.arange(255, dtype=torch.float64) - 127))


@pytest.mark.parametrize(("value", "expected"), [(1.0, 0), (1.0000001, 1), (0.75, 0), (0.5, -1), (448.0, 9), (2.0, 1)])
def test_ceil_log2_is_exact_on_the_bits(value, expected):
    assert nf.ceil_log2(torch.tensor([value])).item() == expected


def test_vectors_of_the_specification():
    group = torch.zeros(3, 32)
    group[0, 5], group[1, 5] = 448.0, 450.0
    codes, scales = nf.q8(group)
    assert scales.flatten().tolist() == [127, 128, 105]
    assert codes[0, 5].item() == 0x7E
    assert codes[2].count_nonzero() == 0
    five = torch.zeros(1, 32)
    five[0, 0] = 5
    codes, scales = nf.q4u(five)
    assert scales.item() == 127
    assert nf.q4u_decode(codes, scales)[0, 0].item() == 4.0
    codes, scales = nf.q4e(five)
    assert nf.e4m3_decode(scales)[0].tolist() == [0.8125, 2.0**-9]
    assert nf.q4e_decode(codes, scales)[0, 0].item() == 4.875
    assert nf.q4e_decode(codes, scales)[0, 1:].count_nonzero() == 0


def naive_q8(row: np.ndarray) -> np.ndarray:
    out = np.empty_like(row)
    for start in range(0, len(row), 32):
        group = row[start : start + 32]
        exponent = int(np.ceil(np.log2(max(np.abs(group).max(), 1e-4) / 448)))
        scaled = torch.tensor(group * 2.0**-exponent, dtype=torch.float32)
        out[start : start + 32] = scaled.to(torch.float8_e4m3fn).double().numpy() * 2.0**exponent
    return out


def test_q8_matches_a_loop_and_its_shortcut():
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(7, 96, generator=generator) * torch.exp2(
        torch.randint(-12, 12, (7, 1), generator=generator).float()
    )
    x = x.bfloat16()
    expected = torch.tensor(np.stack([naive_q8(row.double().numpy()) for row in x])).float()
    assert torch.equal(nf.q8_decode(*nf.q8(x)), expected)
    assert torch.equal(nf.q8_round(x), expected)


def test_q4_shortcut_and_saturation():
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(4)).bfloat16()
    assert torch.equal(nf.q4u_decode(*nf.q4u(x)), nf.q4u_round(x))
    huge = torch.full((1, 32), 6.5)  # e = 1, 3.25 -> 3 -> 6
    assert nf.q4u_round(huge).unique().tolist() == [6.0]
    codes, scales = nf.q4e(x)
    assert codes.shape == (5, 32)
    assert scales.shape == (5, 4)
    error = (nf.q4e_decode(codes, scales) - x.float()).abs().amax()
    assert error < 0.2 * x.float().abs().amax()
