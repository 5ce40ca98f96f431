"""The codecs against the definition of the formats, value by value."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from deepinfer.checkpoint import codecs


def e4m3_value(code: int) -> float:
    """Value by the definition: 4 exponent bits with bias 7, 3 mantissa bits, 0x7F is NaN."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code >> 3) & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def nearest_even_code(magnitude: float, values: list[float]) -> int:
    """Index of the nearest of the ascending ``values``; a tie goes to the even index."""
    distances = [abs(magnitude - value) for value in values]
    best = min(distances)
    winners = [index for index, distance in enumerate(distances) if distance == best]
    return next(index for index in winners if len(winners) == 1 or index % 2 == 0)


def test_e4m3_decodes_all_256_codes() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        values = codecs.e4m3_decode(codes, dtype)
        for code, value in enumerate(values.tolist()):
            expected = e4m3_value(code)
            assert (math.isnan(value) and math.isnan(expected)) or value == expected, code
            assert math.copysign(1, value) == math.copysign(1, expected) or math.isnan(expected)


def test_e4m3_encode_inverts_decode_and_maps_nan_to_nan() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    again = codecs.e4m3_encode(codecs.e4m3_decode(codes))
    finite = (codes & 0x7F) != 0x7F
    assert torch.equal(again[finite], codes[finite])
    assert bool(((again[~finite] & 0x7F) == 0x7F).all())


def test_e4m3_rounds_to_nearest_even_and_saturates() -> None:
    values = [e4m3_value(code) for code in range(127)]
    points = [(a + b) / 2 for a, b in itertools.pairwise(values)]  # all ties
    points += [math.nextafter(p, 1e9) for p in points] + [math.nextafter(p, 0) for p in points]
    points += [448.0, 449.0, 464.0, 465.0, 1e6, 2.0**-10, 2.0**-11, 0.0]
    tensor = torch.tensor(points, dtype=torch.float32)
    expected = [nearest_even_code(point, values) for point in tensor.tolist()]
    assert codecs.e4m3_encode(tensor).tolist() == expected
    assert codecs.e4m3_encode(-tensor).tolist() == [code + 128 for code in expected]
    assert codecs.e4m3_encode(torch.tensor([math.inf, -math.inf])).tolist() == [0x7E, 0xFE]


def test_e2m1_rounds_ties_to_the_even_code_and_saturates() -> None:
    values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    assert codecs.e2m1_decode(codecs.e2m1_encode(torch.tensor(ties))).tolist() == [0, 1, 1, 2, 2, 4, 4]
    points = ties + [math.nextafter(p, 9) for p in ties] + [math.nextafter(p, 0) for p in ties] + values + [7.0, 1e30]
    expected = [nearest_even_code(min(point, 6.0), values) for point in points]
    tensor = torch.tensor(points, dtype=torch.float64)
    # float32 cannot hold the neighbours of a tie at float64 distance, so step in float32 for those
    stepped = torch.nextafter(torch.tensor(ties), torch.tensor(9.0))
    assert codecs.e2m1_encode(stepped).tolist() == expected[7:14]
    stepped = torch.nextafter(torch.tensor(ties), torch.tensor(0.0))
    assert codecs.e2m1_encode(stepped).tolist() == expected[14:21]
    assert codecs.e2m1_encode(tensor[21:].float()).tolist() == expected[21:]
    assert codecs.e2m1_encode(-tensor[21:].float()).tolist() == [code + 8 for code in expected[21:]]


def test_e2m1_codes_survive_packing_with_the_even_column_low() -> None:
    codes = torch.tensor([[1, 2, 15, 8]], dtype=torch.uint8)
    packed = codecs.pack_e2m1(codes)
    assert packed.tolist() == [[0x21, 0x8F]]
    assert torch.equal(codecs.unpack_e2m1(packed), codes)
    every = torch.arange(256, dtype=torch.uint8)[None]
    assert torch.equal(codecs.pack_e2m1(codecs.unpack_e2m1(every)), every)
    sixteen = torch.arange(16, dtype=torch.uint8)
    assert torch.equal(codecs.e2m1_encode(codecs.e2m1_decode(sixteen)), sixteen)


def test_ue8m0_decodes_every_byte_exactly() -> None:
    values = codecs.ue8m0_decode(torch.arange(256, dtype=torch.uint8))
    assert values[:255].tolist() == [2.0 ** (byte - 127) for byte in range(255)]
    assert math.isnan(values[255])
    assert codecs.ue8m0_encode(torch.tensor([-200, -127, 0, 127, 300])).tolist() == [0, 0, 127, 254, 254]


def test_ceil_log2_is_exact_at_powers_of_two() -> None:
    values = torch.tensor([1.0, 2.0, 0.5, 1.0000001, 1.9999999, 2.0000002, 450 / 448, 2.0**-126])
    assert codecs.ceil_log2(values).tolist() == [0, 1, -1, 1, 1, 2, 1, -126]


@pytest.mark.parametrize(
    ("maximum", "byte", "code"), [(448.0, 127, 0x7E), (450.0, 128, None), (224.0, 126, 0x7E), (0.0, 127, 0)]
)
def test_scale_of_an_e4m3_group_follows_the_test_vectors(maximum: float, byte: int, code: int | None) -> None:
    row = torch.zeros(1, 32)
    row[0, 3] = maximum
    codes, scales = codecs.quantize_table_rows(row)
    assert scales.tolist() == [[byte]]
    if code is not None:
        assert codes[0, 3] == code
    assert codecs.quantize_fp8_tiles(row)[1].tolist() == [[byte]]


def test_scale_of_an_e2m1_group_follows_the_test_vectors() -> None:
    row = torch.zeros(1, 32)
    row[0, 7] = 5.0  # 5/6 is below one, and five is a tie between four and six
    packed, scales = codecs.quantize_fp4_rows(row)
    assert scales.tolist() == [[127]]
    assert codecs.dequantize_fp4_rows(packed, scales)[0, 7] == 4.0


@pytest.mark.parametrize("shape", [(32, 32), (33, 65), (1, 32), (96, 64), (5, 7)])
def test_fp8_tiles_round_trip_within_half_a_step(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(shape, generator=generator) * torch.logspace(-3, 3, shape[1])
    codes, scales = codecs.quantize_fp8_tiles(weight)
    assert codes.shape == shape
    assert scales.shape == (-(-shape[0] // 32), -(-shape[1] // 32))
    values = codecs.dequantize_fp8_tiles(codes, scales)
    per_element = torch.exp2(scales.double() - 127).repeat_interleave(32, 0).repeat_interleave(32, 1)
    step = (weight.abs() / 16).maximum(per_element[: shape[0], : shape[1]].float() * 2.0**-10)
    assert bool(((values - weight).abs() <= step).all())
    assert int((codes & 0x7F).max()) > 0x77  # the maximum sits in the last binade, so no range is wasted


def test_fp8_scales_belong_to_their_own_tile() -> None:
    codes = torch.full((64, 64), 0x38, dtype=torch.uint8)  # 1.0
    scales = torch.tensor([[127, 128], [129, 130]], dtype=torch.uint8)
    values = codecs.dequantize_fp8_tiles(codes, scales)
    assert values[::32, ::32].tolist() == [[1, 2], [4, 8]]
    assert values[31, 31] == 1
    assert values[32, 31] == 4
    assert values[31, 32] == 2
    ragged = codecs.dequantize_fp8_tiles(codes[:33, :40], scales)
    assert torch.equal(ragged, values[:33, :40])


@pytest.mark.parametrize("kind", ["fp8", "fp4", "table"])
def test_dequantised_values_are_the_same_in_every_exact_dtype(kind: str) -> None:
    generator = torch.Generator().manual_seed(2)
    codes = torch.randint(0, 256, (64, 64), generator=generator, dtype=torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0x3A
    if kind == "fp8":
        scales = torch.randint(60, 190, (2, 2), generator=generator, dtype=torch.uint8)
        decode = codecs.dequantize_fp8_tiles
    else:
        groups = 2 if kind == "table" else 4
        scales = torch.randint(60, 190, (64, groups), generator=generator, dtype=torch.uint8)
        decode = codecs.dequantize_table_rows if kind == "table" else codecs.dequantize_fp4_rows
    exact = decode(codes, scales, torch.float64)
    assert torch.equal(decode(codes, scales, torch.bfloat16).double(), exact)
    assert torch.equal(decode(codes, scales).double(), exact)
    with pytest.raises(ValueError, match="float16"):
        decode(codes, scales, torch.float16)


@pytest.mark.parametrize("quantize", [codecs.quantize_fp4_rows, codecs.quantize_table_rows])
def test_row_formats_choose_one_scale_per_row_and_group(quantize) -> None:
    rows = torch.ones(2, 64)
    rows[1, 32:] = 1024
    _, scales = quantize(rows)
    assert scales.shape == (2, 2)
    assert scales[0, 0] == scales[0, 1] == scales[1, 0]
    assert int(scales[1, 1]) - int(scales[1, 0]) == 10
    with pytest.raises(ValueError, match="33"):
        quantize(torch.ones(1, 33))
    rows[0, 0] = torch.nan
    with pytest.raises(ValueError, match="1 NaN"):
        quantize(rows)


def test_a_larger_scale_than_needed_keeps_the_value_when_bits_suffice() -> None:
    weight = torch.full((32, 32), 0.25)
    codes, scales = codecs.quantize_fp8_tiles(weight, torch.tensor([[2]]))
    assert scales.tolist() == [[129]]
    assert torch.equal(codecs.dequantize_fp8_tiles(codes, scales), weight)


def test_encoding_the_values_of_an_encoded_weight_changes_nothing() -> None:
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(64, 96, generator=generator)
    for quantize, dequantize in (
        (codecs.quantize_fp8_tiles, codecs.dequantize_fp8_tiles),
        (codecs.quantize_fp4_rows, codecs.dequantize_fp4_rows),
        (codecs.quantize_table_rows, codecs.dequantize_table_rows),
    ):
        values = dequantize(*quantize(weight))
        assert torch.equal(dequantize(*quantize(values)), values)
