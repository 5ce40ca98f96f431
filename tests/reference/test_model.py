"""The whole tiny model: every tensor and every switch matters, gradients flow, inputs are checked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer.errors import CheckpointError, ConfigError, RequestError
from deepinfer.reference import Ablation, ReferenceModel, Roundings

from .tiny import random_ids, random_weights, tiny_config, tiny_model

LENGTH = 72
"""Long enough for more candidate blocks than are kept: 9 of 8 entries."""
CHOICE_ONLY = ("indexer.", "gate.bias")
"""Parts of names of tensors that decide between things and carry no gradient."""


@pytest.fixture(scope="module")
def ids() -> Tensor:
    return random_ids(LENGTH)


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    return random_weights(tiny_config())


@pytest.fixture(scope="module")
def base(ids: Tensor, weights: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        return tiny_model(weights=weights).forward(ids)


def is_changed(got: Tensor, base: Tensor) -> bool:
    return bool((got - base).norm() > 1e-4 * base.norm())


def gradients(weights: dict[str, Tensor], ids: Tensor, roundings: Roundings) -> tuple[dict[str, Tensor], Tensor]:
    """Gradients of a fixed projection of backbone logits, draft logits and confidences, and the backbone logits."""
    parameters = {name: value.clone().requires_grad_() for name, value in weights.items()}
    model = tiny_model(weights=parameters, roundings=roundings)
    trace: dict[str, Any] = {}
    logits = model.forward(ids, trace=trace)
    draft = model.draft_model
    newest = ids[1::4]  # the token behind every fourth anchor
    hidden = draft.hidden(draft.context(model.features(trace)), torch.arange(0, LENGTH, 4), newest)
    previous = newest[:, None].expand(-1, 4)
    outputs = (logits, draft.base_logits(hidden) + draft.markov_logits(previous), draft.confidence(hidden, previous))
    generator = torch.Generator().manual_seed(9)
    loss = sum((output * torch.randn(output.shape, generator=generator)).sum() for output in outputs)
    assert isinstance(loss, Tensor)
    loss.backward()
    found = {name: value.grad for name, value in parameters.items() if value.grad is not None}
    return found, logits.detach()


@pytest.mark.parametrize("roundings", [Roundings.none(), Roundings.faithful()], ids=["float", "faithful"])
def test_every_tensor_that_is_no_choice_has_a_finite_gradient(
    weights: dict[str, Tensor], ids: Tensor, roundings: Roundings
) -> None:
    """A gradient that is not zero is a proof that the tensor reaches the outputs."""
    found, _ = gradients(weights, ids, roundings)
    for name in weights:
        if any(part in name for part in CHOICE_ONLY):
            assert name not in found or not found[name].any(), f"{name} decides and should not have a gradient"
            continue
        assert name in found, f"{name} is not used"
        assert torch.isfinite(found[name]).all(), name
        assert found[name].any(), f"{name} has no effect"


def test_gradient_equals_a_difference_quotient(weights: dict[str, Tensor]) -> None:
    wide = {name: value.double() for name, value in weights.items()}
    ids = random_ids(20)
    name = "layers.2.attn.compressor.wgate.weight"
    direction = torch.randn(wide[name].shape, dtype=torch.float64)

    def loss(step: float) -> Tensor:
        moved = wide | {name: (wide[name] + step * direction).requires_grad_(step == 0)}
        value = tiny_model(weights=moved, dtype=torch.float64).forward(ids).square().sum()
        if step == 0:
            value.backward()
            grad = moved[name].grad
            assert grad is not None
            return (grad * direction).sum()
        return value.detach()

    quotient = (loss(1e-6) - loss(-1e-6)) / 2e-6
    torch.testing.assert_close(loss(0), quotient, rtol=1e-5, atol=1e-4)


CHOICES = [
    name
    for name in random_weights(tiny_config())
    if name.startswith("layers.") and any(part in name for part in CHOICE_ONLY)
]


@pytest.fixture(scope="module")
def image_mask() -> Tensor:
    mask = torch.zeros(LENGTH, dtype=torch.bool)
    mask[20:60] = True
    return mask


@pytest.fixture(scope="module")
def base_with_image(ids: Tensor, weights: dict[str, Tensor], image_mask: Tensor) -> Tensor:
    with torch.no_grad():
        return tiny_model(weights=weights).forward(ids, image_mask=image_mask)


def mutated(weights: dict[str, Tensor], name: str) -> ReferenceModel:
    """The model with one tensor disturbed by as much as its own spread."""
    generator = torch.Generator().manual_seed(4)
    noise = weights[name].std() * torch.randn(weights[name].shape, generator=generator)
    return tiny_model(weights=weights | {name: weights[name] + noise})


@pytest.mark.parametrize("name", [name for name in CHOICES if not name.endswith("bias_vl")])
def test_every_tensor_that_decides_changes_the_logits(
    name: str, weights: dict[str, Tensor], ids: Tensor, base: Tensor
) -> None:
    with torch.no_grad():
        assert is_changed(mutated(weights, name).forward(ids), base)


@pytest.mark.parametrize("name", [name for name in CHOICES if name.endswith("bias_vl")])
def test_image_biases_change_the_logits_of_prompts_with_an_image(
    name: str, weights: dict[str, Tensor], ids: Tensor, image_mask: Tensor, base_with_image: Tensor
) -> None:
    with torch.no_grad():
        assert is_changed(mutated(weights, name).forward(ids, image_mask=image_mask), base_with_image)


def test_image_biases_do_not_touch_text(weights: dict[str, Tensor], ids: Tensor, base: Tensor) -> None:
    pushed = {name: value + torch.arange(float(len(value))) for name, value in weights.items() if "bias_vl" in name}
    with torch.no_grad():
        assert torch.equal(tiny_model(weights=weights | pushed).forward(ids), base)


def test_draft_ignores_the_image_bias_and_obeys_the_text_bias(weights: dict[str, Tensor], ids: Tensor) -> None:
    push = torch.tensor([0.0, 0.0, 50.0, 50.0])
    with torch.no_grad():
        base = tiny_model(weights=weights).draft(ids, 5).logits
        images = tiny_model(weights=weights | {"mtp.0.ffn.gate.bias_vl": push}).draft(ids, 5).logits
        text = tiny_model(weights=weights | {"mtp.0.ffn.gate.bias": push}).draft(ids, 5).logits
    assert torch.equal(base, images)
    assert is_changed(text, base)


SWITCHES: list[dict[str, Any]] = [
    {"sliding_window": 17},
    {"swiglu_limit": 0.6},
    {"rms_norm_eps": 1e-2},
    {"hc_eps": 1e-2},
    {"hc_sinkhorn_iters": 2},
    {"routed_scaling_factor": 1.4},
    {"num_experts_per_tok": 3},
    {"rope_theta": 5000},
    {"compress_rope_theta": 100000},
    {"rope_scaling": None},
    {"rope_scaling": {"rope_type": "yarn", "factor": 8, "beta_fast": 8, "original_max_position_embeddings": 64}},
    {"rope_scaling": {"rope_type": "yarn", "factor": 4, "beta_fast": 1.5, "original_max_position_embeddings": 64}},
    {
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4,
            "beta_fast": 8,
            "beta_slow": 0.1,
            "original_max_position_embeddings": 64,
        }
    },
    {"rope_scaling": {"rope_type": "yarn", "factor": 4, "beta_fast": 8, "original_max_position_embeddings": 256}},
    {"index_topk": 12},
    {"candidate_topk_blocks": 4},
    {"candidate_block_size": 4},
    {"candidate_source_layer_id": None},
    {"engram_pad_token_id": 3},
]


@pytest.mark.parametrize("change", SWITCHES, ids=lambda change: "-".join(map(str, change)))
def test_every_configuration_switch_changes_the_logits(
    change: dict[str, Any], weights: dict[str, Tensor], ids: Tensor, base: Tensor
) -> None:
    with torch.no_grad():
        assert is_changed(tiny_model(tiny_config(**change), weights).forward(ids), base)


ROUNDED_IDS = random_ids(24)


def all_outputs(model: ReferenceModel) -> dict[str, Tensor]:
    """Everything that one forward and one draft compute."""
    trace: dict[str, Any] = {}
    with torch.no_grad():
        trace["draft.logits"] = model.draft(ROUNDED_IDS, 5, trace=trace).logits
    return trace


@pytest.fixture(scope="module")
def exact_outputs(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return all_outputs(tiny_model(weights=weights))


# The vision tower's switch has its own test beside the tower.
@pytest.mark.parametrize("name", [name for name in Roundings.names() if name != "bf16_vision"])
def test_every_rounding_is_wired_alone(name: str, weights: dict[str, Tensor], exact_outputs: dict[str, Tensor]) -> None:
    dtype = torch.float64 if name.startswith("fp32_") else torch.float32
    rounded = all_outputs(tiny_model(weights=weights, roundings=Roundings.of(name), dtype=dtype))
    if dtype is torch.float64:
        exact_outputs = all_outputs(tiny_model(weights=weights, dtype=dtype))
    seen_at = "logits"
    if name in ("bf16_feature", "q8_draft_features", "bf16_draft_context"):
        seen_at = "draft.logits"
    if "index" in name:
        seen_at = "layers.4.attn.index_scores"  # a selection changes only where scores are close
    assert not torch.equal(rounded[seen_at], exact_outputs[seen_at])


def test_presets() -> None:
    assert Roundings.none() == Roundings()
    assert all(getattr(Roundings.faithful(), name) for name in Roundings.names())
    assert Roundings.qat_woa().q8_context
    assert not Roundings.qat().q8_context
    assert not any(getattr(Roundings.qat_woa(), name) for name in Roundings.names() if name.startswith("bf16"))
    assert Roundings.qat().q4_entry
    assert Roundings.qat().q8_window_key


def test_faithful_intermediates_are_values_of_their_formats(weights: dict[str, Tensor]) -> None:
    trace: dict[str, Any] = {}
    with torch.no_grad():
        tiny_model(weights=weights, roundings=Roundings.faithful(), dtype=torch.float64).forward(
            random_ids(30), trace=trace
        )
    for name, value in trace.items():
        exact = ("read_mix", "weights", "probabilities", "logits")
        if isinstance(value, Tensor) and value.is_floating_point() and not name.endswith(exact):
            assert value.dtype == torch.float64
            assert torch.equal(value, value.float().bfloat16().double()), f"{name} is no bf16"


def test_trace_has_the_promised_names(weights: dict[str, Tensor]) -> None:
    trace: dict[str, Any] = {}
    tiny_model(weights=weights).forward(random_ids(5), trace=trace)
    attention = "input q_latent q window_key selected probabilities context output"
    owner = "latent entry index_key index_query index_scores blocks"
    assert {f"layers.4.attn.{name}" for name in (attention + " " + owner).split()} <= set(trace)
    feed_forward = ("input", "experts", "weights", "output")
    assert {f"layers.0.ffn.{name}" for name in feed_forward} <= set(trace)
    rest = {"layers.0.trunk", "layers.0.read_mix", "layers.1.engram.rows", "layers.1.engram.trunk"}
    assert rest | {"features.5", "final.hidden", "logits"} <= set(trace)


def test_ablations_remove_what_they_name(weights: dict[str, Tensor], ids: Tensor, base: Tensor) -> None:
    model = tiny_model(weights=weights)
    trace: dict[str, Any] = {}
    with torch.no_grad():
        got = model.replace(ablation=Ablation(no_engram=True)).forward(ids, trace=trace)
        assert is_changed(got, base)
        assert not any("engram" in name for name in trace)
        window = model.replace(ablation=Ablation(window_only=True)).forward(ids, trace=(trace := {}))
        assert is_changed(window, base)
        assert trace["layers.7.attn.probabilities"].shape[-1] == len(ids)
        random = model.replace(ablation=Ablation(random_selection=1))
        assert is_changed(random.forward(ids), base)
        torch.testing.assert_close(random.forward(ids[:70]), random.forward(ids)[:70], rtol=1e-4, atol=1e-4)


def test_image_embeddings_replace_those_of_the_ids(weights: dict[str, Tensor]) -> None:
    ids, mask = random_ids(10), torch.zeros(10, dtype=torch.bool)
    mask[3:6] = True
    model = tiny_model(weights=weights)
    same = weights["embed.weight"][ids[mask]]
    outside = ids.clone()
    outside[mask] = 5000  # an internal image id
    with torch.no_grad():
        expected = model.forward(ids, image_mask=mask)
        assert torch.equal(model.forward(outside, image_mask=mask, image_embeddings=same), expected)
        assert is_changed(model.forward(outside, image_mask=mask, image_embeddings=same.flip(0)), expected)


@pytest.mark.parametrize(
    ("tokens", "options"),
    [
        ([], {}),
        ([[1, 2]], {}),
        ([1, 512], {}),
        ([1, -1], {}),
        ([1, 2], {"image_mask": [True]}),
        ([1, 5000], {"image_mask": [False, True]}),
        ([1, 2], {"image_mask": [False, True], "image_embeddings": torch.zeros(2, 256)}),
        ([1, 2], {"decoder_keep": 0}),
    ],
)
def test_inputs_that_do_not_fit_are_refused(tokens: Any, options: dict[str, Any], weights: dict[str, Tensor]) -> None:
    with pytest.raises(RequestError):
        tiny_model(weights=weights).forward(tokens, **options)


def test_weights_and_maps_that_do_not_fit_are_refused(weights: dict[str, Tensor]) -> None:
    config = tiny_config()
    missing = {name: value for name, value in weights.items() if name != "layers.3.attn.wkv.weight"}
    with pytest.raises(CheckpointError, match=r"layers\.3\.attn\.wkv\.weight"):
        ReferenceModel(config, missing, None)
    with pytest.raises(CheckpointError, match="shape"):
        ReferenceModel(config, weights | {"norm.weight": torch.ones(3)}, None)
    with pytest.raises(ConfigError, match="512"):
        ReferenceModel(config, weights, torch.zeros(512, dtype=torch.int64))
    with pytest.raises(ConfigError, match="token_map"):
        ReferenceModel(config, weights, [0, 1, 2])
