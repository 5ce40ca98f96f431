"""Walking answers by accepted drafts, and temperatures that make confidences honest."""

from types import SimpleNamespace

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tools.tiny.export import keep_backbone
from tools.tiny.speculation import Blocks, _walk, calibration_errors, expected_calibration_error, fit_temperatures
from tools.tiny.train_draft import draft_losses, draw_anchors, drop_bad_gradients


def test_a_step_emits_its_accepted_drafts_and_one_more():
    assert _walk([2, 0, 0, 1, 0]) == [3, 2]
    assert _walk([0, 0, 0]) == [1, 1, 1]


def test_perfect_probabilities_have_no_calibration_error():
    probability = torch.full((1000,), 0.25)
    outcome = torch.arange(1000) % 4 == 0
    assert expected_calibration_error(probability, outcome) < 1e-6
    assert abs(expected_calibration_error(probability, torch.ones(1000).bool()) - 0.75) < 1e-6


def test_temperatures_undo_overconfidence():
    generator = torch.Generator().manual_seed(0)
    true_logits = 1.5 * torch.randn(6000, 2, generator=generator)
    survived = (torch.rand(6000, 2, generator=generator) < torch.sigmoid(true_logits)).int().cumprod(-1).bool()
    blocks = Blocks(survived, 3 * true_logits, [])
    fitted = fit_temperatures(blocks)
    assert ((fitted - 3).abs() < 1.0).all(), fitted
    before, after = (max(calibration_errors(blocks, value)) for value in (torch.ones(2), fitted))
    assert after < 0.03 < before


def losses_of(target, draft, tokens=None, importance=None, cross_share=0.1):
    shape = target.shape[:3]
    tokens = torch.zeros(shape, dtype=torch.int64) if tokens is None else tokens
    importance = torch.ones(shape) if importance is None else importance
    return draft_losses(target, draft, torch.full(shape, 9.0), tokens, importance, torch.tensor(cross_share))


def test_draft_loss_counts_acceptance_as_one_minus_total_variation():
    target = torch.log(torch.tensor([[[[0.7, 0.2, 0.1]]]]))
    draft = torch.log(torch.tensor([[[[0.4, 0.5, 0.1]]]]))
    worse, accepted, _ = losses_of(target, draft)
    torch.testing.assert_close(accepted, torch.tensor([0.7]))
    better, _, _ = losses_of(target, target)
    assert better < worse


def test_pace_is_one_token_and_those_before_the_first_wrong_one():
    target = torch.eye(3)[torch.tensor([[[0, 1, 2], [0, 1, 2]]])] * 9
    draft = torch.eye(3)[torch.tensor([[[0, 1, 1], [1, 1, 2]]])] * 9
    _, _, pace = losses_of(target, draft)
    assert pace == (3 + 1) / 2


def test_slots_behind_a_token_that_the_target_would_not_write_count_less():
    target = torch.eye(3)[torch.tensor([[[0, 0]]])] * 9
    draft = torch.eye(3)[torch.tensor([[[0, 1]]])] * 9  # wrong in its second slot
    agreed, _, _ = losses_of(target, draft, torch.tensor([[[0, 0]]]), cross_share=0.0)
    strayed, _, _ = losses_of(target, draft, torch.tensor([[[1, 0]]]), cross_share=0.0)
    assert strayed < agreed


def test_anchors_are_distinct_have_room_and_prefer_answers():
    importance = torch.ones(2, 64)
    importance[:, 30:40] = 9.8
    anchors = draw_anchors(importance, 5, 12, step=3)
    assert anchors.shape == (2, 12)
    assert all(len(set(row.tolist())) == 12 for row in anchors)
    assert anchors.max() < 64 - 7
    assert ((anchors >= 30) & (anchors < 40)).sum() > 12
    assert torch.equal(anchors, draw_anchors(importance, 5, 12, step=3))


def test_bad_gradients_are_dropped_and_counted():
    bad, fine = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = SimpleNamespace(trained=lambda: [("a", bad), ("b", fine)])
    bad.grad, fine.grad = torch.tensor([1.0, 2.0]), torch.ones(2)
    assert drop_bad_gradients(optimizer)
    assert bad.grad.tolist() == [1.0, 2.0]
    bad.grad[0] = torch.nan
    assert not drop_bad_gradients(optimizer)
    assert bad.grad.tolist() == fine.grad.tolist() == [0.0, 0.0]


def test_an_exported_draft_stands_on_the_backbone_as_it_was_stored(tmp_path):
    for name, shift in (("old", 0), ("new", 1)):
        (tmp_path / name).mkdir()
        tensors = {
            "layers.0.a": torch.arange(4) + shift,
            "mtp.0.a": torch.arange(4) + shift,
            "z": torch.ones(3) + shift,
        }
        save_file(tensors, tmp_path / name / "model.safetensors")
    keep_backbone(tmp_path / "new", tmp_path / "old")
    kept = load_file(tmp_path / "new" / "model.safetensors")
    assert kept["layers.0.a"].tolist() == [0, 1, 2, 3]
    assert kept["mtp.0.a"].tolist() == [1, 2, 3, 4]
    assert kept["z"].tolist() == [1, 1, 1]
