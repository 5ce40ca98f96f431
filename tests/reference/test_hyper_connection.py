"""Hyper-connections against scalar loops, and the places of both epsilons."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from deepinfer.reference.ablation import Ablation
from deepinfer.reference.hyper_connection import head_mix, mixes, sinkhorn, sublayer
from deepinfer.reference.parameters import Parameters
from deepinfer.reference.roundings import Roundings
from deepinfer.reference.setting import Setting

from .tiny import random_ids, random_weights, tiny_config, tiny_model

STREAMS = 4


def setting(**changes: object) -> Setting:
    return Setting(tiny_config(hidden_size=32, **changes).text, Roundings.none(), Ablation())


def random_parameters(scale: float = 0.5) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "hc_attn_fn": torch.randn(24, 4 * 32, generator=generator, dtype=torch.float64) / 11,
        "hc_attn_base": torch.randn(24, generator=generator, dtype=torch.float64),
        "hc_attn_scale": scale * torch.randn(3, generator=generator, dtype=torch.float64),
        "attn_norm.weight": torch.rand(32, generator=generator, dtype=torch.float64),
    }


def scalar_sinkhorn(logits: list[list[float]], iterations: int, epsilon: float) -> list[list[float]]:
    size = range(len(logits))
    matrix = []
    for row in logits:
        total = sum(math.exp(value) for value in row)
        matrix.append([math.exp(value) / total + epsilon for value in row])
    for step in range(iterations):
        if step:
            sums = [sum(matrix[i][j] for j in size) + epsilon for i in size]
            matrix = [[matrix[i][j] / sums[i] for j in size] for i in size]
        sums = [sum(matrix[i][j] for i in size) + epsilon for j in size]
        matrix = [[matrix[i][j] / sums[j] for j in size] for i in size]
    return matrix


@pytest.mark.parametrize(("iterations", "epsilon"), [(1, 1e-6), (2, 1e-6), (20, 1e-6), (20, 0.05)])
def test_sinkhorn_equals_scalar_loops(iterations: int, epsilon: float) -> None:
    """The large epsilon shows that it stands in the softmax and in the divisors of rows and columns."""
    logits = 3 * torch.randn(2, 4, 4, dtype=torch.float64)
    expected = [scalar_sinkhorn(matrix.tolist(), iterations, epsilon) for matrix in logits]
    torch.testing.assert_close(sinkhorn(logits, iterations, epsilon), torch.tensor(expected, dtype=torch.float64))


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


@pytest.mark.parametrize("hc_eps", [1e-6, 0.25])
def test_mixes_equal_scalar_loops(hc_eps: float) -> None:
    values = random_parameters()
    trunk = torch.randn(1, STREAMS, 32, dtype=torch.float64)
    mix = mixes(trunk, Parameters(values, torch.float64), "hc_attn", setting(hc_eps=hc_eps))
    flat = trunk.flatten().tolist()
    inverse = 1 / math.sqrt(sum(value * value for value in flat) / len(flat) + 1e-20)
    product = [inverse * sum(w * x for w, x in zip(row, flat, strict=True)) for row in values["hc_attn_fn"].tolist()]
    base, scale = values["hc_attn_base"].tolist(), values["hc_attn_scale"].tolist()
    for i in range(STREAMS):
        assert mix.read[0, i].item() == pytest.approx(sigmoid(scale[0] * product[i] + base[i]) + hc_eps, rel=1e-12)
        write = 2 * sigmoid(scale[1] * product[4 + i] + base[4 + i])
        assert mix.write[0, i].item() == pytest.approx(write, rel=1e-12)
    logits = [[scale[2] * product[8 + 4 * i + j] + base[8 + 4 * i + j] for j in range(4)] for i in range(4)]
    expected = torch.tensor(scalar_sinkhorn(logits, 20, hc_eps), dtype=torch.float64)
    torch.testing.assert_close(mix.carry[0], expected)


def test_sublayer_reads_with_the_previous_mix_and_sums_the_carry_over_its_first_index() -> None:
    parameters, where = Parameters(random_parameters(), torch.float64), setting()
    trunk = torch.randn(2, STREAMS, 32, dtype=torch.float64)
    previous = torch.rand(2, STREAMS, dtype=torch.float64)
    seen: list[Tensor] = []

    def double(x: Tensor) -> Tensor:
        seen.append(x)
        return 2 * x

    written, read = sublayer(trunk, previous, parameters, "attn", double, where)
    mix = mixes(trunk, parameters, "hc_attn", where)
    assert torch.equal(read, mix.read)
    u = sum(previous[:, m, None] * trunk[:, m] for m in range(STREAMS))
    x = u / u.square().mean(-1, keepdim=True).sqrt() * parameters["attn_norm.weight"]
    torch.testing.assert_close(seen[0], x)
    for j in range(STREAMS):
        carried = sum(mix.carry[:, i, j, None] * trunk[:, i] for i in range(STREAMS))
        torch.testing.assert_close(written[:, j], mix.write[:, j, None] * 2 * x + carried)


def test_unshifted_sublayer_reads_with_its_own_mix() -> None:
    parameters = Parameters(random_parameters(), torch.float64)
    trunk = torch.randn(2, STREAMS, 32, dtype=torch.float64)
    where = setting(hc_shifted=False)
    own = mixes(trunk, parameters, "hc_attn", where).read
    seen: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        seen.append(x)
        return x

    sublayer(trunk, torch.full((2, STREAMS), 9.0, dtype=torch.float64), parameters, "attn", keep, where)
    sublayer(trunk, own, parameters, "attn", keep, setting())
    assert torch.equal(seen[0], seen[1])


def test_unshifted_model_collapses_with_the_head_mix() -> None:
    config = tiny_config(hc_shifted=False)
    weights = random_weights(config)
    trace: dict[str, Tensor] = {}
    model = tiny_model(config, weights)
    model.forward(random_ids(9), trace=trace)
    trunk = trace["layers.7.trunk"]
    flat = trunk.flatten(1)
    product = (flat / flat.square().mean(-1, keepdim=True).sqrt()) @ weights["hc_head_fn"].T
    mix = torch.sigmoid(weights["hc_head_scale"] * product + weights["hc_head_base"]) + 1e-6
    torch.testing.assert_close(trace["final.hidden"], torch.einsum("tm,tmd->td", mix, trunk))
    where = Setting(config.text, Roundings.none(), Ablation())
    torch.testing.assert_close(head_mix(trunk, Parameters(weights, torch.float32), where), mix)


def test_tiny_activations_are_normed_to_unit_size() -> None:
    """1e-20 and not 1e-6: an input of 1e-8 keeps its direction at full size."""
    where = setting()
    x = 1e-8 * torch.randn(1, 32, dtype=torch.float64)
    normed = where.norm(x, torch.ones(32, dtype=torch.float64))
    assert normed.square().mean().item() == pytest.approx(1.0, rel=1e-3)


def test_float32_initial_read_is_stream_zero() -> None:
    """The first sublayer sees the embedding itself, not a multiple of it."""
    trace: dict[str, Tensor] = {}
    weights = random_weights(tiny_config())
    ids = random_ids(3)
    tiny_model(weights=weights).forward(ids, trace=trace)
    embedded = weights["embed.weight"][ids]
    expected = embedded / embedded.square().mean(-1, keepdim=True).sqrt() * weights["layers.0.attn_norm.weight"]
    torch.testing.assert_close(trace["layers.0.attn.input"], expected)
