"""Router and experts against scalar loops: clamps, weights, ties, the image bias."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from deepinfer.reference.ablation import Ablation
from deepinfer.reference.moe import expert, mixture_of_experts, route, swiglu
from deepinfer.reference.parameters import Parameters
from deepinfer.reference.roundings import Roundings
from deepinfer.reference.setting import Setting
from deepinfer.reference.trace import Recorder

from .tiny import random_ids, random_weights, tiny_config, tiny_model


def setting(**changes: Any) -> Setting:
    return Setting(tiny_config(hidden_size=32, moe_intermediate_size=32, **changes).text, Roundings.none(), Ablation())


def scalar_swiglu(gate: float, up: float, limit: float) -> float:
    gate, up = min(gate, limit), max(-limit, min(up, limit))
    return gate / (1 + math.exp(-gate)) * up


def test_clamp_is_one_sided_on_the_gate_and_comes_before_silu() -> None:
    values = [-20.0, -0.6, -0.5, 0.0, 0.5, 0.6, 20.0]
    for gate in values:
        for up in values:
            got = swiglu(torch.tensor(gate), torch.tensor(up), 0.5).item()
            assert math.isclose(got, scalar_swiglu(gate, up, 0.5), rel_tol=1e-5, abs_tol=1e-9)


def gate_parameters(rows: list[list[float]], bias: list[float], bias_vl: list[float]) -> Parameters:
    weight = torch.zeros(len(rows), 32)
    for row, values in enumerate(rows):
        weight[row, : len(values)] = torch.tensor(values)
    return Parameters({"weight": weight, "bias": torch.tensor(bias), "bias_vl": torch.tensor(bias_vl)}, torch.float32)


def test_bias_chooses_and_the_score_alone_weighs() -> None:
    parameters = gate_parameters([[1.0], [2.0], [25.0], [-3.0]], [0.0, 0.0, -100.0, 5.0], [0.0] * 4)
    x = torch.zeros(1, 32)
    x[0, 0] = 1.0
    experts, weights = route(x, None, 2, parameters, setting())
    assert experts.tolist() == [[3, 1]]
    scores = [math.sqrt(math.log1p(math.exp(value))) for value in (-3.0, 2.0)]
    expected = [1.5 * score / sum(scores) for score in scores]
    torch.testing.assert_close(weights[0], torch.tensor(expected))


def test_large_logits_use_the_linear_branch_of_softplus() -> None:
    parameters = gate_parameters([[200.0], [100.0]], [0.0, 0.0], [0.0, 0.0])
    x = torch.zeros(1, 32)
    x[0, 0] = 1.0
    _, weights = route(x, None, 2, parameters, setting())
    total = math.sqrt(200) + math.sqrt(100)
    torch.testing.assert_close(weights[0], torch.tensor([1.5 * math.sqrt(200) / total, 1.5 * math.sqrt(100) / total]))


def test_equal_scores_go_to_the_lower_expert() -> None:
    parameters = gate_parameters([[1.0], [0.0], [1.0], [1.0]], [0.0] * 4, [0.0] * 4)
    x = torch.zeros(1, 32)
    x[0, 0] = 1.0
    experts, _ = route(x, None, 2, parameters, setting())
    assert experts.tolist() == [[0, 2]]


def test_scores_that_all_vanish_do_not_divide_by_zero() -> None:
    parameters = gate_parameters([[-1e4], [-1e4]], [0.0, 0.0], [0.0, 0.0])
    x = torch.zeros(1, 32)
    x[0, 0] = 1.0
    _, weights = route(x, None, 2, parameters, setting())
    assert weights.tolist() == [[0.0, 0.0]]


def test_image_rows_choose_with_their_own_bias_in_the_same_batch() -> None:
    parameters = gate_parameters([[0.0]] * 4, [3.0, 2.0, 1.0, 0.0], [0.0, 1.0, 2.0, 3.0])
    experts, _ = route(torch.ones(3, 32), torch.tensor([False, True, False]), 2, parameters, setting())
    assert experts.tolist() == [[0, 1], [3, 2], [0, 1]]


def test_image_bias_reaches_every_layer_and_only_image_rows() -> None:
    ids = random_ids(30)
    mask = torch.zeros(30, dtype=torch.bool)
    mask[10:20] = True
    weights = random_weights(tiny_config())
    for layer in range(8):
        weights[f"layers.{layer}.ffn.gate.bias_vl"] = torch.tensor([0.0, 0, 0, 0, 0, 0, 50, 50])
    trace: dict[str, Tensor] = {}
    tiny_model(weights=weights).forward(ids, image_mask=mask, trace=trace)
    for layer in range(8):
        chosen = trace[f"layers.{layer}.ffn.experts"].sort(1).values
        assert (chosen[mask] == torch.tensor([6, 7])).all()
        assert not (chosen[~mask] == torch.tensor([6, 7])).all(1).all()


def test_experts_are_weighted_before_the_down_projection_is_quantised() -> None:
    weights = {name: torch.randn(32, 32) for name in ("w1.weight", "w2.weight", "w3.weight")}
    parameters = Parameters(weights, torch.float32)
    where = Setting(setting().text, Roundings.of("q8_swiglu"), Ablation())
    x = torch.randn(1, 32)
    third, whole = torch.tensor([1 / 3]), torch.tensor([1.0])
    assert not torch.allclose(
        expert(x, third, parameters, where), expert(x, whole, parameters, where) / 3, rtol=1e-4, atol=1e-5
    )
    torch.testing.assert_close(
        expert(x, third, parameters, setting()), expert(x, whole, parameters, setting()) / 3, rtol=1e-4, atol=1e-5
    )


def test_mixture_is_the_weighted_sum_of_the_chosen_experts_and_the_shared_one() -> None:
    names = ["shared_experts", *(f"experts.{number}" for number in range(4))]
    weights = {f"{name}.{part}.weight": torch.randn(32, 32) / 6 for name in names for part in ("w1", "w2", "w3")}
    weights |= {"gate.weight": torch.randn(4, 32), "gate.bias": torch.randn(4), "gate.bias_vl": torch.randn(4)}
    where, x = setting(swiglu_limit=0.3), torch.randn(3, 32)
    parameters = Parameters(weights, torch.float32)
    total = mixture_of_experts(x, None, 2, parameters, where, Recorder(None))
    experts, shares = route(x, None, 2, parameters.scope("gate"), where)

    def scalar_expert(name: str, row: Tensor, share: float) -> Tensor:
        gate, up = weights[f"{name}.w1.weight"] @ row, weights[f"{name}.w3.weight"] @ row
        product = [share * scalar_swiglu(g, u, 0.3) for g, u in zip(gate.tolist(), up.tolist(), strict=True)]
        return weights[f"{name}.w2.weight"] @ torch.tensor(product)

    for row in range(3):
        expected = scalar_expert("shared_experts", x[row], 1.0)
        for number, share in zip(experts[row].tolist(), shares[row].tolist(), strict=True):
            expected = expected + scalar_expert(f"experts.{number}", x[row], share)
        torch.testing.assert_close(total[row], expected, rtol=1e-4, atol=1e-5)
