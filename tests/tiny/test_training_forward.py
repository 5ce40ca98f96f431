"""The training forward is the model of the specification: same logits, same drafts, exported and read back."""

import dataclasses

import pytest
import torch

from deepinfer.reference import ReferenceModel, Roundings
from tools.tiny.backbone import Backbone, Mode
from tools.tiny.config import tiny_v41_config
from tools.tiny.draft import DraftTrainer
from tools.tiny.initialise import add_look_back_heads
from tools.tiny.loss import logits_of
from tools.tiny.parameters import StackedParameters
from tools.tiny.sinkhorn import sinkhorn

LENGTH = 96


@pytest.fixture(scope="module")
def small():
    """A smaller model of the same make, with a window and selections that are strict subsets of 96 tokens."""
    config = tiny_v41_config(1780)
    text = dataclasses.replace(
        config.text,
        engram_compressed_vocab_size=None,
        sliding_window=32,
        index_topk=8,
        candidate_topk_blocks=3,
        moe_intermediate_size=32,
        n_routed_experts=4,
    )
    config = dataclasses.replace(config, text=text)
    parameters = StackedParameters(config, 1)
    generator = torch.Generator().manual_seed(2)
    for key, parameter in parameters.items():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
        if key.endswith("_scale"):
            parameter.data.fill_(0.5)
    ids = torch.randint(0, 2000, (2, LENGTH), generator=generator)
    return config, parameters, Backbone(config, parameters, range(2048), "cpu"), ids


@pytest.fixture(scope="module")
def float_run(small):
    _, parameters, backbone, ids = small
    weights = parameters.rounded(torch.float32, draft=True, quantise=False)
    return weights, backbone.forward(weights, ids, Mode(quantise=False), torch.arange(64, 80))


def test_logits_equal_the_executable_specification(small, float_run):
    config, parameters, _, ids = small
    weights, result = float_run
    logits = logits_of(result.hidden, weights["norm.weight"], weights["head.weight"], 1e-20).unflatten(0, (2, LENGTH))
    model = ReferenceModel(config, parameters.named_tensors(), None, roundings=Roundings.none())
    expected = torch.stack([model(row) for row in ids])
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_drafts_equal_the_executable_specification(small, float_run):
    config, parameters, backbone, ids = small
    weights, result = float_run
    trainer, anchors = DraftTrainer(backbone), torch.tensor([[5, 40], [20, 70]])
    hidden, _ = trainer.hidden(weights, result.features, ids, anchors, quantise=False)
    drafts, confidence = trainer.propose(weights, hidden, ids.gather(1, anchors + 1))
    model = ReferenceModel(config, parameters.named_tensors(), None, roundings=Roundings.none())
    for row, column in ((0, 0), (1, 1)):
        anchor = int(anchors[row, column])
        expected = model.draft(ids[row, : anchor + 1], int(ids[row, anchor + 1]))
        assert drafts[row, column].tolist() == expected.token_ids
        torch.testing.assert_close(torch.sigmoid(confidence[row, column]), expected.confidence, rtol=1e-4, atol=1e-5)


def test_the_indexer_learns_from_attention_and_nothing_else_does(small, float_run):
    _, parameters, _, _ = small
    _, result = float_run
    for parameter in parameters.parameters():
        parameter.grad = None
    result.lessons.loss(1 / 16).backward(retain_graph=True)
    touched = {key for key, parameter in parameters.items() if parameter.grad is not None and parameter.grad.any()}
    assert touched == {key for key in parameters.stacks if ".indexer." in key}


def test_quantised_weights_equal_the_exported_checkpoint(small, tmp_path):
    from deepinfer.checkpoint import write_checkpoint
    from deepinfer.reference.weights import load_weights
    from tools.tiny.parameters import place_of

    config, parameters, _, _ = small
    write_checkpoint(tmp_path, config, parameters.named_tensors())
    rounded = parameters.rounded(torch.float32, draft=True)
    for name, stored in load_weights(tmp_path).items():
        place = place_of(name)
        if "engram.embed" in name:
            continue
        value = rounded[place.key]
        if place.owner is not None:
            value = value[parameters.stacks[place.key].owners.index(place.owner)]
        if place.expert is not None:
            value = value[place.expert]
        assert torch.equal(value, stored), name


def test_look_back_heads_attend_at_their_distance():
    config = tiny_v41_config(1780)
    parameters = StackedParameters(config, 3)
    add_look_back_heads(parameters)
    tensors = parameters.named_tensors()
    model = ReferenceModel(config, tensors, torch.arange(2048) % 1780, roundings=Roundings.none())
    trace = {}
    with torch.no_grad():
        model.forward(torch.randint(0, 2000, (40,), generator=torch.Generator().manual_seed(4)), trace=trace)
    for layer, head, distance in ((0, 1, 1), (0, 2, 2), (1, 3, 3), (3, 3, 1)):
        share = trace[f"layers.{layer}.attn.probabilities"][:, head, :40].diagonal(-distance).mean()
        assert share > 0.4, (layer, head, float(share))


def test_sinkhorn_rows_and_columns_sum_to_one():
    matrix = sinkhorn(torch.randn(50, 4, 4, generator=torch.Generator().manual_seed(5)), 20, 1e-6)
    torch.testing.assert_close(matrix.sum(1), torch.ones(50, 4), rtol=0, atol=1e-4)
    torch.testing.assert_close(matrix.sum(2), torch.ones(50, 4), rtol=0, atol=1e-2)
