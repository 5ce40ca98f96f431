"""The grouped CUDA product of the routed experts: on a GPU where there is one, else its text emulated on the CPU."""

from __future__ import annotations

import ctypes
import functools
import shutil
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from deepinfer.kernels import nvrtc
from deepinfer.kernels.moe import grouped_wgmma, packing
from deepinfer.kernels.moe.expert_blocks import ExpertBlocks, order_pairs
from deepinfer.kernels.moe.grouped_wgmma import GroupedExperts, GroupedProduct, Tile
from deepinfer.ops.number_formats import q4u_decode, q8_round
from tests.kernels.emulation import compile_for_cpu
from tests.kernels.test_nvrtc import compiler_is_here

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() and shutil.which("g++") is None, reason="needs a GPU or a C++ compiler"
)
MARK = "// ---------------------------------------------------------------- "
LIMIT = 10.0
ENTRY = {
    0: "moe_wgmma(*(const Arguments*)values[0]);",
    1: """moe_gather((const uint4*)values[0], (const int*)values[1], (const float*)values[2], (char*)values[3],
                 (float*)values[4], (int*)values[5], *(int*)values[6]);""",
}
MANY = (Tile(160, 2, 2, 1, 2), Tile(80, 4, 1, 2, 2))
TILES = (*MANY, Tile(48, 2, 1, 2, 3), Tile(64, 2, 2, 2, 2), Tile(80, 3, 2, 1, 2))


@functools.cache
def emulator(defines: tuple[tuple[str, int], ...]) -> Callable[..., int]:
    text = nvrtc.read_source("moe_wgmma.cu")
    is_gather = dict(defines)["GATHER"]
    start, end = text.index(MARK + ("gather" if is_gather else "the product")), text.rindex("#endif")
    kernel = text[start : text.index("#else\n" + MARK) if is_gather else end]
    kernel = kernel.replace("extern __shared__ char unaligned[];", "char* unaligned = shared_memory;")
    constants = text[text.index("#define CODE_BYTES") : text.index(MARK + "instructions")]
    body = f"static void** values;\nstatic void call() {{ {ENTRY[is_gather]} }}\n"
    body += """extern "C" int emulate(void** v, const char** ranges, int grid, int threads, int shared_bytes) {
      values = v, operands[0] = {ranges[0], ranges[1]}, operands[1] = {ranges[2], ranges[3]};
      return launch(grid, threads, shared_bytes, call);
    }"""
    return compile_for_cpu(dict(defines), ("grouped.h",), constants, kernel, body)


class EmulatedKernel:
    """Stands for :class:`nvrtc.Kernel`."""

    def __init__(self, source: str, entry: str, defines: dict[str, int], device: torch.device, shared_bytes: int = 0):
        self.function, self.defines = emulator(tuple(sorted(defines.items()))), defines

    def launch(self, grid, threads, arguments, *, shared_bytes=0, overlap) -> None:
        kept = [a if isinstance(a, Tensor | ctypes.Structure) else ctypes.c_int(a) for a in arguments]
        addresses = [a.data_ptr() if isinstance(a, Tensor) else ctypes.addressof(a) for a in kept]
        values = (ctypes.c_void_p * len(addresses))(*addresses)
        ranges = (ctypes.c_void_p * 4)()
        if not self.defines["GATHER"]:
            g, d = arguments[0], self.defines
            weights = d["EXPERTS"] * d["ROW_TILES"] * d["K_TILES"] * packing.TILE_BYTES
            ranges[:] = g.weights, g.weights + weights, g.x, g.x + d["K_TILES"] * g.capacity * 128
        assert self.function(values, ranges, grid[0], threads, shared_bytes) == 0


@pytest.fixture(autouse=True)
def emulated(monkeypatch, device):
    if device.type != "cuda":
        monkeypatch.setattr(nvrtc, "load_kernel", EmulatedKernel)
        monkeypatch.setattr(nvrtc, "num_multiprocessors", lambda _: 3)


def chosen_experts(counts: list[int], rows: int, top: int, device: torch.device) -> Tensor:
    """Experts with these numbers of pairs, each row's distinct; what is left over is -1."""
    experts = torch.full((rows, top), -1, dtype=torch.int32)
    for expert, count in enumerate(counts):
        free = (experts < 0).sum(1) * 1000 + torch.arange(rows) % 997  # rows with the most room first
        for row in free.argsort(descending=True)[:count]:
            experts[row, int((experts[row] < 0).nonzero()[-1])] = expert
    assert torch.equal(torch.bincount(experts[experts >= 0], minlength=len(counts)), torch.tensor(counts))
    return experts.to(device)


def integer_matrices(num_experts: int, n: int, k: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Codes and scales of small integers, for which every sum in float32 is exact; all codes appear."""
    generator = torch.Generator().manual_seed(n)
    codes = torch.randint(0, 256, (num_experts, n, k // 2), generator=generator).to(torch.uint8)
    scales = torch.randint(126, 129, (num_experts, n, k // 32), generator=generator).to(torch.uint8)
    return codes.to(device), scales.to(device)


def integer_rows(rows: int, k: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(k)
    return torch.randint(-4, 5, (rows, k), generator=generator).to(torch.bfloat16).to(device)


def rows_of(lines: Tensor) -> Tensor:
    """Rows ``[capacity, K]`` of lines: pieces in order again, then columns."""
    tiles, capacity, _ = lines.shape
    pieces = torch.arange(8, device=lines.device) ^ (torch.arange(capacity, device=lines.device) % 8)[:, None]
    words = lines.view(tiles, capacity, 8, 8).gather(2, pieces[None, :, :, None].expand(tiles, -1, -1, 8))
    # [tile, row, half, pair of columns, piece of 8 columns, column]
    rows = words.view(tiles, capacity, 2, 4, 4, 2).transpose(3, 4).reshape(tiles, capacity, 64)
    return rows.transpose(0, 1).flatten(1)


def used(blocks: ExpertBlocks) -> tuple[Tensor, Tensor]:
    """Places that hold a pair, and the pairs."""
    places = (blocks.ordered[: int(blocks.num_ordered)] < blocks.num_pairs).nonzero().flatten()
    return places, blocks.ordered[places].long()


def gathered(x: Tensor, weights: Tensor, blocks: ExpertBlocks) -> tuple[Tensor, Tensor, Tensor]:
    counters = torch.full((2,), 9, dtype=torch.int32, device=x.device)
    return *grouped_wgmma.gather(x, weights, blocks, counters), counters


@pytest.mark.parametrize("hidden", [64, 448])
def test_gathered_lines_are_the_rows_of_the_pairs(hidden, device):
    rows, top = 21, 3
    x, weights = integer_rows(rows, hidden, device), torch.rand(rows, top, device=device)
    blocks = order_pairs(chosen_experts([0, 1, 20, 9], rows, top, device), 4, 8)
    lines, ordered_weights, counters = gathered(x, weights, blocks)
    places, pairs = used(blocks)
    assert torch.equal(rows_of(lines)[places], x[pairs // top])
    assert torch.equal(ordered_weights[places], weights.flatten()[pairs])
    assert counters.tolist() == [0, 0]


def product_of(
    codes: Tensor, scales: Tensor, x: Tensor, experts: Tensor, swiglu: bool, tile: Tile, block: int, ctas: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Used rows of the result, the exact products in float64 and the route weights of these rows' pairs."""
    top, device = experts.shape[1], x.device
    weights = torch.rand(experts.shape, generator=torch.Generator().manual_seed(0)).to(device)
    blocks = order_pairs(experts, codes.shape[0], block)
    lines, ordered_weights, counters = gathered(x, weights, blocks)
    parts = (codes, scales)
    packed = packing.pack(*(packing.pair_gate_and_up(p) for p in parts) if swiglu else parts)
    n, capacity = codes.shape[1], blocks.ordered.shape[0]
    shape = (n // 128, capacity, 64) if swiglu else (capacity, n)
    out = torch.full(shape, torch.nan, dtype=torch.bfloat16, device=device)
    product = GroupedProduct(packed, swiglu, LIMIT)
    assert product.accepts(tile)
    product(lines, ordered_weights, out, blocks, counters[:1], tile, ctas)
    places, pairs = used(blocks)
    wide = q4u_decode(codes, scales).double()[experts.flatten()[pairs].long()]
    exact = torch.einsum("pk,pnk->pn", x[pairs // top].double(), wide)
    return (rows_of(out) if swiglu else out)[places], exact, weights.flatten()[pairs]


COUNTS = [0, 1, 33, 170, 0, 16]


@pytest.mark.parametrize("tile", TILES)
def test_down_has_the_bits_of_exact_sums(tile, device):
    """Row tiles that are no multiple of a CTA's, experts in one and several parts, and -1."""
    rows = 182
    codes, scales = integer_matrices(len(COUNTS), 320, 256, device)
    x, experts = integer_rows(rows, 256, device), chosen_experts(COUNTS, rows, 2, device)
    found, exact, _ = product_of(codes, scales, x, experts, False, tile, 16, 2)
    assert len(found) == sum(COUNTS)
    assert torch.equal(found, exact.bfloat16())


@pytest.mark.parametrize("tile", MANY)
def test_gate_up_rounds_the_weighted_activation(tile, device):
    codes, scales = integer_matrices(3, 384, 128, device)
    counts = [41, 0, 130]
    x, experts = integer_rows(150, 128, device) / 64, chosen_experts(counts, 150, 2, device)
    found, exact, weights = product_of(codes, scales, x, experts, True, tile, 8, 2)
    gate, up = exact.float().chunk(2, 1)
    expected = torch.nn.functional.silu(gate.clamp_max(LIMIT)) * up.clamp(-LIMIT, LIMIT) * weights[:, None]
    # The exponential differs by units in the last place, which moves a value across a rounding boundary now and then.
    assert (found.float() != q8_round(expected)).float().mean() < 2e-3


@pytest.mark.parametrize("block", [8, 16])
def test_every_width_gives_the_same_bits(block, device):
    """Pairs with any sums: as many as fit into a CTA, then a few of them."""
    codes, scales = integer_matrices(1, 128, 128, device)
    x = torch.randn(160, 128, generator=torch.Generator().manual_seed(0)).bfloat16().to(device)
    results = []
    for count in range(160, 0, -block):
        experts = torch.zeros(count, 1, dtype=torch.int32, device=device)
        results.append(product_of(codes, scales, x[:count], experts, False, MANY[0], block, 1)[0])
    assert all(torch.equal(result, results[0][: len(result)]) for result in results)


def test_experts_agree_with_float64(device):
    num_experts, hidden, width, rows, top = 4, 192, 128, 23, 2
    (codes, scales), (down_codes, down_scales) = (
        integer_matrices(num_experts, 2 * width, hidden, device),
        integer_matrices(num_experts, hidden, width, device),
    )
    generator = torch.Generator().manual_seed(1)
    x = (q8_round(torch.randn(rows, hidden, generator=generator).bfloat16()) / 64).bfloat16().to(device)
    experts = chosen_experts([20, 0, 3, 16], rows, top, device)
    weights = torch.rand(rows, top, generator=generator).to(device)
    packed = packing.pack(packing.pair_gate_and_up(codes), packing.pair_gate_and_up(scales))
    few, many = Tile(48, 2, 1, 2, 3), Tile(160, 2, 2, 1, 2)
    engine = GroupedExperts(
        packed, packing.pack(down_codes, down_scales), hidden, width, num_experts, LIMIT, few=few, many=many
    )
    # hidden has an odd number of tiles, which the tile for few pairs does not take
    assert engine.tile_for(engine.gate_up, rows * top) is many
    assert engine.tile_for(engine.down, rows * top) is few
    values, place = engine.forward(x, experts, weights)
    flat = experts.flatten().long()
    there = flat >= 0
    assert torch.equal(place >= 0, there)
    inputs = x.double().repeat_interleave(top, 0)[there]
    gate, up = torch.einsum("pk,pnk->pn", inputs, q4u_decode(codes, scales).double()[flat[there]]).chunk(2, 1)
    inner = torch.nn.functional.silu(gate.clamp_max(LIMIT)) * up.clamp(-LIMIT, LIMIT) * weights.flatten()[there, None]
    inner = q8_round(inner.float()).double()
    exact = torch.einsum("pk,pnk->pn", inner, q4u_decode(down_codes, down_scales).double()[flat[there]])
    error = (values[place[there].long()].double() - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert error < 3e-3


@pytest.mark.parametrize("tile", [grouped_wgmma.FEW, grouped_wgmma.MANY])
def test_tiles_fit_the_released_sizes(tile):
    for n, k, swiglu in ((4608, 5120, True), (5120, 2304, False)):
        product = GroupedProduct(torch.empty(384, k // 64, n // 64, 0), swiglu, LIMIT)
        assert product.accepts(tile)
        assert tile.pairs % grouped_wgmma.BLOCK == 0


@pytest.mark.skipif(not compiler_is_here(), reason="NVRTC is not installed")
@pytest.mark.parametrize("swiglu", [False, True])
def test_cuda_source_compiles(swiglu, tmp_path, monkeypatch):
    monkeypatch.setattr(nvrtc, "_cache_directory", tmp_path)
    product = GroupedProduct(torch.empty(8, 4, 6, 0), swiglu, LIMIT)
    for tile in (grouped_wgmma.FEW, grouped_wgmma.MANY):
        assert nvrtc.compile_cubin("moe_wgmma.cu", product.defines(tile, 16), "sm_90a").startswith(b"\x7fELF")
