"""Rotary embedding: spec Appendix A.5, the clamps that golden cases cannot see, and rotation as complex product."""

from __future__ import annotations

import cmath
import math

import pytest
import torch

from deepinfer.config.model import YarnConfig
from deepinfer.reference.rope import layer_frequencies, plain_frequencies, rotate, yarn_bounds, yarn_frequencies

from .tiny import tiny_config

RELEASED = YarnConfig()
APPENDIX_A5 = {
    0: (1, 1),
    8: (5.000000e-02, 5.000000e-02),
    15: (3.635539e-03, 3.635539e-03),
    16: (2.500000e-03, 2.265625e-03),
    20: (5.590170e-04, 2.969778e-04),
    24: (1.250000e-04, 1.953125e-05),
    25: (8.595700e-05, 5.372313e-06),
    31: (9.088846e-06, 5.680529e-07),
}


def test_yarn_frequencies_of_appendix_a5() -> None:
    assert yarn_bounds(160000, 64, RELEASED) == (15, 25)
    plain, used = plain_frequencies(160000, 64), yarn_frequencies(160000, 64, RELEASED)
    for pair, (unscaled, scaled) in APPENDIX_A5.items():
        assert plain[pair].item() == pytest.approx(unscaled, rel=5e-7)
        assert used[pair].item() == pytest.approx(scaled, rel=5e-7)


def test_bounds_are_clamped_to_the_pairs_that_exist() -> None:
    short = YarnConfig(original_max_position_embeddings=64)  # 64 / (32 * 2 pi) < 1, so its logarithm is negative
    low, high = yarn_bounds(160000, 16, short)
    assert low == 0
    assert high == math.ceil(16 * math.log(64 / (2 * math.pi)) / (2 * math.log(160000)))
    slow = YarnConfig(beta_slow=1e-12)
    assert yarn_bounds(160000, 64, slow)[1] == 63


def test_low_bound_is_rounded_down_and_high_bound_up() -> None:
    yarn = YarnConfig(original_max_position_embeddings=65536, beta_fast=20, beta_slow=3)
    exact = [64 * math.log(65536 / (beta * 2 * math.pi)) / (2 * math.log(160000)) for beta in (20, 3)]
    assert yarn_bounds(160000, 64, yarn) == (int(exact[0]), int(exact[1]) + 1)
    assert exact[0] != int(exact[0])
    assert exact[1] != int(exact[1])


def test_equal_bounds_make_a_step() -> None:
    yarn = YarnConfig(beta_fast=1, beta_slow=1, original_max_position_embeddings=6, factor=8)  # both round to pair 0
    assert yarn_bounds(10000, 8, yarn) == (0, 0.001)
    plain = plain_frequencies(10000, 8)
    expected = torch.cat((plain[:1], plain[1:] / 8))
    torch.testing.assert_close(yarn_frequencies(10000, 8, yarn), expected)


def test_layers_take_the_table_of_their_ratio() -> None:
    text = tiny_config().text
    assert torch.equal(layer_frequencies(text, 0), plain_frequencies(10000, 32))
    assert text.rope_scaling is not None
    for ratio in (1, 2):
        assert torch.equal(layer_frequencies(text, ratio), yarn_frequencies(160000, 32, text.rope_scaling))
    unscaled = tiny_config(rope_scaling=None).text
    assert torch.equal(layer_frequencies(unscaled, 1), plain_frequencies(160000, 32))


def test_rotation_is_a_complex_product_on_adjacent_pairs_of_the_last_channels() -> None:
    frequencies = plain_frequencies(100, 8)
    x, positions = torch.randn(3, 2, 12, dtype=torch.float64), torch.tensor([0, 5, 1000])
    turned = rotate(x, positions, frequencies)
    assert torch.equal(turned[..., :4], x[..., :4])
    for row, head, pair in ((0, 0, 0), (1, 1, 2), (2, 0, 3), (2, 1, 1)):
        first, second = x[row, head, 4 + 2 * pair : 6 + 2 * pair].tolist()
        expected = complex(first, second) * cmath.exp(1j * positions[row].item() * frequencies[pair].item())
        assert complex(*turned[row, head, 4 + 2 * pair : 6 + 2 * pair].tolist()) == pytest.approx(expected)


def test_inverse_undoes_the_rotation() -> None:
    frequencies, positions = plain_frequencies(10000, 8), torch.tensor([3, 77])
    x = torch.randn(2, 16, dtype=torch.float64)
    back = rotate(rotate(x, positions, frequencies), positions, frequencies, inverse=True)
    torch.testing.assert_close(back, x)
    assert not torch.allclose(rotate(x, positions, frequencies), x)
