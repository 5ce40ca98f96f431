"""Walking answers by accepted drafts, and temperatures that make confidences honest."""

import torch

from tools.tiny.speculation import Blocks, _walk, calibration_errors, expected_calibration_error, fit_temperatures
from tools.tiny.train_draft import draft_losses


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


def test_draft_loss_counts_acceptance_as_one_minus_total_variation():
    target = torch.log(torch.tensor([[[[0.7, 0.2, 0.1]]]]))
    draft = torch.log(torch.tensor([[[[0.4, 0.5, 0.1]]]]))
    ones = torch.ones(1, 1, 1)
    _, accepted = draft_losses(target, draft, torch.zeros(1, 1, 1), torch.zeros(1, 1, 1, dtype=torch.int64), ones)
    torch.testing.assert_close(accepted, torch.tensor([0.7]))
    better, _ = draft_losses(target, target, torch.full((1, 1, 1), 9.0), torch.zeros(1, 1, 1, dtype=torch.int64), ones)
    worse, _ = draft_losses(target, draft, torch.full((1, 1, 1), 9.0), torch.zeros(1, 1, 1, dtype=torch.int64), ones)
    assert better < worse
