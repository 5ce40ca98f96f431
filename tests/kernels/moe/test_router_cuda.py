"""The router's CUDA kernels: on a GPU where there is one, else their text is compiled for the CPU and emulated."""

from __future__ import annotations

import ctypes
import functools
import math
import re
import shutil
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer.kernels import nvrtc
from deepinfer.kernels.moe import router, router_cuda
from deepinfer.kernels.moe.expert_blocks import ExpertBlocks, new_blocks, order_pairs
from deepinfer.ops.moe import route
from tests.kernels.emulation import compile_for_cpu
from tests.kernels.moe.test_router import assert_order

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() and shutil.which("g++") is None, reason="needs a GPU or a C++ compiler"
)
ENTRY = {
    "route_logits": "route_logits((const u16*)values[0], (const u16*)values[1], (float*)values[2], *(int*)values[3]);",
    "route_select": "route_select(*(const Arguments*)values[0]);",
    "order_pairs": "order_pairs(*(const Arguments*)values[0]);",
}
MARK = "// ---------------------------------------------------------------- "


@functools.cache
def _emulator(source: str, entry: str, defines: tuple[tuple[str, int], ...]) -> Any:
    text = nvrtc.read_source(source)
    before, rest = text.split(MARK + "instructions")
    kernel = before + rest[rest.index(MARK) :].replace(
        "extern __shared__ __align__(16) char shared[];", "char* shared = at(0);"
    )
    constants = dict(defines) | {
        "CLUSTER": dict(defines).get("CLUSTER", 1),
        "THREADS": dict(defines).get("THREADS") or 128 * dict(defines)["GROUPS"],
    }
    kernel = re.sub("#define THREADS .*", "", kernel)
    body = f"static void** values;\nstatic void call() {{ {ENTRY[entry]} }}\n"
    body += 'extern "C" int emulate(void** v, const int* grid) { values = v; return launch(grid, call); }\n'
    return compile_for_cpu(constants, ("route.h",), kernel, body)


class _Kernel:
    """Stands in for :class:`nvrtc.Kernel`."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def launch(self, grid: tuple[int, int, int], threads: int, arguments: Sequence[Any], **_: Any) -> None:
        del threads
        kept = [a if isinstance(a, Tensor | ctypes.Structure) else ctypes.c_int(a) for a in arguments]
        addresses = [a.data_ptr() if isinstance(a, Tensor) else ctypes.addressof(a) for a in kept]
        values = (ctypes.c_void_p * len(addresses))(*addresses)
        assert self.function(values, (ctypes.c_int * 3)(*grid)) == 0, "deadlock"


@pytest.fixture(autouse=True)
def _emulate(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    if device.type == "cuda":
        return

    def load_kernel(source: str, entry: str, defines: dict[str, int], *_: Any, **__: Any) -> _Kernel:
        return _Kernel(_emulator(source, entry, tuple(sorted(defines.items()))))

    monkeypatch.setattr(nvrtc, "load_kernel", load_kernel)


def _select(
    partial: Tensor, bias: Tensor, top: int, block: int, **options: Any
) -> tuple[Tensor, Tensor, ExpertBlocks | None]:
    rows, num_experts = partial.shape[1:]
    experts = torch.full((rows, top), -7, dtype=torch.int32, device=partial.device)
    weights = torch.full((rows, top), torch.nan, device=partial.device)
    blocks = new_blocks(rows * top, num_experts, block, partial.device) if block else None
    given = {"image_bias": None, "is_image": None, "positions": None, "scale": 1.5} | options
    router_cuda.select(
        partial, bias, experts=experts, weights=weights, order=blocks.buffers if blocks else None, block=block, **given
    )
    return experts, weights, blocks


@pytest.mark.parametrize(
    ("rows", "experts", "hidden", "shape"),
    [(1, 8, 256, (1, 1, 2)), (9, 24, 1120, (2, 1, 2)), (19, 100, 160, (4, 1, 2)), (70, 32, 520, (8, 1, 2)),
     (70, 100, 520, (8, 1, 4)), (65, 130, 520, (8, 2, 4)), (97, 20, 1032, (12, 2, 4))],
)  # fmt: skip
def test_partial_logits_add_up(rows, experts, hidden, shape, device):
    torch.manual_seed(rows)
    x = torch.randn(rows, hidden).bfloat16().to(device)
    gate = torch.randn(experts, hidden).bfloat16().to(device)
    partial = router_cuda.logits(x, gate, shape=router_cuda.LogitsShape(*shape))
    assert partial.shape == (-(-hidden // 512), rows, experts)
    exact = x.double() @ gate.double().T
    size = x.double().abs() @ gate.double().abs().T
    assert ((partial.double().sum(0) - exact).abs() <= size * 2.0**-20).all()
    for row in (0, rows - 1):
        assert torch.equal(router_cuda.logits(x[row : row + 1].clone(), gate)[:, 0], partial[:, row])


@pytest.mark.parametrize("experts", [8, 128, 384, 512])
def test_ctas_of_the_logits_fit_and_run_at_once(experts):
    for rows in (1, 9, 32, 64, 65, 128, 129, 256, 257, 280, 384, 512, 5000):
        shape = router_cuda.choose_logits_shape(rows, experts, 5120)
        assert shape.shared_bytes <= 227 * 1024
        assert max(rows, rows * experts / 384) > 384 or math.prod(shape.grid(rows, experts, 5120)) <= 132
    assert router_cuda.choose_logits_shape(1, experts, 5120).row_tiles == 1
    assert router_cuda.max_cluster_rows() >= router.CLUSTER_ROWS
    shapes = [router_cuda.choose_logits_shape(rows, 384, 5120) for rows in (5, 64, 100, 200, 300, 500)]
    assert [(s.row_tiles, s.num_experts) for s in shapes] == [(1, 32), (8, 32), (8, 64), (8, 128), (12, 128), (12, 128)]


@pytest.mark.parametrize(
    ("rows", "experts", "top", "slices", "cluster", "block"),
    [(1, 8, 2, 1, 1, 8), (2, 384, 6, 10, 1, 8), (13, 24, 3, 3, 8, 4), (40, 100, 6, 2, 8, 1), (75, 384, 6, 10, 8, 8),
     (13, 24, 3, 3, None, 0), (7, 384, 6, 1, None, 0), (249, 132, 6, 3, 8, 8), (256, 384, 6, 10, None, 16),
     (300, 100, 6, 2, None, 0), (513, 36, 4, 1, None, 0)],
)  # fmt: skip
def test_selection_and_order_equal_the_reference(rows, experts, top, slices, cluster, block, device):
    torch.manual_seed(rows + experts)
    partial = torch.randn(slices, rows, experts).to(device)
    bias, image_bias = (torch.randn(2, experts) * 0.2).to(device)
    is_image = (torch.arange(rows) % 3 == 1).to(device)
    positions = torch.arange(rows, dtype=torch.int32)
    positions[rows // 2 + 1 :: 4] = -1
    positions = positions.to(device)
    logits = partial[0].clone()
    for part in partial[1:]:
        logits += part
    identity = torch.eye(experts, dtype=torch.float64, device=device)
    both = torch.where(is_image[:, None], image_bias, bias).double()
    expected, weights = route(logits, identity, both, top, 1.5)
    expected[positions < 0], weights[positions < 0] = -1, 0
    rows_of = {"is_image": is_image.view(torch.uint8), "positions": positions}
    found, found_weights, blocks = _select(partial, bias, top, block, image_bias=image_bias, cluster=cluster, **rows_of)
    assert torch.equal(found.long(), expected)
    torch.testing.assert_close(found_weights.double(), weights, rtol=2e-6, atol=1e-9)
    if blocks is not None:
        assert_order(blocks, expected, experts)


def test_equal_scores_go_to_the_lower_expert(device):
    bias = torch.zeros(100, device=device)
    bias[[3, 35, 99, 64]] = 1
    found, weights, _ = _select(torch.zeros(1, 2, 100, device=device), bias, 6, 0)
    assert found.tolist() == [[3, 35, 64, 99, 0, 1]] * 2
    assert torch.equal(weights, torch.full_like(weights, 0.25))


@pytest.mark.parametrize("rows", [1, 5, 41])
def test_router_orders_with_the_selection_or_behind_it(rows, device, monkeypatch):
    monkeypatch.setattr(router, "CLUSTER_ROWS", 40)
    monkeypatch.setattr(router_cuda, "accepts_router", lambda *_: True)
    monkeypatch.setattr(router_cuda, "accepts_order", lambda *_: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    torch.manual_seed(rows)
    x, gate = torch.randn(rows, 160).bfloat16().to(device), (torch.randn(24, 160) / 4).bfloat16().to(device)
    bias = torch.randn(24, device=device)
    positions = torch.arange(rows, dtype=torch.int32, device=device)
    positions[3::5] = -1
    expected, weights = route(x, gate.double(), bias.double(), 3, 1.5)
    expected[positions < 0], weights[positions < 0] = -1, 0
    found = router.Router(gate, bias, None, 3, 1.5).forward(x, positions=positions, block=8)
    assert torch.equal(found.experts.long(), expected)
    torch.testing.assert_close(found.weights.double(), weights, rtol=2e-6, atol=1e-9)
    assert found.blocks is not None
    assert_order(found.blocks, expected, 24)


@pytest.mark.parametrize(("rows", "experts", "top", "block"), [(1, 8, 2, 8), (31, 40, 6, 1), (300, 24, 3, 16)])
def test_pairs_are_ordered_by_expert(rows, experts, top, block, device):
    torch.manual_seed(rows)
    chosen = torch.rand(rows, experts).topk(top, 1).indices.int()
    chosen[torch.rand(rows, top) < 0.2] = -1
    chosen = chosen.to(device)
    blocks = new_blocks(rows * top, experts, block, device)
    router_cuda.order_pairs(chosen, experts, blocks.buffers, block)
    assert_order(blocks, chosen, experts)
    again = order_pairs(chosen, experts, block, cuda=False)
    number = int(again.num_ordered)
    assert torch.equal(blocks.ordered[:number], again.ordered[:number])
    assert torch.equal(blocks.place, again.place)
