"""The generator: frozen answers, an independent reading in Python integers, and its statistics."""

from __future__ import annotations

import hashlib
import math
import random
from decimal import Decimal, getcontext

import numpy as np
import pytest
import torch

from deepinfer.sampling.gumbel_table import HALF_SIZE, gumbel_table
from deepinfer.sampling.random import (
    Purpose,
    as_int64,
    child_seed,
    gumbel_noise,
    gumbel_noise_at,
    gumbel_of_bits,
    mix64,
    row_keys,
    uniform,
)
from tests.sampling.reference import GOLDEN, chi_square, chi_square_bound, naive_bits

CPU = torch.device("cpu")
# (seed, position, purpose, index) -> 64 bits and Gumbel noise. Frozen: a change here changes
# every seeded answer that users have kept.
KNOWN = [
    (0x0, 0, 0, 0, 0xE220A8397B1DCDAF, "0x1.7430560000000p-1"),
    (0x0, 0, 0, 1, 0x6E789E6AA1B965F4, "0x1.640b820000000p-3"),
    (0x0, 1, 0, 0, 0xA706DD2F4D197E6F, "0x1.cca3460000000p+0"),
    (0x1, 0, 0, 0, 0x4181B152FB77616F, "-0x1.3d23f60000000p-2"),
    (0x2A, 17, 0, 129279, 0xB9619172ED9896B2, "0x1.5f0a360000000p+0"),
    (0x2A, 17, 1, 0, 0xBE08D87F030FD535, "0x1.482d760000000p+0"),
    (0x2A, 17, 2, 5, 0xC147A9B299E81094, "0x1.3910fe0000000p+0"),
    (0x2A, 17, 3, 5, 0xB7717AF37153C3A6, "0x1.6906a80000000p+0"),
    (0xFFFFFFFFFFFFFFFF, 2147483648, 0, 77, 0x84EBD13458E1EAC6, "0x1.f8919a0000000p+1"),
    (0x123456789ABCDEF0, 999999, 0, 128000, 0x9F082BCC9D30AAB6, "0x1.05eb700000000p+1"),
]
TABLE_SHA256 = "2b10820519f1a54b5477ac188c76e68a848c935027a38515e322ca91ecccfe4d"
CHILD_OF_7_3 = 0x62D534A0A7D0D576


def _rows(*numbers: int) -> torch.Tensor:
    return torch.tensor([as_int64(number) for number in numbers], dtype=torch.int64)


def test_mixer_is_splitmix64():
    # The first three outputs of the public SplitMix64 with seed 0.
    known = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [mix64(step * GOLDEN) for step in (1, 2, 3)] == known


@pytest.mark.parametrize(("seed", "position", "purpose", "index", "bits", "noise"), KNOWN)
def test_known_answers(seed, position, purpose, index, bits, noise):
    assert naive_bits(seed, position, purpose, index) == bits
    u = uniform(_rows(seed), _rows(position), Purpose(purpose), index + 1 if index < 1000 else 1)
    if index < 1000:
        assert u[0, index].item() == (bits >> 11) * 2.0**-53
    found = gumbel_noise_at(_rows(seed), _rows(position), torch.tensor([[index]]), Purpose(purpose))
    assert found.item() == float.fromhex(noise)


def test_table_is_the_frozen_one():
    values, slopes = gumbel_table(CPU)
    assert values.shape == slopes.shape == (2 * HALF_SIZE,)
    assert hashlib.sha256(values.numpy().tobytes() + slopes.numpy().tobytes()).hexdigest() == TABLE_SHA256


def test_noise_is_the_quantile_function_of_its_bits():
    getcontext().prec = 40
    noise = gumbel_noise(_rows(11), _rows(3), 1000)[0].tolist()
    for index, value in enumerate(noise):
        bits = naive_bits(11, 3, Purpose.TARGET, index)
        mass = Decimal(((bits & (2**63 - 1)) & ~1023) | (1 << 22)) / 2**64
        u = 1 - mass if bits >> 63 else mass
        assert value == pytest.approx(float(-(-u.ln()).ln()), abs=3e-7, rel=2e-7)


def test_noise_follows_the_integer_definition_in_every_octave():
    values, slopes = (table.numpy() for table in gumbel_table(CPU))
    rng = random.Random(5)
    numbers = [(rng.getrandbits(1) << 63) | rng.getrandbits(1 + index % 63) for index in range(4000)]
    numbers += [0, 2**64 - 1, 2**63, 2**63 - 1, 1 << 22, (1 << 23) - 1]
    found = gumbel_of_bits(_rows(*numbers)).numpy()
    for number, noise in zip(numbers, found, strict=True):
        mass = (number & (2**63 - 2**10)) | 2**22
        exponent = mass.bit_length() - 1
        behind = (mass << 64 >> exponent) & (2**64 - 1)  # what follows the leading one, as 64 bits
        point = (number >> 63) * HALF_SIZE + ((exponent - 22) << 10) + (behind >> 54)
        fraction = np.float32((behind >> 30) & (2**24 - 1))
        assert noise == values[point] + fraction * slopes[point], f"{number:#x}"


@pytest.mark.parametrize("vocab_size", [1, 7, 512, 40_000])
def test_noise_of_a_token_depends_on_nothing_around_it(vocab_size):
    seeds, positions = _rows(1, 2**63, 2**64 - 1, 5), _rows(0, 9, 2**40, 9)
    together = gumbel_noise(seeds, positions, vocab_size)
    for row in range(4):
        alone = gumbel_noise(seeds[row : row + 1], positions[row : row + 1], vocab_size)
        assert torch.equal(alone[0], together[row])
    ids = torch.randint(vocab_size, (4, 33))
    assert torch.equal(gumbel_noise_at(seeds, positions, ids), together.gather(1, ids))
    assert torch.equal(gumbel_noise(seeds, positions, 1), together[:, :1])


def test_uniform_numbers_do_not_depend_on_how_many_are_drawn():
    many = uniform(_rows(3, 4), _rows(5, 6), Purpose.ACCEPT, 50)
    assert torch.equal(uniform(_rows(3, 4), _rows(5, 6), Purpose.ACCEPT, 7), many[:, :7])
    assert many.dtype == torch.float64
    assert 0.0 <= many.min() < many.max() < 1.0


def test_streams_of_neighbours_never_coincide():
    seeds, positions = torch.meshgrid(torch.arange(-20, 20), torch.arange(200), indexing="ij")
    keys = torch.cat([row_keys(seeds.flatten(), positions.flatten(), purpose) for purpose in Purpose])
    assert keys.unique().numel() == keys.numel() == 4 * 40 * 200


def _grid_noise() -> torch.Tensor:
    """Noise over 30 seeds, 40 positions and 50 tokens."""
    seeds, positions = torch.meshgrid(torch.arange(30), torch.arange(40), indexing="ij")
    return gumbel_noise(seeds.flatten(), positions.flatten(), 50).view(30, 40, 50)


@pytest.mark.parametrize("dim", [0, 1, 2], ids=["seed", "position", "token"])
@pytest.mark.parametrize("lag", [1, 2])
def test_noise_is_uncorrelated_along(dim, lag):
    u = torch.exp(-torch.exp(-_grid_noise().double())) - 0.5
    length = u.shape[dim] - lag
    product = u.narrow(dim, 0, length) * u.narrow(dim, lag, length)
    z = product.mean() * 12.0 * math.sqrt(product.numel())
    assert abs(z) < 4.0


def test_noise_for_different_purposes_is_uncorrelated():
    seeds, positions = torch.arange(200), torch.arange(200)
    u = [torch.exp(-torch.exp(-gumbel_noise(seeds, positions, 100, purpose).double())) - 0.5 for purpose in Purpose]
    for first in range(4):
        for second in range(first):
            product = u[first] * u[second]
            assert abs(product.mean() * 12.0 * math.sqrt(product.numel())) < 4.0


def test_noise_has_the_gumbel_distribution():
    noise = gumbel_noise(torch.arange(100), torch.arange(100) * 7, 2000).double().flatten()
    u = torch.exp(-torch.exp(-noise))
    counts = torch.histc(u, 200, 0.0, 1.0).long().tolist()
    statistic, freedom = chi_square(counts, [1 / 200] * 200)
    assert statistic < chi_square_bound(freedom)
    assert noise.mean().item() == pytest.approx(0.5772156649, abs=4 * 1.2825 / math.sqrt(noise.numel()))
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, rel=0.02)
    # Both tails, where tables and logarithms go wrong: P(g > 8) = 3.354e-4, P(g < -2) = 6.18e-4.
    assert (noise > 8).sum().item() == pytest.approx(200_000 * 3.354e-4, abs=4 * math.sqrt(67))
    assert (noise < -2).sum().item() == pytest.approx(200_000 * 6.18e-4, abs=4 * math.sqrt(124))


def test_every_bit_is_fair():
    indices = 20_000
    seeds = _rows(123456789)
    u = uniform(seeds, _rows(1), Purpose.RESIDUAL, indices)[0]
    bits = (u * 2.0**53).to(torch.int64)
    for bit in range(53):
        ones = ((bits >> bit) & 1).sum().item()
        assert abs(ones - indices / 2) < 4.5 * math.sqrt(indices) / 2, f"{bit=}"


def test_child_seeds_differ_and_the_first_is_the_seed():
    for seed in (0, 1, 2**64 - 1):
        children = [child_seed(seed, index) for index in range(500)]
        assert children[0] == seed
        assert len(set(children)) == 500
        assert all(0 <= child < 2**64 for child in children)
    assert child_seed(-1, 0) == 2**64 - 1
    assert child_seed(7, 3) == CHILD_OF_7_3
