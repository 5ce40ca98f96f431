"""The routed experts' kernels against the reference operators."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from deepinfer.checkpoint.stored import StoredTensor
from deepinfer.checkpoint.tensor_specs import Kind
from deepinfer.kernels.dense.row_scaled import RowCodes
from deepinfer.kernels.moe.expert_blocks import order_pairs
from deepinfer.kernels.moe.expert_inputs import quantize_activation, round_activation, scales_from_bytes
from deepinfer.kernels.moe.expert_sum import sum_experts
from deepinfer.kernels.moe.experts import ExpertInput, PackedExperts, build_experts, pack_experts
from deepinfer.kernels.moe.experts_humming import HummingExperts, scale_span
from deepinfer.kernels.moe.experts_triton import grouped_product
from deepinfer.kernels.moe.router import Routing
from deepinfer.kernels.moe.swiglu import swiglu_quantized, swiglu_rounded, swiglu_row_codes
from deepinfer.ops.moe import ExpertWeights, moe
from deepinfer.ops.number_formats import q4u_decode, q8, q8_decode, q8_round, scale_from_byte

LIMIT = 10.0


def _packed(num_experts: int, n: int, k: int, device: torch.device, low: int = 116, high: int = 122) -> PackedExperts:
    codes = torch.randint(0, 256, (num_experts, n, k // 2), dtype=torch.uint8)
    scales = torch.randint(low, high, (num_experts, n, k // 32), dtype=torch.uint8)
    return PackedExperts(codes.to(device), scales.to(device))


def _chosen(num_experts: int, rows: int, top: int) -> Tensor:
    """Distinct experts of each row, int32; some places have none."""
    chosen = torch.stack([torch.randperm(num_experts)[:top] for _ in range(rows)]).int()
    return torch.where(torch.rand(rows, top) < 0.2, -1, chosen)


def _wide(packed: PackedExperts) -> Tensor:
    return q4u_decode(packed.codes, packed.scales).double()


def _swiglu(gate_up: Tensor, weights: Tensor | None) -> Tensor:
    gate, up = gate_up.float().chunk(2, -1)
    product = torch.nn.functional.silu(gate.clamp_max(LIMIT)) * up.clamp(-LIMIT, LIMIT)
    return product if weights is None else product * weights.unsqueeze(-1)


@pytest.mark.parametrize(("rows", "hidden"), [(1, 32), (5, 96), (3, 1120)])
def test_quantized_activations_have_the_bits_of_the_reference(rows, hidden, device):
    torch.manual_seed(hidden)
    x = (torch.randn(rows, hidden) * torch.exp2(torch.randint(-20, 20, (rows, 1)))).bfloat16().to(device)
    codes, scales = quantize_activation(x)
    expected_codes, expected_bytes = q8(x)
    assert torch.equal(codes, expected_codes)
    assert torch.equal(scales, scale_from_byte(expected_bytes))
    assert torch.equal(scales_from_bytes(expected_bytes), scales)
    rounded = round_activation(x)
    assert torch.equal(rounded.float(), q8_round(x))
    assert torch.equal(round_activation(rounded), rounded)


def test_a_scale_per_row_keeps_rows_within_half_a_step(device):
    torch.manual_seed(0)
    x = torch.randn(6, 160).bfloat16().to(device)
    experts = torch.tensor([[1, 0], [-1, 1], [0, 1], [1, -1], [0, 1], [1, 0]], dtype=torch.int32, device=device)
    order = order_pairs(experts, 2, 1)
    codes, scales = quantize_activation(x, per_row=True, order=order, pairs_per_row=2)
    number = int(order.num_ordered)
    source = order.ordered[:number].long() // 2
    values = codes[:number].view(torch.float8_e4m3fn).float() * scales[:number]
    largest = x.float().abs().amax(-1, keepdim=True)
    assert ((values - x[source].float()).abs() <= largest[source] / 28 + 1e-6).all()


@pytest.mark.parametrize(("rows", "width"), [(1, 32), (5, 96), (3, 2304)])
def test_activations_as_codes_of_whole_rows(rows, width, device):
    torch.manual_seed(width)
    gate_up = torch.randn(rows, 2 * width) * torch.exp2(torch.randint(-12, 6, (2 * width,)).float())
    gate_up[rows // 2, 0] = 0
    gate_up = gate_up.to(device)
    if rows == 5:
        gate_up[3] = 0
    found, expected = swiglu_row_codes(gate_up, LIMIT), RowCodes.of(swiglu_rounded(gate_up, LIMIT))
    assert found.codes.shape == (1, rows, width)
    assert torch.equal(found.codes, expected.codes)
    assert torch.equal(found.scales, expected.scales)
    assert found.codes[0, 0].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_swiglu_rounds_as_the_reference(dtype, device):
    torch.manual_seed(1)
    gate_up = (torch.randn(7, 192) * 5).to(dtype).to(device)
    gate_up[0, :4] = torch.tensor([float("inf"), float("-inf"), 6e4, -6e4])  # what float16 makes of a large product
    gate_up[0, 96:100] = float("inf")
    weights = torch.rand(7, device=device)
    expected = _swiglu(gate_up.float().nan_to_num(posinf=1e5, neginf=-1e5), weights)
    rounded = swiglu_rounded(gate_up, LIMIT, weights).float()
    # The exponential differs by units in the last place, which moves a value across a rounding boundary now and then.
    assert (rounded != q8_round(expected)).float().mean() < 2e-3
    codes, scales = swiglu_quantized(gate_up, LIMIT, weights)
    assert torch.equal(codes.view(torch.float8_e4m3fn).float() * scales.repeat_interleave(32, 1), rounded)
    codes, scales = swiglu_quantized(gate_up, LIMIT, weights, per_row=True)
    error = (codes.view(torch.float8_e4m3fn).float() * scales - expected).abs()
    assert (error <= expected.abs().amax(-1, keepdim=True) / 28).all()
    shared = swiglu_rounded(gate_up, LIMIT).float()
    assert (
        shared != q8_round(_swiglu(gate_up.float().nan_to_num(posinf=1e5, neginf=-1e5), None))
    ).float().mean() < 2e-3


def test_pairs_of_no_expert_are_cleared_and_touch_nothing_else(device):
    experts = torch.tensor([[0, -1], [-1, 2]], dtype=torch.int32, device=device)
    gate_up = torch.full((4, 64), float("nan"), device=device)
    gate_up[[0, 3]] = 1.0
    outputs = torch.full((4, 96), float("nan"), dtype=torch.bfloat16, device=device)
    values = torch.full((4, 32), 7.0, dtype=torch.bfloat16, device=device)
    swiglu_rounded(gate_up, LIMIT, experts=experts, clear=outputs, out=values)
    assert outputs.isnan().all(-1).tolist() == [True, False, False, True]
    assert not outputs[[1, 2]].any()
    assert (values[[1, 2]] == 7).all()


@pytest.mark.parametrize(
    ("num_experts", "n", "k", "rows", "top", "block"), [(8, 192, 256, 5, 2, 16), (3, 96, 160, 40, 2, 64)]
)
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
def test_grouped_product_is_exact_up_to_float32_sums(num_experts, n, k, rows, top, block, out_dtype, device):
    torch.manual_seed(n)
    packed = _packed(num_experts, n, k, device, 90, 140)
    x = q8_round(torch.randn(rows, k)).bfloat16().to(device)
    experts = _chosen(num_experts, rows, top).to(device)
    blocks = order_pairs(experts, num_experts, block)
    out = torch.full((rows * top, n), 7.0, dtype=out_dtype, device=device)
    grouped_product(x, packed.codes, packed.scales, blocks, top, out_dtype, out=out)
    flat = experts.flatten().long()
    wide = _wide(packed)[flat.clamp_min(0)]
    inputs = x.double().repeat_interleave(top, 0)
    exact = torch.einsum("pk,pnk->pn", inputs, wide)
    size = torch.einsum("pk,pnk->pn", inputs.abs(), wide.abs())
    bound = size * k * 2.0**-24 + (exact.abs() * 2.0**-8 if out_dtype == torch.bfloat16 else 0)
    live = flat >= 0
    assert ((out.double() - exact).abs() <= bound)[live].all()
    assert (out[~live] == 7).all()


@pytest.mark.parametrize(("width", "hidden", "num_experts", "top"), [(96, 256, 8, 2), (160, 96, 5, 3)])
def test_experts_equal_the_reference(width, hidden, num_experts, top, device):
    torch.manual_seed(width)
    gate_up = _packed(num_experts, 2 * width, hidden, device)
    down = _packed(num_experts, hidden, width, device)
    rows = 9
    x = torch.randn(rows, hidden).bfloat16().to(device)
    order = torch.rand(rows, num_experts).argsort(-1)[:, :top]
    routing_weights = torch.rand(rows, top, device=device)
    experts = order.to(device)
    experts[-1], routing_weights[-1] = -1, 0
    routed = [ExpertWeights(*pair) for pair in zip(_wide(gate_up), _wide(down), strict=True)]
    shared = ExpertWeights(torch.zeros_like(routed[0].gate_up), torch.zeros_like(routed[0].down))
    expected = moe(x, experts, routing_weights.double(), routed, shared, LIMIT, True)
    engine = build_experts(gate_up, down, top, LIMIT, way="triton")
    routing = Routing(experts.int(), routing_weights, None)
    output = engine.forward(ExpertInput(x), routing)
    assert output.place is None
    found = sum_experts(output.values, top)
    # A value of the inner activation on a rounding boundary may fall to the other side.
    assert (found != expected).float().mean() < 0.01
    torch.testing.assert_close(found, expected, rtol=2**-6, atol=2**-6 * float(expected.abs().max()))
    alone = engine.forward(ExpertInput(x[2:3]), Routing(experts[2:3].int(), routing_weights[2:3], None))
    assert torch.equal(alone.values, output.values[2 * top : 3 * top])


def test_sum_is_rounded_once_and_skips_pairs_of_no_expert(device):
    torch.manual_seed(3)
    routed = torch.randn(12, 96).bfloat16().to(device)
    shared = torch.randn(4, 96).bfloat16().to(device)
    expected = (routed.view(4, 3, 96).float().sum(1) + shared.float()).bfloat16()
    torch.testing.assert_close(sum_experts(routed, 3, shared=shared), expected, rtol=2**-7, atol=2**-9)
    place = torch.tensor([5, -1, 0, 1, 2, 3, -1, -1, -1, 4, 6, 7], dtype=torch.int32, device=device)
    taken = torch.where((place >= 0)[:, None], routed[place.clamp_min(0).long()].float(), 0)
    expected = (taken.view(4, 3, 96).sum(1)).bfloat16()
    torch.testing.assert_close(sum_experts(routed, 3, place=place), expected, rtol=2**-7, atol=2**-9)


def test_packing_keeps_the_bytes_and_puts_the_gate_first():
    hidden, width = 64, 96
    stored: dict[tuple[int, str], StoredTensor] = {}
    for expert in range(3):
        for name, (n, k) in {"w1": (width, hidden), "w3": (width, hidden), "w2": (hidden, width)}.items():
            codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8)
            scales = torch.randint(100, 130, (n, k // 32), dtype=torch.uint8)
            stored[expert, name] = StoredTensor(name, Kind.FP4, (n, k), codes, scales)
    gate_up, down = pack_experts(3, hidden, width, lambda expert, name: stored[expert, name], torch.device("cpu"))
    for expert in range(3):
        gate, up = _wide(gate_up)[expert].chunk(2)
        assert torch.equal(gate, stored[expert, "w1"].dequantize(torch.float64))
        assert torch.equal(up, stored[expert, "w3"].dequantize(torch.float64))
        assert torch.equal(_wide(down)[expert], stored[expert, "w2"].dequantize(torch.float64))


def test_scale_span_ignores_groups_of_zeros():
    packed = PackedExperts(
        torch.full((2, 64, 32), 0x22, dtype=torch.uint8), torch.full((2, 64, 2), 120, dtype=torch.uint8)
    )
    packed.scales[0, 3] = 109  # 11 below
    assert scale_span(packed) == "expert"
    packed.scales[0, 3] = 108
    assert scale_span(packed) == "row"
    packed.scales[1, 5, 1] = 90
    assert scale_span(packed) == "wide"
    packed.codes[1, 5, 16:] = 0x80  # zeros of both signs
    packed.codes[0, 3] = 0
    assert scale_span(packed) == "expert"


def test_codes_and_values_say_the_same(device):
    x = torch.randn(4, 128).bfloat16().to(device)
    codes, scale_bytes = q8(x)
    assert torch.equal(round_activation(x).float(), q8_decode(codes, scale_bytes))


def test_the_shared_expert_is_activated_in_the_same_launch(device):
    torch.manual_seed(4)
    gate_up = (torch.randn(6, 192) * 4).half().to(device)
    shared = (torch.randn(2, 192) * 4).to(device)
    experts = torch.tensor([[0, 2, -1], [1, 0, 3]], dtype=torch.int32, device=device)
    weights, values = torch.rand(2, 3, device=device), torch.ones(6, 64, dtype=torch.bfloat16, device=device)
    inner = torch.empty(2, 96, dtype=torch.bfloat16, device=device)
    codes, scales = swiglu_quantized(
        gate_up, LIMIT, weights, experts=experts, clear=values, shared=shared, shared_out=inner
    )
    alone = swiglu_quantized(gate_up, LIMIT, weights)
    live = (experts >= 0).flatten()
    assert torch.equal(codes[live], alone[0][live])
    assert torch.equal(scales[live], alone[1][live])
    assert torch.equal(inner, swiglu_rounded(shared, LIMIT))
    assert values.any(-1).tolist() == live.tolist()


def test_coarser_rounding_of_long_chunks_yields_to_batch_invariance() -> None:
    experts = object.__new__(HummingExperts)
    experts.precision = "fast"
    for invariant in (False, True):
        experts.gate_up = SimpleNamespace(batch_invariant=invariant)  # type: ignore[assignment]
        assert experts.is_fast(4096) is not invariant
        assert not experts.is_fast(64)
