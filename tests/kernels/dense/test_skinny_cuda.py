"""The few-row CUDA kernel of dense products, compiled for the CPU and emulated: bits, batches, both ways to read."""

from __future__ import annotations

import ctypes
import functools
import shutil
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from deepinfer.checkpoint import codecs
from deepinfer.kernels import nvrtc
from deepinfer.kernels.dense import packing
from deepinfer.kernels.dense.linear import Bf16Linear
from deepinfer.kernels.dense.skinny_cuda import Geometry, Pipeline, SkinnyProduct
from deepinfer.ops import number_formats as nf
from tests.kernels.dense.test_linear import integer_input, integer_weight, random_input, random_weight
from tests.kernels.emulation import compile_for_cpu

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
ENTRY = """
static void* arguments[6];
static void call() {
  dense_skinny((const char*)arguments[0], (const u32*)arguments[1], (const u16*)arguments[2], arguments[3],
               (int)(long)arguments[4], (long)arguments[5]);
}
extern "C" int emulate(void** values, int columns, int rows, int threads, int shared_bytes, long weight_bytes) {
  std::memcpy(arguments, values, sizeof arguments);
  weights_begin = (const char*)values[0], weights_end = weights_begin + weight_bytes;
  return launch(columns, rows, threads, shared_bytes, call);
}
"""


@functools.cache
def emulator(defines: tuple[tuple[str, int], ...]) -> Callable[..., int]:
    text = nvrtc.read_source("dense_skinny.cu")
    marks = [text.index(f"// {'-' * 64} {name}") for name in ("instructions", "the kernel")]
    constants, kernel = text[text.index("#define THREADS") : marks[0]], text[marks[1] :]
    mine = "shared_memory[fibers[current].cta]"
    kernel = kernel.replace("extern __shared__ __align__(16) char shared[];", f"char* shared = {mine};")
    kernel = kernel.replace(
        "__shared__ __align__(8) u64 barriers[WM * WK * DEPTH];", f"u64* barriers = (u64*)({mine} + BARRIER_OFFSET);"
    )
    return compile_for_cpu(dict(defines), ("dense.h", "dense_skinny.h"), constants, kernel, ENTRY)


class EmulatedKernel:
    """Stands for :class:`deepinfer.kernels.nvrtc.Kernel`."""

    def __init__(self, source: str, entry: str, defines: dict[str, int], device: torch.device, *, shared_bytes: int):
        self.function, self.shared_bytes = emulator(tuple(defines.items())), shared_bytes

    def launch(self, grid, threads, arguments, *, shared_bytes, cluster, overlap) -> None:
        weights, scales, x, out, rows, stride = arguments
        values = (ctypes.c_void_p * 6)(*(t.data_ptr() for t in (weights, scales, x, out)), rows, stride.value)
        num_bytes = ctypes.c_long(weights.numel() * weights.element_size())
        assert self.function(values, grid[0], grid[1], threads, shared_bytes, num_bytes) == 0


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    monkeypatch.setattr(nvrtc, "load_kernel", EmulatedKernel)


def product(weight: tuple[Tensor, Tensor], geometry: Geometry, pipeline: Pipeline, groups: int = 1) -> SkinnyProduct:
    packed, words = packing.pack_fp8(weight[0]), packing.pack_scales(weight[1])
    return SkinnyProduct(packed, words, tuple(weight[0].shape), groups, geometry, (pipeline,))


def run(kernel: SkinnyProduct, x: Tensor, dtype: torch.dtype, quantize: bool = False, beside: bool = False) -> Tensor:
    out = torch.full((x.shape[0], kernel.rows_out), torch.nan, dtype=dtype)
    kernel(x, out, quantize, False, beside)
    return out


@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize(
    ("shape", "rows", "geometry"),
    [((160, 352), 9, Geometry(3, 2, 2)), ((64, 640), 3, Geometry(1, 2, 3)), ((96, 192), 20, Geometry(2, 1, 1))],
)
def test_exact_sums_give_the_reference_bits(shape, rows, geometry, ring):
    weight = integer_weight(*shape)
    x = integer_input(rows, shape[1] + 32)[:, : shape[1]]
    expected = x.double() @ codecs.dequantize_fp8_tiles(*weight, torch.float64).T
    kernel = product(weight, geometry, Pipeline(1 if rows <= 8 else 2, 2, 1, ring=ring))
    assert torch.equal(run(kernel, x, torch.float32), expected.float())
    rounded = nf.q8_round(expected.bfloat16()).bfloat16()
    assert torch.equal(run(kernel, x, torch.bfloat16, quantize=True), rounded)


@pytest.mark.parametrize("ring", [False, True])
def test_groups_multiply_their_part_of_the_input(ring):
    weight, x = integer_weight(128, 128), integer_input(2, 256)
    wide = codecs.dequantize_fp8_tiles(*weight, torch.float64).view(2, 64, 128)
    expected = torch.einsum("rgk,gnk->rgn", x.double().view(2, 2, 128), wide).flatten(1)
    kernel = product(weight, Geometry(2, 1, 2), Pipeline(1, 2, 1, ring=ring), groups=2)
    assert torch.equal(run(kernel, x, torch.float32), expected.float())


def test_pipelines_and_batches_do_not_change_a_row():
    weight, x = random_weight(96, 448), random_input(11, 448)
    kinds = ((1, 3, False), (2, 2, False), (1, 2, True), (2, 4, True))
    pipelines = [Pipeline(tiles, depth, 1, ring=ring) for tiles, depth, ring in kinds]
    outputs = [run(product(weight, Geometry(3, 2, 2), pipeline), x, torch.float32) for pipeline in pipelines]
    assert all(torch.equal(output, outputs[0]) for output in outputs)
    alone = run(product(weight, Geometry(3, 2, 2), pipelines[2]), x[4:5], torch.float32)
    assert torch.equal(alone, outputs[0][4:5])
    beside = run(product(weight, Geometry(3, 2, 2), pipelines[2]), x, torch.float32, beside=True)
    assert torch.equal(beside, outputs[0])


@pytest.mark.parametrize("shape", [(96, 320), (20, 72)])
def test_passes_of_many_rows_have_the_bits_of_few(shape, monkeypatch):
    monkeypatch.setattr(nvrtc, "is_available", lambda _: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    weight, x = torch.randn(shape).bfloat16(), torch.randn(70, shape[1]).bfloat16()
    linear = Bf16Linear(weight)
    together = linear(x, dtype=torch.float32)
    exact = x.double() @ weight.double().T
    assert ((together - exact).abs() <= 2**-20 * (x.double().abs() @ weight.double().abs().T)).all()
    for first, end in ((0, 1), (40, 56), (30, 60)):
        assert torch.equal(linear(x[first:end], dtype=torch.float32), together[first:end])
        assert torch.equal(linear(x[first:end]), together[first:end].bfloat16())
