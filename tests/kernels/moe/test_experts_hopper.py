"""The experts on our own kernels, emulated on a CPU: against the experts in Triton, and their memory."""

from __future__ import annotations

import shutil

import pytest
import torch

from deepinfer.kernels import nvrtc
from deepinfer.kernels.dense.row_scaled import RowCodes
from deepinfer.kernels.moe import experts_hopper, packing
from deepinfer.kernels.moe.expert_blocks import order_pairs
from deepinfer.kernels.moe.experts import ExpertInput, PackedExperts, build_experts
from deepinfer.kernels.moe.experts_hopper import PLANS, HopperExperts, is_usable, repack
from deepinfer.kernels.moe.router import Routing
from deepinfer.ops.number_formats import q8_round
from tests.kernels.moe import test_grouped_fp8, test_grouped_skinny, test_grouped_wgmma

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
EXPERTS, HIDDEN, WIDTH, TOP, LIMIT = 5, 512, 256, 3, 7.0


def random_experts(n: int, k: int) -> PackedExperts:
    codes = torch.randint(0, 256, (EXPERTS, n, k // 2), dtype=torch.uint8)
    return PackedExperts(codes, torch.randint(116, 122, (EXPERTS, n, k // 32), dtype=torch.uint8))


def emulated_kernel(source: str, *arguments: object, **more: object) -> object:
    families = {"moe_skinny.cu": test_grouped_skinny, "moe_wgmma.cu": test_grouped_wgmma}
    family = families.get(source, test_grouped_fp8)
    return family.EmulatedKernel(source, *arguments, **more)


@needs_compiler
@pytest.mark.parametrize("rows", [1, 6, 17])
@pytest.mark.parametrize(("has_shared", "invariant"), [(False, False), (True, False), (True, True)])
def test_experts_agree_with_triton(rows, has_shared, invariant, monkeypatch):
    torch.manual_seed(rows)
    gate_up, down = random_experts(2 * WIDTH, HIDDEN), random_experts(HIDDEN, WIDTH)
    x = torch.randn(rows, HIDDEN).bfloat16()
    chosen = torch.stack([torch.randperm(EXPERTS)[:TOP] for _ in range(rows)]).int()
    chosen[rows // 2, 1] = -1
    weights = torch.rand(rows, TOP)
    shared = torch.randn(rows, 2 * WIDTH) * 3 if has_shared else None
    given = ExpertInput(x, rounded=q8_round(x).bfloat16())
    expected = build_experts(gate_up, down, TOP, LIMIT, way="triton").forward(
        given, Routing(chosen, weights, None), shared
    )
    monkeypatch.setattr(nvrtc, "load_kernel", emulated_kernel)
    monkeypatch.setattr(nvrtc, "num_multiprocessors", lambda device: test_grouped_skinny.GRID)
    monkeypatch.setattr(test_grouped_skinny.EmulatedKernel, "weight_bytes", 1 << 40)
    experts = HopperExperts(gate_up, down, TOP, LIMIT, batch_invariant=invariant)
    ordered = Routing(chosen, weights, order_pairs(chosen, EXPERTS, experts.block_of(rows)))
    found = experts.forward(given, ordered, shared)
    live = chosen.flatten() >= 0
    values = found.values
    if invariant:  # one order of summation: the kernels for many rows
        assert found.place is not None
        assert torch.equal(found.place >= 0, live)
        values = values[found.place.clamp_min(0).long()]
    else:
        assert found.place is None
    error = (values[live].float() - expected.values[live].float()).norm() / expected.values[live].float().norm()
    assert error < 5e-3  # a float32 sum on the other side of a rounding, now and then
    if has_shared:
        assert (found.shared_inner != expected.shared_inner).float().mean() < 3e-3
    else:
        assert found.shared_inner is None


@needs_compiler
@pytest.mark.parametrize("invariant", [False, True])
def test_fast_takes_fp8_for_many_rows(invariant, monkeypatch):
    torch.manual_seed(0)
    rows = 19
    gate_up, down = random_experts(2 * WIDTH, HIDDEN), random_experts(HIDDEN, WIDTH)
    x = q8_round(torch.randn(rows, HIDDEN).bfloat16()).bfloat16()
    chosen = torch.stack([torch.randperm(EXPERTS)[:TOP] for _ in range(rows)]).int()
    routing = Routing(chosen, torch.rand(rows, TOP), None)
    given = ExpertInput(x, rounded=x)
    expected = build_experts(gate_up, down, TOP, LIMIT, way="triton").forward(given, routing).values.float()
    sources = []

    def recorded(source: str, *arguments: object, **more: object) -> object:
        sources.append(source)
        return emulated_kernel(source, *arguments, **more)

    monkeypatch.setattr(nvrtc, "load_kernel", recorded)
    monkeypatch.setattr(nvrtc, "num_multiprocessors", lambda device: 3)
    monkeypatch.setattr(experts_hopper, "PLANS", ())
    pairs = rows * TOP / EXPERTS
    monkeypatch.setattr(experts_hopper, "MIN_FP8_PAIRS", pairs + 0.1)
    experts = build_experts(gate_up, down, TOP, LIMIT, precision="fast", way="hopper", batch_invariant=invariant)
    experts.forward(given, routing)
    assert "moe_fp8.cu" not in sources  # too few pairs
    assert not experts.takes_row_codes(rows)
    sources.clear()
    monkeypatch.setattr(experts_hopper, "MIN_FP8_PAIRS", pairs)
    found = experts.forward(given, routing)
    assert found.place is not None
    values = found.values[found.place.long()].float()
    assert ((values - expected).norm() / expected.norm()) < 5e-3
    assert ("moe_fp8.cu" in sources) != invariant
    assert ("moe_wgmma.cu" in sources) == invariant
    assert experts.takes_row_codes(rows) != invariant
    if not invariant:
        by_codes = experts.forward(ExpertInput(torch.full_like(x, torch.nan), row_codes=RowCodes.of(x)), routing)
        assert torch.equal(by_codes.values[found.place.long()].float(), values)
        experts.uses_fast = False
        assert not experts.takes_row_codes(rows)


def test_repacking_in_place_gives_the_same_tiles():
    weights = random_experts(128, 256)
    expected = repack(weights, is_paired=True)
    memory = torch.cat([weights.codes.flatten(1), weights.scales.flatten(1)], 1)
    codes, scales = memory.split([128 * 128, 128 * 8], dim=1)
    joint = PackedExperts(codes.unflatten(1, (128, 128)), scales.unflatten(1, (128, 8)), memory)
    apart = joint.apart()
    assert torch.equal(apart.codes, weights.codes)
    assert torch.equal(apart.scales, weights.scales)
    found = repack(joint, is_paired=True)
    assert found.data_ptr() == memory.data_ptr()
    assert torch.equal(found, expected)


def test_large_scales_are_left_to_others(monkeypatch):
    monkeypatch.setattr(packing, "accepts", lambda n, k, device: True)
    gate_up, down = random_experts(2 * WIDTH, HIDDEN), random_experts(HIDDEN, WIDTH)
    assert is_usable(gate_up, down)
    down.scales[3, 5, 1] = packing.MAX_SCALE_BYTE + 1
    assert not is_usable(gate_up, down)


def test_plans_cover_rising_numbers_of_rows():
    pairs, per_expert = ([limits[place] for limits in PLANS] for place in (0, 1))
    assert per_expert == sorted(per_expert)
    assert [most for most in pairs if most] == sorted(most for most in pairs if most)
    assert all(gate_up.block == down.block for *_, gate_up, down in PLANS)


def test_plans_follow_the_pairs_of_an_expert(monkeypatch):
    experts = build_experts(random_experts(2 * WIDTH, HIDDEN), random_experts(HIDDEN, WIDTH), TOP, LIMIT, way="hopper")
    monkeypatch.setattr(experts, "num_experts", 384)
    monkeypatch.setattr(experts, "num_selected", 6)
    blocks = {rows: experts.block_of(rows) for rows in (1, 2, 64, 320, 321, 704, 705, 1024, 1025)}
    assert blocks == {1: 8, 2: 8, 64: 8, 320: 8, 321: 16, 704: 16, 705: 24, 1024: 24, 1025: 16}  # the last: of many
    monkeypatch.setattr(experts, "num_experts", 128)  # the draft's
    monkeypatch.setattr(experts, "num_selected", 3)
    assert [experts.block_of(rows) for rows in (5, 213, 214, 469, 470, 682, 683)] == [8, 8, 16, 16, 24, 24, 16]
