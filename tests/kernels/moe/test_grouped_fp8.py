"""The grouped product on FP8 operands: on a GPU where there is one, else the kernels' text emulated on the CPU."""

from __future__ import annotations

import ctypes
import functools
import shutil
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from deepinfer.kernels import nvrtc
from deepinfer.kernels.dense.row_scaled import RowCodes
from deepinfer.kernels.moe import grouped_fp8, packing
from deepinfer.kernels.moe.expert_blocks import order_pairs
from deepinfer.kernels.moe.grouped_fp8 import GroupedFp8Experts, GroupedProduct, Lines, Tile
from deepinfer.ops.number_formats import q4u_decode, q8_round
from tests.kernels.emulation import compile_for_cpu
from tests.kernels.moe.test_grouped_wgmma import LIMIT, MARK, chosen_experts, integer_matrices, integer_rows, used
from tests.kernels.test_nvrtc import compiler_is_here

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() and shutil.which("g++") is None, reason="needs a GPU or a C++ compiler"
)
ENTRY = {
    "moe_fp8": "moe_fp8(*(const Arguments*)v[0]);",
    "moe_fp8_gather": """void** w = v + GATHER;
#if GATHER == 2
    moe_fp8_gather((const uint4*)v[0], (const float*)v[1],
#else
    moe_fp8_gather((const uint4*)v[0],
#endif
        (const int*)w[0], (const float*)w[1], (char*)w[2], (float*)w[3], (float*)w[4], (int*)w[5], *(int*)w[6]);
    """,
    "moe_fp8_align": """moe_fp8_align((char*)v[0], (const u8*)v[1], (float*)v[2], (const int*)v[3], *(int*)v[4]);""",
}
SECTION = {"moe_fp8": "the product", "moe_fp8_gather": "gather", "moe_fp8_align": "one power for a row"}
MANY = (Tile(160, 2, 2, 2), Tile(80, 4, 1, 3))


@functools.cache
def emulator(source: str, entry: str, defines: tuple[tuple[str, int], ...]) -> Callable[..., int]:
    text = nvrtc.read_source(source)
    kernel = text[text.index(MARK + SECTION[entry]) :]
    if entry == "moe_fp8_gather":
        kernel = kernel[: kernel.index("#else\n" + MARK)]
    elif entry == "moe_fp8_align":
        kernel = kernel[: kernel.rindex("#endif")]
    kernel = kernel.replace("extern __shared__ char unaligned[];", "char* unaligned = shared_memory;")
    constants = text[text.index("#define ") : text.index(MARK + "instructions")]
    body = f"static void** v;\nstatic void call() {{ {ENTRY[entry]} }}\n"
    body += """extern "C" int emulate(void** values, const char** ranges, int grid, int threads, int shared_bytes) {
      v = values;
      for (int i = 0; i < 4; ++i) operands[i] = {ranges[2 * i], ranges[2 * i + 1]};
      return launch(grid, threads, shared_bytes, call);
    }"""
    return compile_for_cpu(dict(defines), ("grouped.h", "grouped_fp8.h"), constants, kernel, body)


class EmulatedKernel:
    """Stands for :class:`nvrtc.Kernel`."""

    def __init__(self, source: str, entry: str, defines: dict[str, int], device: torch.device, shared_bytes: int = 0):
        self.function, self.defines, self.entry = (
            emulator(source, entry, tuple(sorted(defines.items()))),
            defines,
            entry,
        )

    def launch(self, grid, threads, arguments, *, shared_bytes=0, overlap) -> None:
        kept = [a if isinstance(a, Tensor | ctypes.Structure) else ctypes.c_int(a) for a in arguments]
        addresses = [a.data_ptr() if isinstance(a, Tensor) else ctypes.addressof(a) for a in kept]
        values = (ctypes.c_void_p * len(addresses))(*addresses)
        ranges = (ctypes.c_void_p * 8)()
        if self.entry == "moe_fp8":
            g, d = arguments[0], self.defines
            sizes = {
                "weights": d["EXPERTS"] * d["ROW_TILES"] * d["K_TILES"] * packing.TILE_BYTES,
                "row_powers": d["EXPERTS"] * d["ROW_TILES"] * 64,
                "x": d["K_TILES"] // 2 * g.capacity * 128,
                "pair_powers": g.capacity * 4,
            }
            ranges[:] = [end for name, size in sizes.items() for end in (getattr(g, name), getattr(g, name) + size)]
        assert self.function(values, ranges, grid[0], threads, shared_bytes) == 0


@pytest.fixture(autouse=True)
def emulated(monkeypatch, device):
    if device.type != "cuda":
        monkeypatch.setattr(nvrtc, "load_kernel", EmulatedKernel)
        monkeypatch.setattr(nvrtc, "num_multiprocessors", lambda _: 3)


def columns() -> Tensor:
    """Column of each byte of a line without the swizzle."""
    byte = torch.arange(128)
    o, t, i = byte // 16 % 2, byte // 4 % 4, byte % 4
    return byte // 32 * 32 + 8 * t + 2 * torch.tensor([2, 0, 3, 1])[i] + o


def rows_of(codes: Tensor) -> Tensor:
    """float32 ``[capacity, K]`` of lines ``[K / 128, capacity, 128]``, without the rows' powers."""
    lines, capacity, _ = codes.shape
    pieces = torch.arange(8) ^ (torch.arange(capacity) % 8)[:, None]
    ordered = codes.cpu().view(lines, capacity, 8, 16).gather(2, pieces[None, :, :, None].expand(lines, -1, -1, 16))
    rows = torch.empty(lines, capacity, 128, dtype=torch.uint8)
    rows[..., columns()] = ordered.flatten(2)
    values = rows.view(torch.float8_e4m3fn).float()
    return values.transpose(0, 1).flatten(1).to(codes.device)


def power_of(rows: Tensor) -> Tensor:
    """``[rows, 1]``: the smallest power of two that keeps a row within 448."""
    return torch.exp2((rows.abs().amax(1, keepdim=True).float().clamp_min(1e-4) / 448).log2().ceil())


def one_power(rows: Tensor) -> Tensor:
    """Rows as e4m3 with one power of two."""
    power = power_of(rows)
    return (rows.float() / power).to(torch.float8_e4m3fn).float() * power


def poisoned_gather(x: Tensor | RowCodes, weights: Tensor, blocks) -> tuple[Lines, Tensor, Tensor]:
    counters = torch.full((2,), 9, dtype=torch.int32, device=weights.device)
    return *grouped_fp8.gather(x, weights, blocks, counters), counters


@pytest.mark.parametrize(("hidden", "spread"), [(128, 0), (640, 0), (640, 9)])
def test_gathered_lines_are_the_rows_of_the_pairs(hidden, spread, device):
    rows, top = 21, 3
    generator = torch.Generator().manual_seed(hidden)
    x = torch.randn(rows, hidden, generator=generator) * torch.exp2(
        spread * torch.randn(rows, hidden, generator=generator)
    )
    x = q8_round(x.bfloat16()).bfloat16().to(device)
    x[3] = 0
    weights = torch.rand(rows, top, device=device)
    blocks = order_pairs(chosen_experts([0, 1, 20, 9], rows, top, device), 4, 8)
    lines, ordered_weights, counters = poisoned_gather(x, weights, blocks)
    places, pairs = used(blocks)
    found = rows_of(lines.codes)[places] * lines.powers[places, None]
    assert torch.equal(found, one_power(x)[pairs // top])
    if not spread:
        assert torch.equal(found, x[pairs // top].float())
    assert torch.equal(ordered_weights[places], weights.flatten()[pairs])
    assert counters.tolist() == [0, 0]


@pytest.mark.parametrize("hidden", [128, 640])
def test_codes_are_gathered_as_their_values_are(hidden, device):
    rows, top = 21, 3
    x = q8_round(torch.randn(rows, hidden).bfloat16()).bfloat16().to(device)
    x[3], x[4, 5] = 0, torch.nan
    weights = torch.rand(rows, top, device=device)
    blocks = order_pairs(chosen_experts([0, 1, 20, 9], rows, top, device), 4, 8)
    expected, expected_weights, _ = poisoned_gather(x, weights, blocks)
    found, ordered_weights, counters = poisoned_gather(RowCodes.of(x), weights, blocks)
    places, _ = used(blocks)
    assert torch.equal(found.codes[:, places], expected.codes[:, places])
    assert torch.equal(found.powers[places], expected.powers[places])
    assert torch.equal(ordered_weights[places], expected_weights[places])
    assert counters.tolist() == [0, 0]


def test_aligned_rows_have_one_power(device):
    capacity, lines = 32, 3
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (lines, capacity, 128), generator=generator, dtype=torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 1
    exponents = torch.randint(90, 128, (4 * lines, capacity), generator=generator, dtype=torch.uint8)
    blocks = order_pairs(torch.zeros(19, 1, dtype=torch.int32, device=device), 1, 8)  # 24 places, room for 32
    before, aligned = codes.clone(), codes.to(device)
    found = grouped_fp8.align(aligned, exponents.to(device), blocks)
    assert torch.equal(aligned[:, 24:].cpu(), before[:, 24:])
    largest = exponents.amax(0)
    powers = torch.exp2(largest.float() - 128)
    assert torch.equal(found.powers[:24].cpu(), powers[:24])
    down = torch.exp2(exponents.float() - largest.float()).T.repeat_interleave(32, 1)
    expected = (rows_of(before) * down).to(torch.float8_e4m3fn).float()
    assert torch.equal(rows_of(aligned)[:24].cpu(), expected[:24])


@pytest.mark.parametrize("low", [117, 106, 20])
def test_row_powers_are_below_the_largest_scale(low):
    scales = torch.randint(low, 118, (2, 128, 8), generator=torch.Generator().manual_seed(low)).to(torch.uint8)
    packed = packing.pack(torch.zeros(2, 128, 128, dtype=torch.uint8), scales)
    expected = (scales.amax(2).int() + 126 - 12).view(2, 2, 4, 2, 8).view(2, 128)
    assert torch.equal(grouped_fp8.row_powers(packed).int(), expected)


def product_of(
    codes: Tensor, scales: Tensor, x: Tensor, experts: Tensor, swiglu: bool, tile: Tile, block: int, ctas: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Used rows of the result, the exact products in float64 and the route weights of these rows' pairs."""
    top, device = experts.shape[1], x.device
    weights = torch.rand(experts.shape, generator=torch.Generator().manual_seed(0)).to(device)
    blocks = order_pairs(experts, codes.shape[0], block)
    lines, ordered_weights, counters = poisoned_gather(x, weights, blocks)
    parts = (codes, scales)
    packed = packing.pack(*(packing.pair_gate_and_up(p) for p in parts) if swiglu else parts)
    n, capacity = codes.shape[1], blocks.ordered.shape[0]
    product = GroupedProduct(packed, swiglu, LIMIT)
    assert product.accepts(tile)
    places, pairs = used(blocks)
    if swiglu:
        out = torch.full((n // 256, capacity, 128), 0x7F, dtype=torch.uint8, device=device)
        exponents = torch.zeros(n // 64, capacity, dtype=torch.uint8, device=device)
        product(lines, ordered_weights, out, exponents, blocks, counters[:1], tile, ctas)
        aligned = grouped_fp8.align(out, exponents, blocks)
        found = rows_of(aligned.codes)[places] * aligned.powers[places, None]
    else:
        out = torch.full((capacity, n), torch.nan, dtype=torch.bfloat16, device=device)
        product(lines, ordered_weights, out, None, blocks, counters[:1], tile, ctas)
        found = out[places]
    wide = q4u_decode(codes, scales).double()[experts.flatten()[pairs].long()]
    return found, torch.einsum("pk,pnk->pn", x[pairs // top].double(), wide), weights.flatten()[pairs]


COUNTS = [0, 1, 33, 170, 0, 16, 63, 129]


@pytest.mark.parametrize("tile", [*MANY, Tile(48, 2, 1, 4), Tile(80, 3, 2, 2)])
def test_down_has_the_bits_of_exact_sums(tile, device):
    """Row tiles that are no multiple of a CTA's, experts in one and several parts, and -1."""
    rows = 210
    codes, scales = integer_matrices(len(COUNTS), 320, 256, device)
    x, experts = integer_rows(rows, 256, device), chosen_experts(COUNTS, rows, 3, device)
    found, exact, _ = product_of(codes, scales, x, experts, False, tile, 16, 2)
    assert len(found) == sum(COUNTS)
    assert torch.equal(found, exact.bfloat16())


def test_scales_of_a_row_keep_what_is_near_the_largest(device):
    """Every scale byte from the largest to 2**11 below; further below the error is that of the largest's last bits."""
    generator = torch.Generator().manual_seed(3)
    codes = torch.randint(0, 256, (1, 64, 256), generator=generator).to(torch.uint8).to(device)
    x, experts = integer_rows(17, 512, device), torch.zeros(17, 1, dtype=torch.int32, device=device)
    near = torch.randint(110, 122, (1, 64, 16), generator=generator).to(torch.uint8).to(device)
    found, exact, _ = product_of(codes, near, x, experts, False, MANY[0], 16, 1)
    if device.type == "cuda":  # the FP8 tensor cores' sums have fewer bits
        assert ((found.double() - exact).abs() <= exact.abs() * 2.0**-8 + exact.abs().mean() * 2.0**-10).all()
    else:
        assert torch.equal(found, exact.bfloat16())
    far = near.clone()
    far[..., 5], far[..., 6] = 0, 3
    far[..., 7] = 121
    found, exact, _ = product_of(codes, far, x, experts, False, MANY[0], 16, 1)
    rest = x.double().abs()[:, 160:224].sum(1, keepdim=True) * 6 * 2.0 ** (121 - 127 - 11)
    rest += exact.abs().mean() * 2.0**-10 * (device.type == "cuda")
    assert ((found.double() - exact).abs() <= rest + exact.abs() * 2.0**-8).all()


@pytest.mark.parametrize("block", [8, 16])
@pytest.mark.parametrize("tile", MANY)
def test_gate_up_rounds_the_weighted_activation(tile, block, device):
    codes, scales = integer_matrices(3, 512, 128, device)
    counts = [41, 0, 130]
    x, experts = integer_rows(150, 128, device) / 64, chosen_experts(counts, 150, 2, device)
    found, exact, weights = product_of(codes, scales, x, experts, True, tile, block, 2)
    gate, up = exact.float().chunk(2, 1)
    expected = torch.nn.functional.silu(gate.clamp_max(LIMIT)) * up.clamp(-LIMIT, LIMIT) * weights[:, None]
    # The exponential differs by units in the last place, which moves a value across a rounding boundary now and then.
    assert (found != one_power(q8_round(expected))).float().mean() < 2e-3


def test_every_width_gives_the_same_bits(device):
    """Pairs with any sums: as many as fit into a CTA, then a few of them."""
    codes, scales = integer_matrices(1, 128, 128, device)
    x = q8_round(torch.randn(160, 128, generator=torch.Generator().manual_seed(0)).bfloat16()).bfloat16().to(device)
    results = []
    for count in range(160, 0, -16):
        experts = torch.zeros(count, 1, dtype=torch.int32, device=device)
        results.append(product_of(codes, scales, x[:count], experts, False, MANY[0], 16, 1)[0])
    assert all(torch.equal(result, results[0][: len(result)]) for result in results)


@pytest.mark.parametrize("few_pairs", [0, 100])
def test_experts_agree_with_float64(few_pairs, device):
    num_experts, hidden, width, rows, top = 4, 256, 128, 23, 2
    (codes, scales), (down_codes, down_scales) = (
        integer_matrices(num_experts, 2 * width, hidden, device),
        integer_matrices(num_experts, hidden, width, device),
    )
    generator = torch.Generator().manual_seed(1)
    x = (q8_round(torch.randn(rows, hidden, generator=generator).bfloat16()) / 64).bfloat16().to(device)
    experts = chosen_experts([20, 0, 3, 16], rows, top, device)
    weights = torch.rand(rows, top, generator=generator).to(device)
    packed = packing.pack(packing.pair_gate_and_up(codes), packing.pair_gate_and_up(scales))
    tiles = {"many": MANY[0], "few": MANY[1], "few_pairs": few_pairs}
    engine = GroupedFp8Experts(packed, packing.pack(down_codes, down_scales), LIMIT, **tiles)
    values, place = engine.forward(x, experts, weights)
    flat = experts.flatten().long()
    there = flat >= 0
    assert torch.equal(place >= 0, there)
    inputs = one_power(x).double().repeat_interleave(top, 0)[there]
    gate, up = torch.einsum("pk,pnk->pn", inputs, q4u_decode(codes, scales).double()[flat[there]]).chunk(2, 1)
    inner = torch.nn.functional.silu(gate.clamp_max(LIMIT)) * up.clamp(-LIMIT, LIMIT) * weights.flatten()[there, None]
    inner = one_power(q8_round(inner.float())).double()
    exact = torch.einsum("pk,pnk->pn", inner, q4u_decode(down_codes, down_scales).double()[flat[there]])
    error = (values[place[there].long()].double() - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert error < 3e-3  # of exact operands; the sums of an emulation are float32


@pytest.mark.parametrize("tile", [grouped_fp8.FEW, grouped_fp8.MANY])
def test_tiles_fit_the_released_sizes(tile):
    for n, k, swiglu in ((4608, 5120, True), (5120, 2304, False)):
        product = GroupedProduct(torch.empty(384, k // 64, n // 64, packing.TILE_BYTES, device="meta"), swiglu, LIMIT)
        assert product.accepts(tile)
        assert tile.pairs % grouped_fp8.BLOCK == 0


@pytest.mark.skipif(not compiler_is_here(), reason="NVRTC is not installed")
def test_cuda_sources_compile(tmp_path, monkeypatch):
    monkeypatch.setattr(nvrtc, "_cache_directory", tmp_path)
    wanted = [("moe_fp8_rows.cu", {"GATHER": 1, "LINES": 5, "TOP": 6})]
    wanted.append(("moe_fp8_rows.cu", {"GATHER": 0, "LINES": 5, "BLOCK": 16, "EXPERTS": 8}))
    for swiglu in (False, True):
        product = GroupedProduct(torch.empty(8, 4, 8, packing.TILE_BYTES, device="meta"), swiglu, LIMIT)
        wanted += [("moe_fp8.cu", product.defines(tile, 16)) for tile in (grouped_fp8.FEW, grouped_fp8.MANY)]
    for source, defines in wanted:
        assert nvrtc.compile_cubin(source, defines, "sm_90a").startswith(b"\x7fELF")
