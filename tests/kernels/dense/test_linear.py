"""Dense products: the Triton path against float64, the packed layout against the tensor-core operand it stands for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deepinfer.checkpoint import codecs
from deepinfer.kernels import nvrtc
from deepinfer.kernels.dense import linear_triton, packing, plans, skinny_cuda, wgmma_cuda
from deepinfer.kernels.dense.linear import BESIDE_ROWS, Bf16Linear, Fp8Linear, GroupedFp8Linear, stack_fp8
from deepinfer.kernels.dense.wgmma_cuda import Tile
from deepinfer.kernels.moe.experts_hopper import PLANS, row_limits
from deepinfer.ops import number_formats as nf
from deepinfer.worker.warm_up import typical_lengths
from tests.kernels.test_nvrtc import compiler_is_here

pytestmark = pytest.mark.gpu

SHAPES = [(64, 96), (128, 256), (160, 64), (96, 320)]
ROWS = (1, 3, 17, 70)


def random_weight(n: int, k: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Every code but NaN, subnormals among them, and scales over several binades."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 254, (n, k), generator=generator)
    codes = (codes + (codes >= 0x7F)).to(torch.uint8)  # skips 0x7F; 0xFF is out of reach
    return codes, torch.randint(114, 124, (-(-n // 32), -(-k // 32)), generator=generator).to(torch.uint8)


def integer_weight(n: int, k: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Small integers, for which every sum in float32 is exact."""
    generator = torch.Generator().manual_seed(seed)
    codes = codecs.e4m3_encode(torch.randint(-8, 9, (n, k), generator=generator).float())
    return codes, torch.randint(126, 130, (-(-n // 32), -(-k // 32)), generator=generator).to(torch.uint8)


def integer_input(rows: int, k: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, (rows, k), generator=generator).to(torch.bfloat16)


def random_input(rows: int, k: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return nf.q8_round(torch.randn(rows, k, generator=generator).bfloat16()).bfloat16()


def exact(x: Tensor, weight: tuple[Tensor, Tensor]) -> Tensor:
    return x.double().cpu() @ codecs.dequantize_fp8_tiles(*weight, torch.float64).T


def on(device: torch.device, weight: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return weight[0].to(device), weight[1].to(device)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", ROWS)
def test_exact_sums_give_the_reference_bits(shape, rows, device):
    weight, x = integer_weight(*shape), integer_input(rows, shape[1])
    linear = Fp8Linear(*on(device, weight))
    expected = exact(x, weight)
    assert torch.equal(linear(x.to(device)).cpu(), expected.bfloat16())
    assert torch.equal(linear(x.to(device), dtype=torch.float32).cpu(), expected.float())
    rounded = nf.q8_round(expected.bfloat16()).bfloat16()
    assert torch.equal(linear(x.to(device), quantize_output=True).cpu(), rounded)


@pytest.mark.parametrize("shape", SHAPES)
def test_any_codes_stay_within_rounding(shape, device):
    weight, x = random_weight(*shape), random_input(9, shape[1])
    product = Fp8Linear(*on(device, weight))(x.to(device), dtype=torch.float32).cpu().double()
    magnitude = exact(x.abs(), (weight[0] & 0x7F, weight[1]))
    # float32 sums: each of at most k additions errs by 2**-24 of a partial sum (tensor cores truncate: 2**-22)
    assert ((product - exact(x, weight)).abs() <= shape[1] * 2**-22 * magnitude).all()


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("group_n", [32, 64, 96])
def test_groups_multiply_their_part_of_the_input(rows, group_n, device):
    groups, k = 3, 64
    weight, x = integer_weight(groups * group_n, k), integer_input(rows, groups * k).view(rows, groups, k)
    linear = GroupedFp8Linear(*on(device, weight), groups)
    wide = codecs.dequantize_fp8_tiles(*weight, torch.float64).view(groups, group_n, k)
    expected = torch.einsum("rgk,gnk->rgn", x.double(), wide).flatten(1).bfloat16()
    assert torch.equal(linear(x.to(device)).cpu(), expected)
    rounded = nf.q8_round(expected).bfloat16()
    assert torch.equal(linear(x.to(device), quantize_output=True).cpu(), rounded)


def test_stacked_matrices_give_the_outputs_side_by_side(device):
    first, second = integer_weight(64, 128, 2), integer_weight(96, 128, 3)
    x = integer_input(4, 128)
    both = Fp8Linear(*on(device, stack_fp8([first, second])))(x.to(device)).cpu()
    assert torch.equal(both, torch.cat([exact(x, first), exact(x, second)], dim=1).bfloat16())


def test_strided_input_and_given_output(device):
    weight = integer_weight(64, 96)
    whole = integer_input(5, 96 + 32).to(device)
    out = torch.full((5, 64), torch.nan, dtype=torch.bfloat16, device=device)
    assert Fp8Linear(*on(device, weight))(whole[:, :96], out) is out
    assert torch.equal(out.cpu(), exact(whole[:, :96], weight).bfloat16())


def test_a_row_alone_has_the_bits_it_has_in_a_batch(device):
    weight, x = random_weight(96, 320), random_input(70, 320).to(device)
    linear = Fp8Linear(*on(device, weight))
    whole = linear(x, dtype=torch.float32, invariant=True)
    for rows in (1, 7, 33):
        assert torch.equal(linear(x[:rows], dtype=torch.float32, invariant=True), whole[:rows])


@pytest.mark.parametrize("shape", [(128, 256), (4, 96), (100, 64)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bf16_weights(shape, dtype, device):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(-8, 9, shape, generator=generator).bfloat16()
    for rows in (1, 9, 40):
        x = integer_input(rows, shape[1])
        got = Bf16Linear(weight.to(device))(x.to(device), dtype=dtype).cpu()
        assert torch.equal(got, (x.double() @ weight.double().T).to(dtype))


def test_q8_in_place(device):
    x = torch.randn(7, 96, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(linear_triton.q8_round_(x.to(device)).cpu(), nf.q8_round(x).bfloat16())


@pytest.mark.parametrize("shape", SHAPES)
def test_widened_weights_are_exact(shape, device):
    weight = random_weight(*shape)
    wide = Fp8Linear(*on(device, weight)).widen().cpu()
    assert torch.equal(wide, codecs.dequantize_fp8_tiles(*weight, torch.bfloat16))


# The packed layout, read as the kernel reads it.


def operand(registers: Tensor) -> Tensor:
    """Matrix ``[..., 16, 16]`` that ``mma.m16n8k16`` sees in its A registers ``[..., lane, 4, 2]`` (PTX ISA)."""
    lanes = registers.reshape(*registers.shape[:-3], 8, 4, 2, 2, 2)  # [g, t, high columns, half of the rows, odd]
    return lanes.permute(*range(registers.dim() - 3), -2, -5, -3, -4, -1).reshape(*registers.shape[:-3], 16, 16)


def decode_pair(word: Tensor, scale: Tensor) -> Tensor:
    """``decode_pair`` of the kernel: int64 words with two codes in high bytes to bf16 ``[..., 2]``."""
    bits = ((word >> 4) & 0x07F007F0) | (word & 0x80008000)
    halves = torch.stack((bits & 0xFFFF, bits >> 16), dim=-1)
    return halves.to(torch.uint16).view(torch.bfloat16) * scale


@pytest.mark.parametrize("shape", SHAPES)
def test_packed_fp8_is_the_tensor_core_operand(shape):
    codes, scales = random_weight(*shape)
    packed, factors = packing.pack_fp8(codes), packing.pack_scales(scales)
    blocks, chunks, _ = packed.shape
    words = packed.view(torch.int32).view(blocks, chunks, 2, 2, 32, 4).long() & 0xFFFFFFFF  # [m, half, lane, q]
    halves = torch.stack((factors & 0xFFFF, factors >> 16), dim=-1).to(torch.uint16).view(torch.bfloat16)
    scale = halves.repeat_interleave(2, -1)[:, :, None, None, None, :, None]  # per q
    high, low = decode_pair(words, scale), decode_pair((words << 8) & 0xFFFFFFFF, scale)
    # registers: a0, a1 = columns 2t of rows g and g + 8; a2, a3 = columns 2t + 8
    registers = torch.stack((high[:, :, :, 0], high[:, :, :, 1], low[:, :, :, 0], low[:, :, :, 1]), dim=5)
    tiles = operand(registers.permute(0, 1, 2, 4, 3, 5, 6))  # [blocks, chunks, m, q, 16, 16]
    wide = tiles.permute(0, 2, 4, 1, 3, 5).reshape(blocks * 32, chunks * 64)
    n, k = shape
    assert torch.equal(wide[:n, :k], codecs.dequantize_fp8_tiles(codes, scales, torch.bfloat16))
    assert not wide[:, k:].any()


@pytest.mark.parametrize("shape", [(64, 96), (4, 32), (100, 64)])
def test_packed_bf16_is_the_tensor_core_operand(shape):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    packed = packing.pack_bf16(weight)
    blocks, chunks, _ = packed.shape
    tiles = operand(packed.view(blocks, chunks, 2, 2, 32, 4, 2))  # [blocks, chunks, m, q, 16, 16]
    wide = tiles.permute(0, 2, 4, 1, 3, 5).reshape(blocks * 32, chunks * 32)
    assert torch.equal(wide[: shape[0], : shape[1]], weight)


def test_packing_inverts():
    codes, _ = random_weight(100, 96)
    assert torch.equal(packing.unpack_fp8(packing.pack_fp8(codes), 100, 96), codes)


def test_a_scale_that_the_packed_format_lacks_is_refused():
    with pytest.raises(ValueError, match=r"2\*\*8"):
        packing.pack_scales(torch.tensor([[135, 120]], dtype=torch.uint8))


def test_zero_scale_bytes_pack():
    word = int(packing.pack_scales(torch.tensor([[0, 134]], dtype=torch.uint8)))
    low, high = torch.tensor([word & 0xFFFF, word >> 16]).to(torch.uint16).view(torch.bfloat16).double().tolist()
    assert (low, high) == (2.0**-7, 2.0**127)


RELEASED = {
    "wq_a + wkv": (1792, 5120, 1), "wq_b": (32768, 1280, 1), "wq_b + index": (36864, 1280, 1),
    "wo_a": (8192, 4096, 8), "wo_b": (5120, 8192, 1), "gate_up": (4608, 5120, 1), "down": (5120, 2304, 1),
    "main_proj": (5120, 15360, 1), "engram": (25600, 6144, 1),
}  # fmt: skip


@pytest.mark.parametrize("name", RELEASED)
def test_geometry_covers_every_block_once_and_fits(name):
    n, k, groups = RELEASED[name]
    chunks, blocks = -(-k // 64), n // 32
    g = skinny_cuda.choose_geometry(blocks, chunks, blocks // groups, 24)
    assert blocks // groups % g.row_warps == 0 or groups == 1
    assert 128 <= -(-blocks // g.row_warps) * g.cluster <= 2048, g
    covered: list[int] = []
    for rank in range(g.cluster):
        first, end = rank * chunks // g.cluster, (rank + 1) * chunks // g.cluster
        for warp in range(g.k_warps):
            begin, stop = (w * (end - first) // g.k_warps for w in (warp, warp + 1))
            covered += range(first + begin, first + stop)
    assert covered == list(range(chunks))


@pytest.mark.parametrize("name", RELEASED)
def test_shares_of_the_ring_are_nearly_equal(name):
    n, k, groups = RELEASED[name]
    chunks, blocks = -(-k // 64), n // 32
    best = skinny_cuda.equal_shares(blocks, chunks, blocks // groups)[0]
    assert 110 <= -(-blocks // best.row_warps) * best.cluster <= 132
    share = best.row_warps * -(-chunks // best.cluster)
    assert share * 132 <= 1.2 * blocks * chunks


@pytest.mark.parametrize("name", RELEASED)
def test_plans_rise_and_fit(name):
    n, k, groups = RELEASED[name]
    packed = torch.empty(n // 32, -(-k // 64), 1)
    limits = []
    for step in plans.plan(n, k, groups):
        limits.append(step.max_rows)
        if isinstance(step, plans.Few):
            few = skinny_cuda.SkinnyProduct(packed, packed, (n, k), groups, step.geometry, step.pipelines)
            assert list(step.pipelines) == few.pipelines or step.geometry is None
            # several row passes read the weights again: the step ends with its largest tile
            assert step.max_rows <= 8 * few.pipelines[-1].row_tiles
            assert (n // 32 // groups) % few.geometry.row_warps == 0 or groups == 1
        else:
            many = wgmma_cuda.WgmmaProduct(packed, packed, (n, k), groups, step.slices, step.tiles)
            assert many.tiles == list(step.tiles)
            # where sums stay apart, all CTAs run at once
            assert not step.leaves_partial or -(-n // step.tiles[-1].weight_rows) * many.slices <= 132
            for tile in many.tiles:
                assert many.shared_bytes(tile) * tile.min_ctas <= 227 * 1024, tile
                assert groups == 1 or n // groups % tile.weight_rows == 0
    assert limits == sorted(set(limits))


@pytest.mark.parametrize(("experts", "selected"), [(384, 6), (256, 6), (256, 8), (128, 8), (128, 3)])
@pytest.mark.parametrize("name", RELEASED)
def test_a_start_meets_the_kernels_of_every_number_of_rows(name, experts, selected):
    """Decoding of one sequence and prompts of typical lengths launch them all: no request waits for a compiler."""
    n, k, groups = RELEASED[name]
    packed = torch.empty(n // 32, -(-k // 64), 1)
    steps = plans.plan(n, k, groups)

    def kernels(rows: int) -> list[tuple[int, object]]:
        step = next((step for step in steps if rows <= step.max_rows), None)
        if step is None:
            return []
        if isinstance(step, plans.Few):
            few = skinny_cuda.SkinnyProduct(packed, packed, (n, k), groups, step.geometry, step.pipelines)
            return [(step.max_rows, next((p for p in few.pipelines if rows <= 8 * p.row_tiles), few.pipelines[-1]))]
        partial = step.leaves_partial
        many = wgmma_cuda.WgmmaProduct(packed, packed, (n, k), groups, step.slices, step.tiles, partial)
        return [(step.max_rows, many.tile(rows))]

    def is_beside(rows: int) -> bool:  # the routed experts' kernel for few pairs
        most = max(max(pairs, experts * per_expert) for pairs, per_expert, *_ in PLANS)
        return name == "down" and BESIDE_ROWS < rows <= most / selected

    lengths = (1, *typical_lengths(8192, row_limits(experts, selected)))
    met = {(kernel, is_beside(rows)) for rows in lengths for kernel in kernels(rows)}
    assert {(kernel, is_beside(rows)) for rows in range(1, 2060) for kernel in kernels(rows)} <= met


@pytest.mark.skipif(not compiler_is_here(), reason="NVRTC is not installed")
@pytest.mark.parametrize(
    "changes", [{}, {"FP8": 0}, {"OUT_F32": 1}, {"CLUSTER": 1}, {"RING": 1, "EARLY": 1}, {"BESIDE": 1}]
)
def test_cuda_source_compiles(changes, tmp_path, monkeypatch):
    monkeypatch.setattr(nvrtc, "_cache_directory", tmp_path)
    defines = {
        "N": 64, "OUT_N": 64, "K": 256, "WM": 2, "WK": 2, "CLUSTER": 2, "NT": 1, "DEPTH": 2, "MIN_CTAS": 4,
        "LOAD_HINT": 0, "RING": 0, "EARLY": 0, "FP8": 1, "GROUP_N": 64, "OUT_F32": 0, "QUANTIZE": 0, "BESIDE": 0,
    }  # fmt: skip
    assert nvrtc.compile_cubin("dense_skinny.cu", defines | changes, "sm_90a").startswith(b"\x7fELF")


@pytest.mark.parametrize("name", RELEASED)
def test_clusters_fill_the_gpu_and_tiles_fit(name):
    n, k, groups = RELEASED[name]
    assert wgmma_cuda.WgmmaProduct.accepts((n, k), groups)
    packed = torch.empty(n // 32, -(-k // 64), 1)
    product = wgmma_cuda.WgmmaProduct(packed, packed, (n, k), groups)
    assert product.tiles == list(wgmma_cuda.TILES)
    assert 110 <= n // 128 * product.slices <= 264 or product.slices == 1
    for tile in product.tiles:
        assert product.shared_bytes(tile) * tile.min_ctas <= 227 * 1024, tile
        assert n // groups % tile.weight_rows == 0


@pytest.mark.skipif(not compiler_is_here(), reason="NVRTC is not installed")
@pytest.mark.parametrize(
    "tile",
    [
        wgmma_cuda.TILES[0],
        wgmma_cuda.TILES[-1],
        Tile(64, 5, 1, 4, 1),
        Tile(128, 4, 1, 5, 1),
        Tile(96, 2, 2, 4, 1),
        Tile(384, 2, 1, 4, 1),
    ],
)
@pytest.mark.parametrize(("slices", "partial"), [(3, False), (3, True), (1, False)])
def test_wgmma_source_compiles(tile, slices, partial, tmp_path, monkeypatch):
    monkeypatch.setattr(nvrtc, "_cache_directory", tmp_path)
    packed = torch.empty(8, 12, 1)
    product = wgmma_cuda.WgmmaProduct(packed, packed, (256, 768), 1, slices, partial=partial)
    defines = product.defines(tile, partial, slices > 1 and not partial, beside=partial)
    assert nvrtc.compile_cubin("dense_wgmma.cu", defines, "sm_90a").startswith(b"\x7fELF")
