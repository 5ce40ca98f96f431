"""The vision tower's conventions: span order, cell layout, rotation and bf16 roundings."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from deepinfer.errors import ConfigError
from deepinfer.reference import ReferenceModel, Roundings
from deepinfer.reference.vision import rotate_2d

from .tiny import tiny_model


@pytest.fixture(scope="module")
def image_model(golden_dir: Path) -> ReferenceModel:
    return ReferenceModel.from_checkpoint(golden_dir / "s3_image")


def test_rotation_turns_the_first_half_of_the_pairs_by_row_and_the_second_by_column() -> None:
    x = torch.randn(6, 1, 16, dtype=torch.float64)
    turned = rotate_2d(x, (2, 3), 10000.0)
    for patch in range(6):
        row, column = divmod(patch, 3)
        for pair in range(8):
            angle = (row if pair < 4 else column) * 10000 ** (-2 * (pair % 4) / 8)
            a, b = x[patch, 0, pair].item(), x[patch, 0, pair + 8].item()
            assert turned[patch, 0, pair].item() == pytest.approx(a * math.cos(angle) - b * math.sin(angle))
            assert turned[patch, 0, pair + 8].item() == pytest.approx(a * math.sin(angle) + b * math.cos(angle))


def test_cells_are_padded_below_and_right_and_flattened_channel_major(
    image_model: ReferenceModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    tower = image_model.vision_tower
    features = torch.randn(4 * 5, 32)
    monkeypatch.setattr(type(tower), "patch_features", lambda self, patches, grid: features)
    got = tower.image_vectors(torch.zeros(20, 48), (4, 5))
    grid = features.unflatten(0, (4, 5))
    weights = image_model._weights
    for cell in range(4):
        top, left = 3 * (cell // 2), 3 * (cell % 2)
        flat = torch.zeros(288)
        for channel in range(32):
            for dy in range(3):
                for dx in range(3):
                    if top + dy < 4 and left + dx < 5:
                        flat[channel * 9 + dy * 3 + dx] = grid[top + dy, left + dx, channel]
        hidden = weights["aligner.w1.weight"] @ flat + weights["aligner.w1.bias"]
        hidden = 0.5 * hidden * (1 + torch.erf(hidden / math.sqrt(2)))
        expected = weights["aligner.w2.weight"] @ hidden + weights["aligner.w2.bias"]
        torch.testing.assert_close(got[cell], expected, rtol=1e-4, atol=1e-4)


def test_span_is_start_rows_with_newlines_and_end(image_model: ReferenceModel) -> None:
    patches = torch.randn(4 * 8, 48)
    with torch.no_grad():
        span = image_model.vision_tower.span(patches, (4, 8))
        vectors = image_model.vision_tower.image_vectors(patches, (4, 8))
    assert len(span) == 2 * (3 + 1) + 2
    weights = image_model._weights
    assert torch.equal(span[0], weights["image_start"])
    assert torch.equal(span[-1], weights["image_end"])
    assert torch.equal(span[[4, 8]], weights["image_newline"].expand(2, -1))
    assert torch.equal(span[[1, 2, 3, 5, 6, 7]], vectors)


def test_bf16_switch_rounds_the_tower(image_model: ReferenceModel) -> None:
    patches = torch.randn(9, 48)
    with torch.no_grad():
        exact = image_model.vision_tower.image_vectors(patches, (3, 3))
        rounded_model = image_model.replace(roundings=Roundings.of("bf16_vision"))
        rounded = rounded_model.vision_tower.image_vectors(patches, (3, 3))
    assert torch.equal(rounded, rounded.bfloat16().float())
    assert 0 < (rounded - exact).norm() / exact.norm() < 0.05


def test_a_text_model_has_no_tower() -> None:
    with pytest.raises(ConfigError, match="vision_config"):
        _ = tiny_model().vision_tower
