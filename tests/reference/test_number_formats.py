"""Rounding and block quantisers: spec Appendix A.6, the formats' own code tables, and torch's casts."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deepinfer.reference.number_formats import (
    BF16,
    E2M1,
    E2M1_VALUES,
    E4M3,
    bf16,
    ceil_log2,
    power_of_two,
    q4e,
    q4e_codes,
    q4u,
    q4u_codes,
    q8,
    q8_codes,
    round_to,
)

ALL_BF16 = torch.arange(65536).to(torch.int16).view(torch.bfloat16).float()
FINITE_BF16 = ALL_BF16[ALL_BF16.isfinite()]
E4M3_VALUES = torch.arange(127).to(torch.uint8).view(torch.float8_e4m3fn).double()  # codes 0x00 to 0x7E, ascending

floats = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**100), max_value=2.0**100)


def group(*values: float, size: int = 32) -> Tensor:
    return torch.tensor([*values, *[0.0] * (size - len(values))])


def test_e4m3_equals_torch_cast_on_every_bf16_value_in_range() -> None:
    inside = FINITE_BF16[FINITE_BF16.abs() <= 448]
    assert torch.equal(round_to(inside, E4M3).float(), inside.to(torch.float8_e4m3fn).float())


def test_e4m3_takes_midpoints_to_the_even_code_and_saturates() -> None:
    middle = (E4M3_VALUES[:-1] + E4M3_VALUES[1:]) / 2
    even = E4M3_VALUES[[code + code % 2 for code in range(len(middle))]]
    assert torch.equal(round_to(middle, E4M3), even)
    assert torch.equal(round_to(-middle, E4M3), -even)
    assert round_to(torch.tensor([449.0, 464.0, 1e9, -1e9]), E4M3).tolist() == [448, 448, 448, -448]


def test_e2m1_takes_midpoints_to_the_even_code_and_saturates() -> None:
    middle = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert round_to(middle, E2M1).tolist() == [0, 1, 1, 2, 2, 4, 4]
    assert round_to(torch.tensor([6.5, 7.0, 100.0, -100.0]), E2M1).tolist() == [6, 6, 6, -6]
    assert torch.equal(round_to(torch.tensor(E2M1_VALUES), E2M1).float(), torch.tensor(E2M1_VALUES))


@settings(max_examples=300, deadline=None)
@given(st.lists(floats, min_size=1, max_size=64))
def test_bf16_equals_torch_cast(values: list[float]) -> None:
    tensor = torch.tensor(values)
    assert torch.equal(round_to(tensor, BF16).float(), tensor.bfloat16().float())


def test_bf16_equals_torch_cast_on_ties_and_subnormals() -> None:
    near = (FINITE_BF16[:, None].double() * torch.tensor([1.0, 1 + 2**-8, 1 + 2**-9, 1 - 2**-9])).float()
    near = near[near.abs() < 3.3e38]
    assert torch.equal(round_to(near, BF16).float(), near.bfloat16().float())


def test_float64_is_taken_to_float32_first() -> None:
    above_tie = 1 + 2.0**-8 + 2.0**-40  # an fp32 accumulator has lost the last bit, so the tie goes down
    assert round_to(torch.tensor(above_tie, dtype=torch.float64), BF16).item() == 1
    assert bf16(torch.tensor([above_tie], dtype=torch.float64)).dtype == torch.float64


@settings(max_examples=300, deadline=None)
@given(st.floats(width=32, min_value=2.0**-126, max_value=2.0**126))
def test_ceil_log2_is_the_smallest_sufficient_power(value: float) -> None:
    exponent = int(ceil_log2(torch.tensor(value)))
    assert Fraction(2) ** (exponent - 1) < Fraction(value) <= Fraction(2) ** exponent


def test_power_of_two_is_exact() -> None:
    exponents = torch.arange(-300, 300)
    assert power_of_two(exponents).tolist() == [math.ldexp(1.0, exponent) for exponent in exponents.tolist()]


@pytest.mark.parametrize(
    ("largest", "scale_byte"), [(448.0, 127), (450.0, 128), (0.0, 105), (449.0, 128), (224.0, 126)]
)
def test_q8_scale_of_appendix_a6(largest: float, scale_byte: int) -> None:
    quantised = q8_codes(group(largest))
    assert int(ceil_log2(quantised.scales)) + 127 == scale_byte
    if largest == 448.0:
        assert quantised.codes[0, 0] == 448  # code 0x7E
    if largest == 0.0:
        assert not quantised.codes.any()


def test_q4u_tie_of_appendix_a6() -> None:
    quantised = q4u_codes(group(5.0))
    assert quantised.scales.item() == 1
    assert quantised.codes[0, 0] == 4


def test_q4e_of_appendix_a6() -> None:
    quantised = q4e_codes(group(5.0, size=16))
    assert quantised.scales.item() == 0.8125
    assert quantised.codes[0, 0] == 6  # 6.15 saturates
    assert quantised.dequantise()[0] == 4.875
    zero = q4e_codes(torch.zeros(16))
    assert zero.scales.item() == 2.0**-9
    assert not zero.codes.any()


def test_q4e_multiplies_by_a_float32_reciprocal() -> None:
    """1.25 * 1.875: the exact quotient is a tie (code 1), the product with fp32(1 / 1.875) lies above it (code 1.5)."""
    quantised = q4e_codes(group(11.25, 2.34375, 4.6875, 9.375, size=16))
    assert quantised.scales.item() == 1.875
    assert quantised.codes[0, :4].tolist() == [6.0, 1.5, 3.0, 6.0]


def nearest(value: float, table: list[float]) -> float:
    """Nearest entry of an ascending table of magnitudes, ties to the even index: rounding without any arithmetic."""
    exact = Fraction(abs(value))
    index = min(range(len(table)), key=lambda code: (abs(Fraction(table[code]) - exact), code % 2))
    return math.copysign(table[index], value)


def scalar_quantise(values: list[float], kind: str) -> list[float]:
    """Spec 0.2 with Python numbers only, for one group."""
    largest = max(abs(value) for value in values)
    e4m3 = E4M3_VALUES.tolist()
    if kind == "q4e":
        largest = max(largest, 6 * 2.0**-9)
        scale = abs(nearest(min(largest / 6, 448.0), e4m3))
        reciprocal = torch.tensor(1.0) / torch.tensor(scale)
        scaled = [float(torch.tensor(value) * reciprocal) for value in values]
        return [nearest(value, list(E2M1_VALUES)) * scale for value in scaled]
    limit, floor, table = (448, 1e-4, e4m3) if kind == "q8" else (6, 6 * 2.0**-126, list(E2M1_VALUES))
    exponent = -200
    while Fraction(max(largest, floor)) > limit * Fraction(2) ** exponent:
        exponent += 1
    return [nearest(math.ldexp(value, -exponent), table) * 2.0**exponent for value in values]


@pytest.mark.parametrize(("kind", "size"), [("q8", 32), ("q4u", 32), ("q4e", 16)])
def test_quantisers_equal_a_scalar_implementation(kind: str, size: int) -> None:
    quantise = {"q8": q8, "q4u": q4u, "q4e": q4e}[kind]
    generator = torch.Generator().manual_seed(3)
    for magnitude in (1e-7, 1e-3, 1.0, 30.0, 5000.0):
        values = (magnitude * torch.randn(2, 2 * size, generator=generator)).bfloat16().float()
        expected = [
            number
            for row in values.tolist()
            for start in (0, size)
            for number in scalar_quantise(row[start : start + size], kind)
        ]
        assert quantise(values).flatten().tolist() == expected
        wide = quantise(values.double())
        assert wide.dtype == torch.float64
        assert wide.flatten().tolist() == expected


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(width=32, min_value=-1000, max_value=1000), min_size=32, max_size=32))
def test_quantisers_are_idempotent_within_their_range(values: list[float]) -> None:
    """Quantising stored values again keeps them: replay and copies of caches rely on it."""
    tensor = bf16(torch.tensor(values))
    for quantise in (q8, q4u):
        once = quantise(tensor)
        assert torch.equal(quantise(once), once)


def test_gradients_pass_straight_through() -> None:
    for quantise in (bf16, q8, q4u, q4e):
        value = torch.randn(3, 32, requires_grad=True)
        weight = torch.randn(3, 32)
        (quantise(value) * weight).sum().backward()
        assert value.grad is not None
        assert torch.equal(value.grad, weight)


def test_a_switch_that_is_off_changes_nothing() -> None:
    value = torch.randn(2, 32)
    for quantise in (bf16, q8, q4u, q4e):
        assert quantise(value, False) is value
        assert not torch.equal(quantise(value, True), value)
