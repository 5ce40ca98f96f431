"""Against the numbers of independent implementations (``tests/golden``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from deepinfer.reference import ReferenceModel, Roundings

CASES = ("s1_basic", "s2_real_heads", "s3_image")
Golden = dict[str, Tensor]


class Case:
    """One golden case: model, numbers and the model's other inputs."""

    def __init__(self, folder: Path, name: str) -> None:
        with np.load(folder / f"{name}.npz") as numbers:
            self.golden: Golden = {key: torch.from_numpy(numbers[key]) for key in numbers.files}
        self.model = ReferenceModel.from_checkpoint(folder / name)
        self.prompt = self.golden["prompt_ids"]
        self.full = torch.cat((self.prompt, self.golden["greedy_tokens_fp32"]))

    def image(self, length: int) -> dict[str, Any]:
        """Mask and embeddings of the case's image for a sequence of ``length``; nothing for text."""
        if "image0_patches" not in self.golden:
            return {}
        start, types = int(self.golden["image0_start"]), self.golden["image0_types"]
        mask = torch.zeros(length, dtype=torch.bool)
        mask[start : start + len(types)] = True
        patches, grid = self.golden["image0_patches"].flatten(1), tuple(self.golden["image0_grid"].tolist())
        return {"image_mask": mask, "image_embeddings": self.model.vision_tower.span(patches, grid)}

    def run(self, model: ReferenceModel, trace: dict[str, Any] | None = None) -> tuple[Tensor, Tensor]:
        """Logits of the prompt's rows, and of the 24 rows that choose the golden tokens."""
        with torch.no_grad():
            logits = model.forward(self.full, trace=trace, **self.image(len(self.full))).float()
        last = len(self.prompt) - 1
        return logits[: last + 1], logits[last : last + 24]

    def tight_rows(self, model: ReferenceModel, mode: str) -> tuple[int, int]:
        """How many prompt and decode rows of a rounded mode agree to 1e-5 in relative RMS."""
        rows = []
        expected = (self.golden[f"prefill_logits_{mode}"], self.golden[f"forced_decode_logits_{mode}"])
        for ours, theirs in zip(self.run(model), expected, strict=True):
            rows.append(int(((ours - theirs).norm(dim=1) < 1e-5 * theirs.norm(dim=1)).sum()))
        return rows[0], rows[1]


@pytest.fixture(scope="module")
def cases(request: pytest.FixtureRequest) -> dict[str, Case]:
    folder = request.getfixturevalue("golden_dir")
    return {name: Case(folder, name) for name in CASES}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_float_rows_tokens_and_table_rows(cases: dict[str, Case], name: str, dtype: torch.dtype) -> None:
    case = cases[name]
    trace: dict[str, Any] = {}
    prefill, decode = case.run(case.model.replace(dtype=dtype), trace)
    tolerance = {"rtol": 0.0, "atol": 2e-5}  # the oracles differ from one another by 1e-5
    torch.testing.assert_close(prefill, case.golden["prefill_logits_fp32"], **tolerance)
    torch.testing.assert_close(decode, case.golden["decode_logits_fp32"], **tolerance)
    assert torch.equal(decode.argmax(-1), case.golden["greedy_tokens_fp32"])
    assert torch.equal(case.model.token_map, case.golden["token_map"].long())
    layers = case.model.config.text.engram_layer_ids
    rows = torch.stack([trace[f"layers.{layer}.engram.rows"] for layer in layers], 1)[: len(case.prompt)]
    assert torch.equal(rows, case.golden["engram_hash"])


def test_greedy_continues_with_the_golden_tokens(cases: dict[str, Case]) -> None:
    case = cases["s1_basic"]
    assert case.model.greedy(case.prompt, 8) == case.golden["greedy_tokens_fp32"][:8].tolist()


@pytest.mark.parametrize(
    ("name", "mode", "dtype", "prompt_rows", "decode_rows"),
    [
        ("s1_basic", "qat", torch.float32, 61, 24),
        ("s1_basic", "qat", torch.float64, 61, 24),
        ("s1_basic", "qat-woa", torch.float32, 25, 24),
        ("s2_real_heads", "qat", torch.float64, 29, 0),
        ("s2_real_heads", "qat-woa", torch.float32, 23, 0),
        ("s3_image", "qat", torch.float64, 40, 24),
        ("s3_image", "qat-woa", torch.float32, 40, 24),
    ],
)
def test_quantised_rows_agree_until_a_tie_flips(
    cases: dict[str, Case], name: str, mode: str, dtype: torch.dtype, prompt_rows: int, decode_rows: int
) -> None:
    """With quantisers and no bf16, rows agree to 1e-5 until somewhere a value lies within rounding noise of a tie.

    From then on everything that attends that row differs a little. Where that happens depends on the order of sums: the
    numbers here are what this order gives, and noise of 2e-7 on the weights moves them between 1 and all rows.
    """
    case = cases[name]
    preset = {"qat": Roundings.qat(), "qat-woa": Roundings.qat_woa()}[mode]
    prompt, decode = case.tight_rows(case.model.replace(roundings=preset, dtype=dtype), mode)
    assert prompt >= prompt_rows
    assert decode >= decode_rows


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("mode", ["qat", "qat-woa", "bf16"])
def test_rounded_modes_stay_within_the_fair_tolerance(cases: dict[str, Case], name: str, mode: str) -> None:
    case = cases[name]
    presets = {"qat": Roundings.qat(), "qat-woa": Roundings.qat_woa(), "bf16": Roundings.faithful()}
    prefill, decode = case.run(case.model.replace(roundings=presets[mode]))
    expected = case.golden[f"prefill_logits_{mode}"]
    assert (prefill - expected).norm() < 0.15 * expected.norm()
    assert (prefill.argmax(-1) == expected.argmax(-1)).float().mean() > 0.65
    expected = case.golden[f"forced_decode_logits_{mode}"]
    assert (decode - expected).norm() < 0.2 * expected.norm()


@pytest.mark.parametrize("name", CASES)
def test_drafts_and_confidences(cases: dict[str, Case], name: str) -> None:
    """A golden row holds the newest token and the drafts behind it; confidences are given before the sigmoid."""
    case = cases[name]
    for step in range(0, 24, 4):
        ids = case.full[: len(case.prompt) + step + 1]
        newest, *expected = case.golden["dspark_draft_tokens"][step].tolist()
        with torch.no_grad():
            draft = case.model.draft(ids, newest, **case.image(len(ids)))
        assert draft.token_ids == expected
        confidence = torch.sigmoid(case.golden["dspark_confidence"][step])
        torch.testing.assert_close(draft.confidence, confidence, rtol=0, atol=2e-6)


def test_image_vectors(cases: dict[str, Case]) -> None:
    case = cases["s3_image"]
    patches, grid = case.golden["image0_patches"].flatten(1), tuple(case.golden["image0_grid"].tolist())
    with torch.no_grad():
        vectors = case.model.vision_tower.image_vectors(patches, grid)
    torch.testing.assert_close(vectors, case.golden["image0_aligner"], rtol=0, atol=1e-5)
