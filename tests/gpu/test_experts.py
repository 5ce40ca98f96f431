"""On a GPU: the routed experts by our own kernels against those in Triton, launched as a step launches them.

Run with ``pytest -m gpu tests/gpu``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepinfer.ops.number_formats import q8_round

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
    ),
]
EXPERTS, HIDDEN, WIDTH, TOP, LIMIT = 24, 1024, 512, 4, 10.0
DEVICE = torch.device("cuda")


def random_experts(n: int, k: int) -> Any:
    from deepinfer.kernels.moe.experts import PackedExperts

    weights = PackedExperts.empty(EXPERTS, n, k, DEVICE)
    weights.codes.copy_(torch.randint(0, 256, (EXPERTS, n, k // 2), dtype=torch.uint8))
    weights.scales.copy_(torch.randint(114, 120, (EXPERTS, n, k // 32), dtype=torch.uint8))
    return weights


@pytest.mark.parametrize("invariant", [False, True])
@torch.inference_mode()
def test_overlapped_launches_give_what_triton_gives(invariant: bool) -> None:
    # Triton is imported with these: on a CPU the tests of kernels have to say first that its interpreter is wanted.
    from deepinfer.kernels.dense.linear import Fp8Linear
    from deepinfer.kernels.moe.experts import ExpertInput, build_experts
    from deepinfer.kernels.moe.experts_hopper import HopperExperts
    from deepinfer.kernels.moe.router import Router

    torch.manual_seed(0)
    gate_up, down = random_experts(2 * WIDTH, HIDDEN), random_experts(HIDDEN, WIDTH)
    triton = build_experts(gate_up.apart(), down.apart(), TOP, LIMIT, way="triton")
    experts = build_experts(gate_up, down, TOP, LIMIT, batch_invariant=invariant)
    assert isinstance(experts, HopperExperts)
    router = Router(
        torch.randn(EXPERTS, HIDDEN, device=DEVICE).bfloat16(), torch.zeros(EXPERTS, device=DEVICE), None, TOP, 1
    )
    codes = (torch.randn(2 * WIDTH, HIDDEN) * 0.1).to(torch.float8_e4m3fn).view(torch.uint8).to(DEVICE)
    shared = Fp8Linear(codes, torch.full((2 * WIDTH // 32, HIDDEN // 32), 127, dtype=torch.uint8, device=DEVICE))
    for rows in (1, 7, 33, 130, 384, 385, 1000):
        x = torch.randn(rows, HIDDEN, device=DEVICE).bfloat16()
        given = ExpertInput(x, rounded=q8_round(x).bfloat16())

        def step() -> tuple[torch.Tensor, torch.Tensor]:
            routing = router.forward(x, block=experts.block_of(rows), invariant=invariant)  # noqa: B023
            gate_up = shared.forward(given.rounded, dtype=torch.float32, overlap=True)  # noqa: B023
            found = experts.forward(given, routing, gate_up)  # noqa: B023
            values = found.values
            return values if found.place is None else values[found.place.long()], found.shared_inner

        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            values, inner = step()
        for _ in range(3):
            graph.replay()
        expected = triton.forward(
            given, router.forward(x, block=triton.block_of(rows)), shared.forward(given.rounded, dtype=torch.float32)
        )
        error = (values.float() - expected.values.float()).norm() / expected.values.float().norm()
        assert error < 5e-3, (rows, float(error))
        assert (inner != expected.shared_inner).float().mean() < 3e-3, rows
