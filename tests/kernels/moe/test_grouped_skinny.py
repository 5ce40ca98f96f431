"""The experts' kernel for few pairs, compiled for the CPU and emulated: bits, odd numbers of pairs, plans."""

from __future__ import annotations

import ctypes
import functools
import shutil
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from deepinfer.kernels import nvrtc
from deepinfer.kernels.moe import packing
from deepinfer.kernels.moe.expert_blocks import order_pairs
from deepinfer.kernels.moe.grouped_skinny import GroupedSkinny, Plan, SharedActivation, new_output
from deepinfer.kernels.moe.swiglu import swiglu_rounded
from deepinfer.ops.number_formats import q4u_decode
from tests.kernels.emulation import compile_for_cpu

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU: bench/gpu/check_experts.py"),
]
LIMIT, GRID = 10.0, 2
ENTRY = """
static Arguments arguments;
static int grid;
static void call() { moe_skinny(arguments, grid); }
extern "C" int emulate(void* values, int ctas, int threads, int shared_bytes, long weight_bytes) {
  std::memcpy(&arguments, values, sizeof arguments);
  grid = ctas, weights_begin = arguments.weights, weights_end = weights_begin + weight_bytes;
  return launch(ctas, 1, threads, shared_bytes, call);
}
"""


@functools.cache
def emulator(defines: tuple[tuple[str, int], ...]) -> Callable[..., int]:
    text = nvrtc.read_source("moe_skinny.cu")
    marks = [text.index(f"// {'-' * 64} {name}") for name in ("instructions", "the kernel")]
    constants, kernel = text[text.index("#define THREADS") : marks[0]], text[marks[1] :]
    mine = "shared_memory[fibers[current].cta]"
    kernel = kernel.replace("extern __shared__ __align__(128) char shared[];", f"char* shared = {mine};")
    kernel = kernel.replace(
        "__shared__ __align__(8) u64 barriers[WARPS * DEPTH];", f"u64* barriers = (u64*)({mine} + BARRIER_OFFSET);"
    )
    # The constants come before the headers too: those of the dense kernels lack them.
    sizes = dict(defines) | {"CLUSTER": 1, "TILE_BYTES": packing.TILE_BYTES}
    return compile_for_cpu(
        sizes, ("dense.h", "dense_skinny.h", "moe.h"), "#undef TILE_BYTES\n" + constants, kernel, ENTRY
    )


class EmulatedKernel:
    """Stands for :class:`deepinfer.kernels.nvrtc.Kernel`."""

    weight_bytes = 0

    def __init__(self, source: str, entry: str, defines: dict[str, int], device: torch.device, *, shared_bytes: int):
        self.function = emulator(tuple(defines.items()))

    def launch(self, grid, threads, arguments, *, shared_bytes, overlap) -> None:
        size = ctypes.c_long(self.weight_bytes)
        assert self.function(ctypes.byref(arguments[0]), grid[0], threads, shared_bytes, size) == 0


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    monkeypatch.setattr(nvrtc, "load_kernel", EmulatedKernel)
    monkeypatch.setattr(nvrtc, "num_multiprocessors", lambda device: GRID)


def integer_weights(experts: int, n: int, k: int) -> tuple[Tensor, Tensor]:
    """Codes and scales whose products with small integers are exact in float32 in every order."""
    codes = torch.randint(0, 256, (experts, n, k // 2), dtype=torch.uint8)
    return codes, torch.randint(126, 129, (experts, n, k // 32), dtype=torch.uint8)


def routed(rows: int, top: int, experts: int) -> Tensor:
    """Distinct experts per row, int32 ``[rows, top]``, some of them none."""
    chosen = torch.stack([torch.randperm(experts)[:top] for _ in range(rows)]).int()
    return torch.where(torch.rand(rows, top) < 0.1, -1, chosen)


def run(product: GroupedSkinny, x: Tensor, experts: Tensor, plan: Plan, **more: object) -> Tensor:
    EmulatedKernel.weight_bytes = product.packed.numel()
    out = new_output(experts.numel(), product).fill_(torch.nan)
    product(x, order_pairs(experts, len(product.packed), plan.block), out, plan, **more)
    return out


@pytest.mark.parametrize(
    ("rows", "top", "experts", "shape", "plan"),
    [
        (1, 3, 5, (128, 256), Plan(1, 2, 2)),
        (9, 2, 4, (64, 640), Plan(1, 4, 3, 8)),
        (40, 1, 3, (192, 384), Plan(2, 2, 2)),
        (3, 2, 2, (640, 128), Plan(1, 1, 4, 8)),
        (2, 3, 4, (192, 640), Plan(1, 3, 2, 12, evict_first=True)),
        (30, 2, 3, (320, 256), Plan(1, 1, 2, 20)),
        (50, 2, 4, (128, 384), Plan(3, 1, 2, 12)),
        (61, 3, 4, (64, 384), Plan(3, 1, 2, 4)),
    ],
)
def test_exact_sums_give_the_reference_bits(rows, top, experts, shape, plan):
    torch.manual_seed(rows)
    codes, scales = integer_weights(experts, *shape)
    x = torch.randint(-8, 9, (rows, shape[1])).bfloat16()
    chosen = routed(rows, top, experts)
    found = run(GroupedSkinny(packing.pack(codes, scales), top), x, chosen, plan)
    pairs = chosen.flatten().long()
    wide = q4u_decode(codes, scales).double()[pairs.clamp_min(0)]
    expected = torch.einsum("pk,pnk->pn", x.double().repeat_interleave(top, 0), wide).bfloat16()
    assert torch.equal(found[pairs >= 0], expected[pairs >= 0])
    assert found[pairs < 0].isnan().all()


@pytest.mark.parametrize(
    ("rows", "plan"),
    [
        (5, Plan(1, 2, 3, 8)),
        (21, Plan(2, 4, 2, 8)),
        (40, Plan(3, 1, 2, 12)),
        (1, Plan(1, 4, 1, 20, evict_first=True, ahead=True)),
        (5, Plan(1, 2, 2, ahead=True)),
    ],
)
def test_gated_product_activates_and_rounds(rows, plan):
    torch.manual_seed(rows)
    experts, top, width, hidden = 3, 2, 96, 512
    codes, scales = integer_weights(experts, 2 * width, hidden)
    scales -= 7
    x = torch.randint(-8, 9, (rows, hidden)).bfloat16()
    chosen, weights = routed(rows, top, experts), torch.rand(rows, top)
    paired = packing.pack(packing.pair_gate_and_up(codes), packing.pair_gate_and_up(scales))
    shared = SharedActivation(torch.randn(rows, 2 * width) * 4, torch.empty(rows, width, dtype=torch.bfloat16))
    product = GroupedSkinny(paired, top, LIMIT)
    found = run(product, x, chosen, plan, weights=weights, shared=shared, early=True)
    pairs = chosen.flatten().long()
    wide = q4u_decode(codes, scales).double()[pairs.clamp_min(0)]
    gate_up = torch.einsum("pk,pnk->pn", x.double().repeat_interleave(top, 0), wide).float()
    expected = swiglu_rounded(gate_up, LIMIT, weights)
    live = pairs >= 0
    # The exponential differs by units in the last place, which moves a value across a rounding boundary now and then.
    assert (found[live] != expected[live]).float().mean() < 3e-3
    torch.testing.assert_close(found[live], expected[live], rtol=0.13, atol=0)
    assert found[~live].isnan().all()
    of_shared = swiglu_rounded(shared.gate_up, LIMIT)
    assert (shared.out != of_shared).float().mean() < 3e-3


@pytest.mark.parametrize(
    "plan", [Plan(1, 2, 2), Plan(1, 1, 1, 20), Plan(2, 4, 2, 8), Plan(3, 1, 3, 12), Plan(3, 2, 2, 4)]
)
@pytest.mark.parametrize("chosen", [[-1, -1, -1], [2] * 19, [3], [0, -1, 3], [1] * 9 + [0] * 8 + [3] * 17 + [2]])
def test_no_pairs_one_expert_with_all_and_the_last(chosen, plan):
    codes, scales = integer_weights(4, 128, 512)
    x = torch.randint(-8, 9, (len(chosen), 512)).bfloat16()
    experts = torch.tensor(chosen, dtype=torch.int32).unsqueeze(1)
    found = run(GroupedSkinny(packing.pack(codes, scales), 1), x, experts, plan)
    live = experts.flatten() >= 0
    wide = q4u_decode(codes, scales).double()[experts.flatten().clamp_min(0).long()]
    assert torch.equal(found[live], torch.einsum("pk,pnk->pn", x.double(), wide).bfloat16()[live])
    assert found[~live].isnan().all()


def test_a_pair_does_not_depend_on_the_others_nor_on_the_block():
    torch.manual_seed(0)
    codes = torch.randint(0, 256, (2, 128, 192), dtype=torch.uint8)
    scales = torch.randint(0, 129, (2, 128, 12), dtype=torch.uint8)
    product = GroupedSkinny(packing.pack(codes, scales), 1)
    x = torch.randn(19, 384).bfloat16()
    experts = torch.randint(0, 2, (19, 1), dtype=torch.int32)
    whole = run(product, x, experts, Plan(1, 2, 2))
    for plan in (Plan(2, 2, 3, 8), Plan(2, 2, 2), Plan(3, 2, 1, 8)):
        assert torch.equal(run(product, x, experts, plan), whole)
    x[:7], x[8:] = torch.nan, torch.nan
    assert torch.equal(run(product, x, experts, Plan(1, 2, 2))[7], whole[7])


def stored_weights(*shape: int) -> tuple[Tensor, Tensor]:
    *lead, n, k = shape
    codes = torch.randint(0, 256, (*lead, n, k // 2), dtype=torch.uint8)
    return codes, torch.randint(0, packing.MAX_SCALE_BYTE + 1, (*lead, n, k // 32), dtype=torch.uint8)


def test_packing_keeps_every_code_and_scale():
    codes, scales = stored_weights(2, 192, 128)
    found = packing.unpack(packing.pack(codes, scales))
    assert torch.equal(found[0], codes)
    assert torch.equal(found[1], scales)


@pytest.mark.parametrize("is_paired", [False, True])
def test_packing_kernel_gives_the_same_bytes(is_paired):
    codes, scales = stored_weights(128, 384)
    order = packing.pair_gate_and_up if is_paired else lambda rows: rows
    expected = packing.pack(order(codes), order(scales))
    found = torch.zeros_like(expected)
    text = nvrtc.read_source("moe_pack.cu")
    marks = [text.index(f"// {'-' * 64} {name}") for name in ("instructions", "the kernel")]
    loop = """
    static int thread;
    static int thread_number() { return thread; }
    """
    entry = """
    extern "C" int emulate(const u8* codes, const u8* scales, u8* packed, int n, int k, int paired) {
      for (thread = 0; thread < n / 16 * k; ++thread) moe_pack(codes, scales, packed, n, k, paired);
      return 0;
    }
    """
    emulate = compile_for_cpu(
        {"CLUSTER": 1}, ("dense.h",), text[text.index("struct") : marks[0]], loop, text[marks[1] :], entry
    )
    emulate(*(ctypes.c_void_p(t.data_ptr()) for t in (codes, scales, found)), 128, 384, int(is_paired))
    assert torch.equal(found, expected)
