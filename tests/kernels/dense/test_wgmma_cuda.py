"""The wgmma kernel of dense products, compiled for the CPU and emulated: bits, batches, sums left apart."""

from __future__ import annotations

import ctypes
import functools
import itertools
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from deepinfer.checkpoint import codecs
from deepinfer.kernels import nvrtc
from deepinfer.kernels.dense import packing, plans
from deepinfer.kernels.dense.linear import Fp8Linear
from deepinfer.kernels.dense.wgmma_cuda import Tile, WgmmaProduct
from deepinfer.ops import number_formats as nf
from tests.kernels.dense.test_linear import integer_input, integer_weight, random_input, random_weight
from tests.kernels.emulation import compile_for_cpu

EMULATION = Path(__file__).parents[1] / "emulation"
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
ENTRY = """
static const u32* scales;
static void* y;
static TensorMap w_map, x_map;
static int rows;
static void call() { dense_wgmma(w_map, scales, x_map, y, rows); }
extern "C" int emulate(const u64* w, const void* s, const u64* x, void* out, int n, int ctas, int threads, int shared) {
  std::memcpy(w_map.opaque, w, 4 * 8);
  std::memcpy(x_map.opaque, x, 5 * 8);
  scales = (const u32*)s, y = out, rows = n, gridDim.x = ctas;
  weights_begin = (const char*)w[0], weights_end = weights_begin + w[1] * w[2] * 2048;
  scales_begin = scales, scales_end = scales + w[1] * w[2];
  return launch(ctas, 1, threads, shared, call);
}
"""


@functools.cache
def emulator(defines: tuple[tuple[str, int], ...]) -> Callable[..., int]:
    text = nvrtc.read_source("dense_wgmma.cu")
    marks = [text.index(f"// {'-' * 64} {name}") for name in ("instructions", "the kernel")]
    constants, kernel = text[text.index("#define MT") : marks[0]], text[marks[1] :]
    mine = "shared_memory[fibers[current].cta]"
    for name, at in (
        ("extern __shared__ char unaligned[];", f"char* unaligned = {mine} + 16;"),
        ("__shared__ __align__(8) u64 barriers[2 * STAGES];", f"u64* barriers = (u64*)({mine} + BARRIER_OFFSET);"),
    ):
        assert name in kernel
        kernel = kernel.replace(name, at)
    # The constants come between the headers: the first needs only the size of a cluster.
    sizes = dict(defines)
    sizes["CLUSTER"] = 1 if sizes["PARTIAL"] else sizes["SLICES"]
    machine = (EMULATION / "dense_wgmma.h").read_text()
    return compile_for_cpu(sizes, ("dense.h",), "#undef CLUSTER\n" + constants, machine, kernel, ENTRY)


class EmulatedKernel:
    """Stands for :class:`deepinfer.kernels.nvrtc.Kernel`."""

    late_copies = False
    """Copies run when somebody waits for them, instead of at once."""

    def __init__(self, source: str, entry: str, defines: dict[str, int], device: torch.device, *, shared_bytes: int):
        defines = defines | {"LATE": int(self.late_copies)}
        self.function, self.shared_bytes = emulator(tuple(defines.items())), shared_bytes

    def launch(self, grid, threads, arguments, *, shared_bytes, cluster, overlap) -> None:
        w_map, scales, x_map, out, rows = arguments
        assert grid[0] % cluster == 0
        assert grid[1:] == (1, 1)
        pointers = (ctypes.c_void_p(t.data_ptr()) for t in (scales, out))
        assert self.function(w_map, next(pointers), x_map, next(pointers), rows, grid[0], threads, shared_bytes) == 0


def emulated_map(x: Tensor, box_rows: int, box_columns: int) -> ctypes.Array:
    assert box_columns == 64
    return (ctypes.c_uint64 * 5)(x.data_ptr(), *x.shape, x.stride(0) * 2, box_rows)


def emulated_blocks(blocks: Tensor, box_rows: int) -> ctypes.Array:
    assert blocks.shape[2] == 2048
    return (ctypes.c_uint64 * 4)(blocks.data_ptr(), *blocks.shape[:2], box_rows)


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    monkeypatch.setattr(nvrtc, "load_kernel", EmulatedKernel)
    monkeypatch.setattr(nvrtc, "tensor_map", emulated_map)
    monkeypatch.setattr(nvrtc, "block_map", emulated_blocks)
    monkeypatch.setattr(nvrtc, "num_multiprocessors", lambda device: 1)  # so that CTAs have several pieces


def product(
    weight: tuple[Tensor, Tensor], slices: int, tile: Tile, groups: int = 1, partial: bool = False
) -> WgmmaProduct:
    packed, words = packing.pack_fp8(weight[0]), packing.pack_scales(weight[1])
    found = WgmmaProduct(packed, words, tuple(weight[0].shape), groups, slices, (tile,), partial)
    assert found.tiles == [tile]
    return found


def run(kernel: WgmmaProduct, x: Tensor, dtype: torch.dtype, quantize: bool = False, beside: bool = False) -> Tensor:
    out = torch.full((x.shape[0], kernel.rows_out), torch.nan, dtype=dtype)
    kernel(x, out, quantize, False, beside)
    return out


def run_partial(kernel: WgmmaProduct, x: Tensor) -> Tensor:
    sums = torch.full((kernel.slices, x.shape[0], kernel.rows_out), torch.nan)
    kernel(x, sums, False, False)
    return sums


def add_in_order(sums: Tensor) -> Tensor:
    return functools.reduce(torch.add, sums)


@needs_compiler
@pytest.mark.parametrize("late_copies", [False, True])
@pytest.mark.parametrize(
    ("shape", "rows", "slices", "tile"),
    [
        ((160, 320), 17, 2, Tile(16, 2, 1, 2, 1)),  # two row tiles
        ((288, 192), 1, 1, Tile(32, 2, 1, 2, 1)),
        ((416, 448), 33, 3, Tile(48, 3, 1, 3, 1)),
        ((416, 256), 33, 1, Tile(64, 5, 1, 2, 1)),
        ((260, 352), 130, 2, Tile(96, 4, 1, 3, 1)),
        ((260, 128), 130, 1, Tile(192, 2, 1, 2, 1)),
        ((320, 256), 130, 2, Tile(128, 2, 2, 2, 1)),
        ((416, 448), 33, 1, Tile(16, 2, 1, 3, 1)),  # CTAs with many pieces
        ((292, 2176), 40, 1, Tile(16, 2, 2, 3, 1)),  # more than 32 chunks
        ((416, 320), 70, 1, Tile(48, 4, 1, 2, 1)),
        ((160, 192), 390, 1, Tile(384, 2, 1, 2, 1)),
        ((160, 192), 200, 2, Tile(384, 2, 1, 2, 1)),
    ],
)
def test_exact_sums_give_the_reference_bits(shape, rows, slices, tile, late_copies, monkeypatch):
    monkeypatch.setattr(EmulatedKernel, "late_copies", late_copies)
    weight = integer_weight(*shape)
    x = integer_input(rows, shape[1] + 32)[:, : shape[1]]
    expected = x.double() @ codecs.dequantize_fp8_tiles(*weight, torch.float64).T
    kernel = product(weight, slices, tile)
    assert torch.equal(run(kernel, x, torch.float32), expected.float())
    assert torch.equal(run(kernel, x, torch.bfloat16), expected.bfloat16())
    if shape[0] % 32 == 0:
        rounded = nf.q8_round(expected.bfloat16()).bfloat16()
        assert torch.equal(run(kernel, x, torch.bfloat16, quantize=True), rounded)


@needs_compiler
@pytest.mark.parametrize(
    ("shape", "rows", "slices", "tile"),
    [
        ((160, 320), 1, 3, Tile(16, 2, 1, 2, 1)),
        ((64, 96), 1, 3, Tile(16, 2, 1, 2, 1)),  # a slice without columns
        ((64, 96), 40, 3, Tile(16, 2, 1, 2, 1)),  # many of them
        ((260, 448), 33, 3, Tile(32, 2, 1, 2, 1)),  # two row tiles
        ((260, 352), 130, 2, Tile(192, 2, 1, 2, 1)),
        ((160, 608), 33, 10, Tile(48, 2, 1, 2, 1)),  # more than a cluster could have
        ((288, 192), 130, 3, Tile(128, 4, 1, 2, 1)),
        ((160, 448), 270, 3, Tile(384, 2, 1, 2, 1)),
    ],
)
def test_sums_left_apart_add_up_to_the_same_bits(shape, rows, slices, tile):
    weight, x = random_weight(*shape), random_input(rows, shape[1])
    sums = run_partial(product(weight, slices, tile, partial=True), x)
    wide = codecs.dequantize_fp8_tiles(*weight, torch.float64)
    chunks = -(-shape[1] // 64)
    ends = [64 * (s * chunks // slices) for s in range(slices + 1)]
    for s, (first, end) in enumerate(itertools.pairwise(ends)):
        expected = x[:, first:end].double() @ wide[:, first:end].T
        magnitude = x[:, first:end].double().abs() @ wide[:, first:end].abs().T
        assert ((sums[s] - expected).abs() <= 2**-20 * magnitude).all(), s
    if slices <= 8:
        together = product(weight, slices, tile)
        assert torch.equal(run(together, x, torch.float32), add_in_order(sums))
        assert torch.equal(run(together, x, torch.bfloat16), add_in_order(sums).bfloat16())


@needs_compiler
def test_a_plan_leaves_sums_apart_where_it_says_so():
    weight = random_weight(160, 320)
    linear = Fp8Linear.__new__(Fp8Linear)
    linear.num_outputs, linear.num_inputs, linear.groups, linear._stored = 160, 320, 1, None
    tiles = (Tile(32, 2, 1, 2, 1), Tile(64, 2, 1, 2, 1))
    plan = (plans.Many(16, 2, tiles), plans.Many(40, 3, tiles, leaves_partial=True), plans.Many(64, 1, tiles))
    linear._use_packed(packing.pack_fp8(weight[0]), packing.pack_scales(weight[1]), plan)
    x = random_input(70, 320)
    for rows in (0, 1, 16, 41, 64, 70):
        assert linear.partial_sums(x[:rows]) is None
    for rows in (17, 33):
        sums = linear.partial_sums(x[:rows])
        assert sums is not None
        assert sums.shape == (3, rows, 160)
        assert torch.equal(add_in_order(sums).bfloat16(), linear(x[:rows]))


@needs_compiler
def test_groups_multiply_their_part_of_the_input():
    weight, x = integer_weight(512, 128), integer_input(3, 256)
    wide = codecs.dequantize_fp8_tiles(*weight, torch.float64).view(2, 256, 128)
    expected = torch.einsum("rgk,gnk->rgn", x.double().view(3, 2, 128), wide).flatten(1)
    tile = Tile(16, 2, 1, 2, 1)
    assert torch.equal(run(product(weight, 2, tile, groups=2), x, torch.float32), expected.float())
    sums = run_partial(product(weight, 2, tile, groups=2, partial=True), x)
    assert torch.equal(add_in_order(sums), expected.float())


@needs_compiler
def test_tiles_and_batches_do_not_change_a_row():
    weight, x = random_weight(352, 448), random_input(35, 448)
    tiles = [Tile(16, 2, 1, 2, 1), Tile(32, 3, 1, 2, 1), Tile(64, 2, 2, 3, 1), Tile(48, 5, 1, 2, 1)]
    outputs = [run(product(weight, 3, tile), x, torch.float32) for tile in tiles]
    assert all(torch.equal(output, outputs[0]) for output in outputs)
    alone = run(product(weight, 3, tiles[1]), x[4:5], torch.float32)
    assert torch.equal(alone, outputs[0][4:5])
    assert torch.equal(run(product(weight, 3, tiles[0]), x, torch.float32, beside=True), outputs[0])


@needs_compiler
def test_products_beside_the_kernel_before_wait_for_it_before_they_write():
    """Else the emulation fails; with several pieces for a CTA."""
    weight, x = random_weight(352, 448), random_input(35, 448)
    for tile in (Tile(16, 2, 1, 2, 1), Tile(16, 2, 2, 2, 1)):
        for dtype in (torch.float32, torch.bfloat16):
            kernel = product(weight, 1, tile)
            assert torch.equal(run(kernel, x, dtype, beside=True), run(kernel, x, dtype))
        apart = product(weight, 3, tile, partial=True)
        sums = torch.full((3, 35, 352), torch.nan)
        apart(x, sums, False, False, True)
        assert torch.equal(sums, run_partial(apart, x))


def test_rows_past_the_last_tile_take_the_cheapest_waves_of_ctas():
    packed = torch.empty(160, 8, 1)  # 40 tiles of 128 weight rows
    kernel = WgmmaProduct(packed, packed, (5120, 512), 1, 1, [Tile(n, 2, 1, 3, 1) for n in (128, 192)])
    chosen = {rows: kernel.tile(rows).rows for rows in (1, 128, 129, 192, 193, 384, 385, 512, 700)}
    assert chosen == {1: 128, 128: 128, 129: 192, 192: 192, 193: 128, 384: 128, 385: 192, 512: 192, 700: 128}
    assert kernel.num_pieces(kernel.tile(384), 384) == kernel.num_pieces(kernel.tile(512), 512) == 120


def test_ctas_stay_within_a_group_and_clusters_below_nine():
    packed = torch.empty(16, 8, 1)
    tiles = [Tile(64, warpgroups, 1, 3, 1) for warpgroups in (2, 3, 4)]
    kept = WgmmaProduct(packed, packed, (512, 512), 2, 2, tiles).tiles
    assert [tile.weight_rows for tile in kept] == [128, 256]
    assert WgmmaProduct(packed, packed, (512, 512), 1, 8, tiles).tiles == tiles
    assert not WgmmaProduct(packed, packed, (512, 512), 1, 9, tiles).tiles
    assert WgmmaProduct(packed, packed, (512, 512), 1, 9, tiles, partial=True).tiles == tiles
