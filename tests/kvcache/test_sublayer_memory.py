"""Estimates of a sublayer's memory lie above what the layers were measured to take, and not far above."""

from __future__ import annotations

import pytest

from deepinfer.checkpoint.released import released_config
from deepinfer.kvcache.sublayer_memory import sublayer_bytes
from tests.kvcache.test_sizing import released_text

MB = 10**6


@pytest.mark.parametrize(
    ("rows", "attention", "experts", "experts_in_triton"), [(512, 183, 146, 102), (8192, 1665, 972, 1640)]
)
def test_estimates_cover_what_the_released_sizes_take(
    rows: int, attention: int, experts: int, experts_in_triton: int
) -> None:
    """Megabytes, counted from the tensors that are alive at the same time; those of the experts without their input."""
    found = sublayer_bytes(released_text(), rows)
    assert attention * MB < found["attention"] < 1.1 * attention * MB
    inputs = rows * 2 * 5120 * 2
    assert max(experts, experts_in_triton) * MB + inputs < found["experts"] < 1.4 * max(attention, experts) * MB


def test_one_row_needs_little_more_than_a_copy_of_the_largest_weight() -> None:
    found = sublayer_bytes(released_text(), 1)
    assert found["attention"] - 36864 * 1280 * 2 < MB
    assert found["experts"] - 4608 * 5120 * 2 < 2 * MB


def test_the_ngram_memory_counts_where_there_is_one() -> None:
    assert "n-gram memory" not in sublayer_bytes(released_text(), 512)
    found = sublayer_bytes(released_config().text, 512)
    assert found["n-gram memory"] == 512 * (6144 + 25600) * 2 + 6144 * 25600 * 2


def test_fast_products_copy_their_inputs_as_well() -> None:
    text = released_text()
    assert sublayer_bytes(text, 512, is_fast=True) == sublayer_bytes(text, 512)
    few, many = sublayer_bytes(text, 8192), sublayer_bytes(text, 8192, is_fast=True)
    assert many["attention"] - few["attention"] == 8192 * 5120 + 8192 * (8192 + 4) - 36864 * 1280 * 2
    assert many["experts"] - few["experts"] == 4608 * 5120 + 8192 * (5120 + 4) - 4608 * 5120 * 2
