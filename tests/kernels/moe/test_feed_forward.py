"""The fused experts' sublayer as a whole against the reference operators."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepinfer.kernels.dense import row_scaled
from deepinfer.kernels.dense.linear import Fp8Linear
from deepinfer.kernels.dense.row_scaled import RowCodes
from deepinfer.kernels.hyper_connection.parts import ExpertOutputs
from deepinfer.kernels.moe.expert_inputs import quantize_activation, round_activation
from deepinfer.kernels.moe.expert_sum import sum_experts
from deepinfer.kernels.moe.experts import PackedExperts, build_experts
from deepinfer.layers.fused.feed_forward import FeedForward
from deepinfer.layers.fused.residual import InputForms, SublayerInput
from deepinfer.layers.fused.weights import Fp8Weight
from deepinfer.ops.moe import ExpertWeights, moe, route
from deepinfer.ops.number_formats import q4u_decode

HIDDEN, WIDTH, EXPERTS, TOP, LIMIT, ROWS = 64, 96, 8, 2, 10.0, 7


class _Weights:
    """Random weights in place of a checkpoint."""

    def __init__(self, device: torch.device) -> None:
        torch.manual_seed(0)
        self.invariant = self.is_fast = False
        self.shared = {"up": (2 * WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
        self.fp8_weights = {}
        for name, (n, k) in self.shared.items():
            values = (torch.randn(n, k) * 0.2).to(torch.float8_e4m3fn).view(torch.uint8)
            scales = torch.randint(124, 129, (n // 32, k // 32), dtype=torch.uint8)
            self.fp8_weights[name] = Fp8Weight(values.to(device), scales.to(device))
        self.gate = torch.randn(EXPERTS, HIDDEN).bfloat16().to(device)
        self.biases = {name: torch.randn(EXPERTS).to(device) for name in ("gate.bias", "gate.bias_vl")}
        self.gate_up, self.down = (
            PackedExperts(
                torch.randint(0, 256, (EXPERTS, n, k // 2), dtype=torch.uint8).to(device),
                torch.randint(118, 122, (EXPERTS, n, k // 32), dtype=torch.uint8).to(device),
            )
            for n, k in self.shared.values()
        )

    def bf16(self, name: str) -> torch.Tensor:
        del name
        return self.gate

    def fp32(self, name: str) -> torch.Tensor:
        return self.biases[name]

    def fp8(self, *names: str) -> Fp8Weight:
        return self.fp8_weights["down" if len(names) == 1 else "up"]

    def shared_wide(self, name: str) -> torch.Tensor:
        codes, scales = self.fp8_weights[name]
        factors = torch.exp2(scales.double() - 127).repeat_interleave(32, 0).repeat_interleave(32, 1)
        return codes.view(torch.float8_e4m3fn).double() * factors


@pytest.mark.parametrize("has_images", [False, True])
def test_sublayer_gives_what_the_operators_give(has_images: bool, device: torch.device) -> None:
    weights: Any = _Weights(device)
    experts_of = functools.partial(build_experts, weights.gate_up, weights.down, TOP, LIMIT, way="triton")
    layer = FeedForward(TOP, 1.5, weights, lambda _: experts_of())
    x = torch.randn(ROWS, HIDDEN).bfloat16().to(device)
    positions = torch.arange(ROWS, dtype=torch.int32, device=device)
    positions[-2:] = -1
    step: Any = SimpleNamespace(rows=SimpleNamespace(positions=positions))
    is_image = torch.arange(ROWS, device=device) < 3 if has_images else None
    bias = weights.biases["gate.bias"].expand(ROWS, -1)
    if is_image is not None:
        bias = torch.where(is_image[:, None], weights.biases["gate.bias_vl"], bias)
    experts, shares = route(x, weights.gate.double(), bias.double(), TOP, 1.5, ROWS - 2)
    wide = [q4u_decode(p.codes, p.scales).double() for p in (weights.gate_up, weights.down)]
    shared = ExpertWeights(weights.shared_wide("up"), weights.shared_wide("down"))
    expected = moe(x, experts, shares, [ExpertWeights(*pair) for pair in zip(*wide, strict=True)], shared, LIMIT, True)
    codes, scales = quantize_activation(x)
    update = layer.forward(SublayerInput(x, round_activation(x), codes, scales), step, is_image)
    assert isinstance(update, ExpertOutputs)
    assert update.experts is not None
    assert torch.equal(update.experts.long(), experts)
    found = sum_experts(update.routed, TOP, shared=update.shared)
    assert (found != expected)[
        :-2
    ].float().mean() < 0.02  # an inner value on a rounding boundary falls to the other side
    torch.testing.assert_close(found, expected, rtol=2**-6, atol=2**-6 * float(expected.abs().max()))


def test_forms_of_the_input_follow_rows_and_precision(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    monkeypatch.setattr(row_scaled, "MIN_ROWS", ROWS)
    monkeypatch.setattr(row_scaled, "MIN_OUTPUTS", 32)
    monkeypatch.setattr(Fp8Linear, "_product", lambda *_: None)  # on a GPU, too, all rows are many
    weights: Any = _Weights(device)
    weights.is_fast = True
    experts = build_experts(weights.gate_up, weights.down, TOP, LIMIT, way="triton")
    layer = FeedForward(TOP, 1.5, weights, lambda _: experts)
    both = InputForms(rounded=True, row_codes=True)
    assert layer.input_forms(ROWS - 1) == InputForms()
    assert layer.input_forms(ROWS) == both
    monkeypatch.setattr(experts, "takes_row_codes", lambda rows: rows > ROWS)
    assert layer.input_forms(ROWS) == both
    assert layer.input_forms(ROWS + 1) == InputForms(rounded=False, row_codes=True)
    monkeypatch.setattr(experts, "wants_codes", True)
    assert layer.input_forms(ROWS + 1) == InputForms(codes=True)
    layer.gate_up.use_fast(False)
    monkeypatch.setattr(experts, "wants_codes", False)
    assert layer.input_forms(ROWS + 1) == InputForms()


def test_codes_give_what_rounded_values_give(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    monkeypatch.setattr(row_scaled, "MIN_ROWS", ROWS)
    monkeypatch.setattr(row_scaled, "MIN_OUTPUTS", 32)
    monkeypatch.setattr(Fp8Linear, "_product", lambda *_: None)
    weights: Any = _Weights(device)
    weights.is_fast = True
    experts = build_experts(weights.gate_up, weights.down, TOP, LIMIT, way="triton")
    layer = FeedForward(TOP, 1.5, weights, lambda _: experts)
    x = torch.randn(ROWS, HIDDEN).bfloat16().to(device)
    step: Any = SimpleNamespace(rows=SimpleNamespace(positions=torch.arange(ROWS, dtype=torch.int32, device=device)))
    plain = SublayerInput(x, round_activation(x))
    given = SublayerInput(x, plain.rounded, row_codes=RowCodes.of(plain.operand))
    assert given.operand is given.row_codes
    found, expected = layer.forward(given, step), layer.forward(plain, step)
    assert isinstance(found, ExpertOutputs)
    assert isinstance(expected, ExpertOutputs)
    assert torch.equal(found.shared, expected.shared)
    assert torch.equal(found.routed, expected.routed)


def test_rows_that_go_on_have_the_forms_of_their_number(device: torch.device) -> None:
    x = torch.randn(ROWS, HIDDEN).bfloat16().to(device)
    rounded = round_activation(x)
    kept = torch.tensor([4, 0, 5], device=device)
    whole = SublayerInput(x, None, row_codes=RowCodes.of(rounded))
    few = whole.of_rows(kept, InputForms())
    assert few.row_codes is None
    assert torch.equal(few.operand, rounded[kept])
    many = whole.of_rows(kept, InputForms(rounded=False, row_codes=True))
    assert many.rounded is None
    assert many.row_codes is not None
    assert torch.equal(many.row_codes.codes, whole.row_codes.codes[:, kept])
    assert torch.equal(many.row_codes.scales, whole.row_codes.scales[:, kept])
    usual = SublayerInput(x, rounded).of_rows(kept, InputForms())
    assert torch.equal(usual.operand, rounded[kept])
    assert torch.equal(usual.x, x[kept])
