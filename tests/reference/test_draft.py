"""The draft: one pass per anchor, visibility, heads, given noise."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepinfer.errors import ConfigError
from deepinfer.reference import ReferenceModel

from .tiny import random_ids, random_weights, tiny_config, tiny_model


@pytest.fixture(scope="module")
def model() -> ReferenceModel:
    return tiny_model(dtype=torch.float64)


def context_of(model: ReferenceModel, length: int) -> torch.Tensor:
    trace: dict[str, Any] = {}
    with torch.no_grad():
        model.forward(random_ids(length), trace=trace)
        return model.draft_model.context(model.features(trace))


def test_many_anchors_at_once_equal_one_by_one(model: ReferenceModel) -> None:
    context, draft = context_of(model, 40), model.draft_model
    anchors, newest = torch.tensor([0, 7, 39]), torch.tensor([3, 9, 11])
    with torch.no_grad():
        together = draft.hidden(context, anchors, newest)
        for block in range(3):
            alone = draft.hidden(context[: anchors[block] + 1], anchors[block : block + 1], newest[block : block + 1])
            torch.testing.assert_close(together[block], alone[0], rtol=1e-9, atol=1e-9)


def test_block_rows_see_the_window_up_to_the_anchor_and_their_whole_block(model: ReferenceModel) -> None:
    visible = model.draft_model._visible(30, torch.tensor([20, 3]))
    assert visible.shape == (8, 38)
    for row in range(4):
        assert visible[row].nonzero().flatten().tolist() == [*range(5, 21), *range(30, 34)]
        assert visible[4 + row].nonzero().flatten().tolist() == [*range(4), *range(34, 38)]


def test_tokens_outside_the_window_do_not_matter(model: ReferenceModel) -> None:
    context, draft = context_of(model, 40), model.draft_model
    anchor, newest = torch.tensor([30]), torch.tensor([3])
    changed = context.clone()
    changed[:15] += 1.0
    changed[31:] += 1.0
    with torch.no_grad():
        assert torch.equal(draft.hidden(context, anchor, newest), draft.hidden(changed, anchor, newest))
        changed[15] += 1.0
        assert not torch.allclose(draft.hidden(context, anchor, newest), draft.hidden(changed, anchor, newest))


def test_each_slot_knows_the_token_before_it(model: ReferenceModel) -> None:
    ids = random_ids(20)
    with torch.no_grad():
        proposal = model.draft(ids, newest=5)
        hidden = model.draft_model.hidden(context_of(model, 20), torch.tensor([19]), torch.tensor([5]))[0]
        previous = torch.tensor([5, *proposal.token_ids[:-1]])
        draft = model.draft_model
        torch.testing.assert_close(draft.base_logits(hidden) + draft.markov_logits(previous), proposal.logits)
        torch.testing.assert_close(draft.confidence(hidden, previous), proposal.confidence)
    assert proposal.token_ids == proposal.logits.argmax(-1).tolist()
    assert ((proposal.confidence > 0) & (proposal.confidence < 1)).all()


def test_given_noise_decides_sampled_drafts(model: ReferenceModel) -> None:
    noise = torch.zeros(4, 512, dtype=torch.float64)
    wanted = [17, 400, 3, 3]
    for slot, token in enumerate(wanted):
        noise[slot, token] = 1000.0
    with torch.no_grad():
        assert model.draft(random_ids(10), 5, noise=noise).token_ids == wanted
        greedy = model.draft(random_ids(10), 5)
        assert model.draft(random_ids(10), 5, noise=0 * noise, temperature=0.7).token_ids == greedy.token_ids


def test_features_are_taken_before_the_target_layer_and_after_its_engram(model: ReferenceModel) -> None:
    trace: dict[str, Any] = {}
    model.forward(random_ids(8), trace=trace)
    for layer in (5, 6, 7):
        expected = trace[f"layers.{layer - 1}.trunk"].mean(1)
        torch.testing.assert_close(trace[f"features.{layer}"], expected)


def test_a_model_without_draft_says_so() -> None:
    config = tiny_config(num_nextn_predict_layers=0, compress_ratios=[0, 0, 2, 2, 1, 1, 1, 1])
    with pytest.raises(ConfigError, match="no draft"):
        _ = tiny_model(config, random_weights(config)).draft_model
    unshifted = tiny_config(hc_shifted=False)
    with pytest.raises(ConfigError, match="hc_shifted"):
        _ = tiny_model(unshifted, random_weights(unshifted)).draft_model
