"""The confidence head is fitted to what decoding accepts, and only the head."""

import json

import torch
from safetensors.torch import load_file, save_file

from tools.tiny.fit_confidence import Blocks, fit_head, write_head


def test_a_slot_counts_as_long_as_all_before_it_stood_and_the_answer_went_on():
    inputs = torch.arange(10.0).view(5, 2)
    blocks = Blocks([inputs, inputs, inputs], num_slots=[5, 5, 2], num_accepted=[0, 2, 2])
    rows, stood = blocks.reached()
    assert rows[:, 0].tolist() == [0, 0, 2, 4, 0, 2]
    assert stood.tolist() == [0, 1, 1, 0, 1, 1]


def test_fitted_confidences_are_the_frequencies():
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(8000, 3, generator=generator, dtype=torch.float64)
    truth = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    stood = (torch.rand(8000, generator=generator) < torch.sigmoid(inputs @ truth)).double()
    start = torch.tensor([3.0, -6.0, 3.0], dtype=torch.float64)  # too sure, and wrong in its last part
    torch.testing.assert_close(fit_head(inputs, stood, start, strength=1.0), truth, atol=0.15, rtol=0)
    kept = fit_head(inputs, stood, start, strength=1e9)
    torch.testing.assert_close(
        kept / kept[0], start / start[0], rtol=1e-5, atol=0
    )  # a strong pull leaves a temperature
    assert kept[0] < 2


def test_the_head_is_written_and_nothing_else(tmp_path):
    name = "mtp.0.confidence_head.proj.weight"
    tensors = {"a": torch.ones(4), name: torch.zeros(1, 3, dtype=torch.bfloat16), "z": torch.ones(5)}
    save_file(tensors, tmp_path / "model.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, "model.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    write_head(tmp_path, name, torch.tensor([1.0, 2.0, -3.0]))
    found = load_file(tmp_path / "model.safetensors")
    assert found[name].tolist() == [[1.0, 2.0, -3.0]]
    assert torch.equal(found["a"], tensors["a"])
    assert torch.equal(found["z"], tensors["z"])
