"""Dense products in FP8 with a scale per row: what the operands lose, the unpacking kernel, whole products."""

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
from deepinfer.kernels.dense import packing, row_scaled
from deepinfer.kernels.dense.linear import Fp8Linear, GroupedFp8Linear
from deepinfer.ops import number_formats as nf
from tests.kernels.dense.test_linear import exact, integer_input, integer_weight, on, random_weight
from tests.kernels.emulation import compile_for_cpu
from tests.kernels.test_nvrtc import compiler_is_here

BELOW = 2.0**-9
"""Spacing of the smallest codes."""


def spread_input(rows: int, k: int, seed: int = 3) -> Tensor:
    """Rows whose groups of 32 have magnitudes over many binades, as bf16."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.exp2(torch.randint(-30, 12, (rows, -(-k // 32)), generator=generator).float())
    return (torch.randn(rows, k, generator=generator) * sizes.repeat_interleave(32, 1)[:, :k]).bfloat16()


def values(codes: Tensor, scales: Tensor) -> Tensor:
    return codes.cpu().double() * scales.cpu().double()[:, None]


# ---------------------------------------------------------------- activations


@pytest.mark.gpu
@pytest.mark.parametrize("quantize", [False, True])
@pytest.mark.parametrize(("rows", "k"), [(1, 32), (3, 96), (5, 1280), (2, 2304)])
def test_codes_of_activations_are_theirs_down_to_the_spacing(rows, k, quantize, device):
    x = spread_input(rows, k)
    rounded = nf.q8_round(x).bfloat16()
    codes, scales = row_scaled.row_codes((x if quantize else rounded).to(device), quantize)
    assert codes.shape == (rows, k)
    scales = scales.cpu()
    largest = rounded.double().abs().amax(1).clamp_min(1e-4)
    assert torch.equal(scales.log2(), scales.log2().round()), "powers of two"
    assert (largest <= 448 * scales).all()
    assert (largest > 224 * scales).logical_or(largest == 1e-4).all(), "the smallest that fit"
    error = (values(codes, scales) - rounded.double()).abs()
    # From 2**-6 on there are as many bits as the model keeps; below, half of the spacing may be lost.
    kept = rounded.double().abs() >= 2.0**-6 * scales[:, None]
    assert not error[kept].any()
    assert (error <= BELOW / 2 * scales.double()[:, None]).all()
    assert (~kept).any() or k == 32


@pytest.mark.gpu
def test_inputs_that_are_not_rounded_get_the_nearest_code(device):
    x = torch.randn(4, 80, generator=torch.Generator().manual_seed(0)).bfloat16()
    codes, scales = (each.cpu() for each in row_scaled.row_codes(x.to(device)))
    assert torch.equal(codes.view(torch.uint8), codecs.e4m3_encode(x.float() / scales[:, None]))


@pytest.mark.gpu
def test_rows_of_zeros_and_strided_rows(device):
    whole = torch.cat((torch.zeros(2, 96), torch.full((2, 32), 7.0)), dim=1).bfloat16()
    codes, scales = row_scaled.row_codes(whole.to(device)[:, :96])
    assert not codes.cpu().float().any()
    assert torch.isfinite(scales).all()
    assert (scales > 0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("quantize", [False, True])
@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_spoils_its_own_row_only(bad, quantize, device):
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    clean = row_scaled.row_codes(x.to(device), quantize)
    x[1, 40] = bad
    codes, scales = row_scaled.row_codes(x.to(device), quantize)
    assert torch.isnan(codes.float()[1, 40])
    assert torch.isfinite(scales).all()
    for row in (0, 2):
        assert torch.equal(codes.view(torch.uint8)[row], clean[0].view(torch.uint8)[row])
        assert scales[row] == clean[1][row]


# ---------------------------------------------------------------- weights


def weights() -> dict[str, tuple[Tensor, Tensor]]:
    codes, scales = random_weight(96, 320)
    codes[32:64, 32:96], scales[1, 1:3] = 0x80, 134  # zeros, some negative, under the largest scale
    codes[64:96] = 0
    odd = random_weight(160, 48)
    wide = random_weight(64, 272)
    wide[1][0, 3] = 90  # far below its neighbours
    loose = random_weight(64, 96)
    loose[0][:32] &= 0x87  # subnormal codes
    loose[1][0] = 125
    return {"zeros": (codes, scales), "odd": odd, "wide": wide, "loose": loose}


@pytest.mark.parametrize("name", weights())
def test_codes_of_weights_are_theirs_down_to_the_spacing(name):
    weight = weights()[name]
    made = row_scaled.StoredRowScaledWeight(*weight)
    wide = codecs.dequantize_fp8_tiles(*weight, torch.float64)
    error = (values(made.codes(), made.row_scales) - wide).abs()
    scales = made.row_scales.double()[:, None]
    assert not error[wide.abs() >= 2.0**-6 * scales].any()
    assert (error <= BELOW / 2 * scales).all()
    largest = wide.abs().amax(1).view(-1, 32).amax(1).repeat_interleave(32)
    if name == "loose":  # the first rows could use a smaller scale still, which is out of the kernel's reach
        assert made.row_scales[0] == 2.0 ** (125 - 127 - 7)
        largest[:32] = 448 * scales[:32, 0]
    assert (largest <= 448 * scales[:, 0]).all()
    assert ((largest > 224 * scales[:, 0]) | (largest == 0)).all()


ENTRY = """
static void* arguments[5];
static void call() {
  wait_for_earlier_kernels();  // it is launched without overlap
  dense_unpack((const uint4*)arguments[0], (const u32*)arguments[1], (char*)arguments[2], (int)(long)arguments[3],
               (const u8*)arguments[4]);
}
extern "C" int emulate(void** values, int columns) {
  std::memcpy(arguments, values, sizeof arguments);
  return launch(columns, 1, 32 * WARPS, 32 * WARPS * ROW_WORDS * 4, call);
}
"""


@functools.cache
def emulator(defines: tuple[tuple[str, int], ...]) -> Callable[..., int]:
    text = nvrtc.read_source("dense_unpack.cu")
    marks = [text.index(f"// {'-' * 64} {name}") for name in ("instructions", "the kernel")]
    constants, kernel = text[text.index("#define NUM_CHUNKS") : marks[0]], text[marks[1] :]
    declared = "__shared__ __align__(16) u32 shared[WARPS][32][ROW_WORDS];"
    assert declared in kernel
    mine = "u32(*shared)[32][ROW_WORDS] = (u32(*)[32][ROW_WORDS])shared_memory[fibers[current].cta];"
    headers = ("dense.h", "dense_unpack.h")
    return compile_for_cpu({"CLUSTER": 1, **dict(defines)}, headers, constants, kernel.replace(declared, mine), ENTRY)


class EmulatedKernel:
    """Stands for :class:`deepinfer.kernels.nvrtc.Kernel`."""

    def __init__(self, source: str, entry: str, defines: dict[str, int], device: torch.device):
        self.function = emulator(tuple(defines.items()))

    def launch(self, grid, threads, arguments) -> None:
        packed, words, wide, num_blocks, row_bytes = arguments
        last = row_bytes.data_ptr() if isinstance(row_bytes, Tensor) else None
        pointers = (t.data_ptr() for t in (packed, words, wide))
        wide.view(torch.uint8).fill_(0x7F)
        assert self.function((ctypes.c_void_p * 5)(*pointers, num_blocks, last), grid[0]) == 0


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("name", weights())
def test_the_kernel_gives_the_codes_of_the_reference(name, monkeypatch):
    monkeypatch.setattr(nvrtc, "load_kernel", EmulatedKernel)
    codes, scales = weights()[name]
    reference = row_scaled.StoredRowScaledWeight(codes, scales)
    packed, words = packing.pack_fp8(codes), packing.pack_scales(scales)
    made = row_scaled.RowScaledWeight(packed, words, tuple(codes.shape))
    assert torch.equal(made.row_bytes, reference.row_bytes)
    assert torch.equal(made.row_scales, reference.row_scales)
    assert torch.equal(made.codes().view(torch.uint8), reference.codes().view(torch.uint8))


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("name", weights())
def test_the_kernel_widens_exactly(name, monkeypatch):
    monkeypatch.setattr(nvrtc, "load_kernel", EmulatedKernel)
    codes, scales = weights()[name]
    linear = Fp8Linear(codes, scales)
    linear._stored, linear._packed = None, (packing.pack_fp8(codes), packing.pack_scales(scales))
    assert torch.equal(linear.widen(), codecs.dequantize_fp8_tiles(codes, scales, torch.bfloat16))


@pytest.mark.skipif(not compiler_is_here(), reason="NVRTC is not installed")
@pytest.mark.parametrize("form", [0, 1])
def test_cuda_source_compiles(form, tmp_path, monkeypatch):
    monkeypatch.setattr(nvrtc, "_cache_directory", tmp_path)
    assert nvrtc.compile_cubin("dense_unpack.cu", {"K": 5120, "ROW_SCALED": form}, "sm_90a").startswith(b"\x7fELF")


# ---------------------------------------------------------------- products


@pytest.fixture
def many(monkeypatch) -> None:
    """Makes few rows and outputs count as many."""
    monkeypatch.setattr(row_scaled, "MIN_ROWS", 3)
    monkeypatch.setattr(row_scaled, "MIN_ROWS_OF_GROUPS", 3)
    monkeypatch.setattr(row_scaled, "MIN_OUTPUTS", 32)


@pytest.fixture
def products(monkeypatch) -> list[int]:
    """Rows of every product in FP8."""
    found: list[int] = []
    plain = row_scaled.product

    def counted(x: tuple[Tensor, Tensor], weight: tuple[Tensor, Tensor], out: Tensor) -> None:
        found.append(len(out))
        plain(x, weight, out)

    monkeypatch.setattr(row_scaled, "product", counted)
    return found


# The plan without steps: on a GPU, too, all rows are many.


@pytest.mark.gpu
@pytest.mark.usefixtures("many")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_exact_sums_give_the_reference_bits(dtype, products, device):
    weight, x = integer_weight(96, 320), integer_input(7, 320)
    linear = Fp8Linear(*on(device, weight), plan=(), is_fast=True)
    out = torch.full((7, 96), torch.nan, dtype=dtype, device=device)
    assert linear(x.to(device), out) is out
    assert torch.equal(out.cpu(), exact(x, weight).to(dtype))
    rounded = nf.q8_round(exact(x, weight).bfloat16()).bfloat16()
    assert torch.equal(linear(x.to(device), quantize_output=True).cpu(), rounded)
    assert products == [7, 7]


@pytest.mark.gpu
@pytest.mark.usefixtures("many")
def test_groups_multiply_their_part_of_the_input(products, device):
    groups, group_n, k, rows = 3, 64, 96, 5
    weight, x = integer_weight(groups * group_n, k), integer_input(rows, groups * k).view(rows, groups, k)
    wide = codecs.dequantize_fp8_tiles(*weight, torch.float64).view(groups, group_n, k)
    expected = torch.einsum("rgk,gnk->rgn", x.double(), wide).flatten(1).bfloat16()
    linear = GroupedFp8Linear(*on(device, weight), groups, plan=(), is_fast=True)
    assert torch.equal(linear(x.to(device)).cpu(), expected)
    assert products == [5] * groups


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_library_is_called_for_what_product_means(dtype, device):
    weight, x = integer_weight(64, 96), integer_input(7, 96)
    made, scales = row_scaled.StoredRowScaledWeight(*on(device, weight)), torch.exp2(torch.arange(64.0) % 5)
    whole = torch.full((7, 128), torch.nan, dtype=dtype, device=device)
    try:
        operand = made.codes(), made.row_scales * scales.to(device)
        row_scaled.library_product(row_scaled.row_codes(x.to(device)), operand, whole[:, 32:96])
    except (NotImplementedError, RuntimeError) as error:
        if device.type == "cuda":
            raise
        pytest.skip(f"this torch has no such product on a CPU: {error}")
    assert torch.equal(whole[:, 32:96].cpu(), (exact(x, weight) * scales).to(dtype))
    assert whole[:, :32].isnan().all()
    assert whole[:, 96:].isnan().all()


@pytest.mark.gpu
@pytest.mark.usefixtures("many")
def test_an_input_is_rounded_on_the_way(products, device):
    weight, x = random_weight(64, 96), torch.randn(4, 96, generator=torch.Generator().manual_seed(0)).bfloat16()
    linear = Fp8Linear(*on(device, weight), plan=(), is_fast=True)
    assert linear.can_quantize_input(4)
    rounded = nf.q8_round(x).bfloat16()
    assert torch.equal(linear(x.to(device), quantize_input=True), linear(rounded.to(device)))
    assert len(products) == 2


def test_several_groups_take_more_rows(device):
    linears = [Fp8Linear(*on(device, random_weight(3072, 96)), groups=groups, is_fast=True) for groups in (1, 3)]
    for rows, expected in ((512, [False, False]), (513, [True, False]), (1538, [True, False]), (1539, [True, True])):
        assert [linear.takes_codes(rows) for linear in linears] == expected
        assert not any(linear.takes_codes(rows, invariant=True) for linear in linears)


@pytest.mark.gpu
@pytest.mark.usefixtures("many")
@pytest.mark.parametrize("groups", [1, 3])
def test_codes_take_the_place_of_an_input(groups, products, device):
    weight, x = random_weight(groups * 32, 96), nf.q8_round(spread_input(5, groups * 96)).bfloat16().to(device)
    linear = Fp8Linear(*on(device, weight), groups=groups, plan=(), is_fast=True)
    given = row_scaled.RowCodes.of(x, groups)
    assert len(given) == 5
    assert all(scales.data_ptr() % 16 == 0 for scales in given.scales)
    expected = linear(x)
    out = torch.full_like(expected, torch.nan)
    assert linear.takes_codes(5)
    assert linear(given, out) is out
    assert torch.equal(out, expected)
    some = torch.tensor([4, 0, 2], device=device)
    assert torch.equal(linear(given.of_rows(some), quantize_output=True), linear(x[some], quantize_output=True))
    assert products == [5] * 2 * groups + [3] * 2 * groups
    with pytest.raises(AssertionError, match="not multiplied in FP8"):
        linear(given, invariant=True)


@pytest.mark.gpu
@pytest.mark.usefixtures("many")
def test_any_codes_stay_near_the_exact_product(products, device):
    weight, x = random_weight(64, 256), nf.q8_round(spread_input(9, 256)).bfloat16()
    linear = Fp8Linear(*on(device, weight), plan=(), is_fast=True)
    found = linear(x.to(device), dtype=torch.float32).cpu().double()
    size = x.double().abs().amax(1)[:, None] * codecs.dequantize_fp8_tiles(*weight, torch.float64).abs().amax(1)
    # Both operands are off by at most 2**-18.8 of the largest of their row; FP8 tensor cores keep 2**-13 of a sum.
    accumulator = 2.0**-13 * exact(x.abs(), (weight[0] & 0x7F, weight[1])) if device.type == "cuda" else 0.0
    assert ((found - exact(x, weight)).abs() <= 256 * 2.0**-17 * size + accumulator).all()
    assert products == [9]


@pytest.mark.gpu
@pytest.mark.usefixtures("many")
def test_few_rows_invariant_and_faithful_products_are_what_they_were(products, device):
    weight, x = on(device, random_weight(64, 96)), nf.q8_round(torch.randn(5, 96).bfloat16()).bfloat16().to(device)
    plain, fast = Fp8Linear(*weight, plan=()), Fp8Linear(*weight, plan=(), is_fast=True)
    assert torch.equal(fast(x[:2]), plain(x[:2]))
    assert torch.equal(fast(x, invariant=True), plain(x, invariant=True))
    assert not fast.can_quantize_input(5, invariant=True)
    assert not plain.can_quantize_input(5)
    fast.use_fast(False)
    assert torch.equal(fast(x), plain(x))
    assert products == []


@pytest.mark.parametrize(("shape", "groups", "taken"), [
    ((1792, 5120), 1, True), ((36864, 1280), 1, True), ((8192, 4096), 8, True), ((5120, 2304), 1, True),
    ((512, 5120), 1, False), ((4096, 4096), 8, False), ((5120, 40), 1, False),
])  # fmt: skip
def test_shapes_that_gain(shape, groups, taken):
    assert row_scaled.accepts(*shape, groups) == taken
