"""The straight-through roundings of training against the executable specification and the checkpoint codecs."""

import pytest
import torch

from deepinfer.checkpoint import codecs
from deepinfer.reference import number_formats
from tools.tiny import fake_quant


def values():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, 128, generator=generator) * torch.exp(3 * torch.randn(300, 1, generator=generator))
    x[0] = 0
    x[1] = 5.0
    x[2] = torch.arange(128) / 16  # ties
    return x


@pytest.mark.parametrize("name", ["q8", "q4u", "q4e"])
def test_activations_round_as_the_specification_says(name):
    x = values()
    assert torch.equal(getattr(fake_quant, name)(x), getattr(number_formats, name)(x))


def test_weights_round_to_what_the_checkpoint_stores():
    x = values()[:288]
    assert torch.equal(fake_quant.fp8_weight(x), codecs.dequantize_fp8_tiles(*codecs.quantize_fp8_tiles(x)))
    assert torch.equal(fake_quant.fp4_weight(x), codecs.dequantize_fp4_rows(*codecs.quantize_fp4_rows(x)))
    assert torch.equal(fake_quant.table_rows(x), codecs.dequantize_table_rows(*codecs.quantize_table_rows(x)))


def test_odd_shapes_are_padded_to_whole_tiles():
    x = values()[:37, :70]
    assert torch.equal(fake_quant.fp8_weight(x), codecs.dequantize_fp8_tiles(*codecs.quantize_fp8_tiles(x)))


def test_gradients_pass_straight_through():
    x = values().requires_grad_()
    (fake_quant.q4e(x) * 3).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 3.0))
