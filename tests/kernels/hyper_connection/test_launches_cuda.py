"""The hyper-connection's CUDA kernels: on a GPU where there is one, else their text is compiled for the CPU."""

from __future__ import annotations

import ctypes
import functools
import re
import shutil
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer.kernels import nvrtc
from deepinfer.kernels.dense.row_scaled import RowCodes
from deepinfer.kernels.hyper_connection import launches_cuda as cuda
from deepinfer.kernels.hyper_connection.finish import hc_finish
from deepinfer.kernels.hyper_connection.launches_cuda import FinishShape, Shape
from deepinfer.kernels.hyper_connection.parts import Mixes, Update
from deepinfer.kernels.hyper_connection.write_read import hc_write_read
from deepinfer.kernels.moe.experts_hopper import PLANS, row_limits
from deepinfer.ops import number_formats as nf
from deepinfer.ops.hyper_connection import hc_mixes, hc_read, hc_write
from deepinfer.ops.norm import rms_norm
from deepinfer.worker.warm_up import typical_lengths
from tests.kernels.emulation import compile_for_cpu
from tests.kernels.hyper_connection import test_hyper_connection as plain

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() and shutil.which("g++") is None, reason="needs a C++ compiler"),
]
MARK = "// ---------------------------------------------------------------- "
HIDDEN = 256
SHAPES = [
    Shape(1, 1),
    Shape(2, 2, 1),
    Shape(4, 1, 2),
    Shape(8, 2),
    Shape(1, 4),
    Shape(2, 4, 1, serial=4),
    Shape(1, 3, 1, serial=2),
    Shape(1, 2, 1, depth=2),
    Shape(1, 1, 1, serial=4, depth=3),
    Shape(2, 1, 2, serial=2, depth=4),
]
FINISH_SHAPES = [FinishShape(1, False), FinishShape(2, True), FinishShape(4, True), FinishShape(4, False)]


@functools.cache
def _emulator(source: str, entry: str, defines: tuple[tuple[str, int], ...]) -> Any:
    kernel = re.sub(f"{MARK}instructions.*?(?={MARK})", "", nvrtc.read_source(source), flags=re.DOTALL)
    kernel = kernel.replace("extern __shared__ __align__(16) char shared[];", "char* shared = at(0);")
    kernel = re.sub(r"__shared__ __align__\(16\) float sums\[.*\];", "float* sums = (float*)at(0);", kernel)
    kernel = kernel.replace("#define THREADS 160\n", "")
    constants = {"TILES": 1, "CLUSTER": 1} | dict(defines)
    constants["THREADS"] = 32 * constants["WARPS"] * constants["TILES"] if "WARPS" in constants else 160
    body = "static const Arguments* arguments;\n"
    body += f"static void call() {{ {entry}(*arguments); }}\n"
    if entry == "hc_write_read":
        body += CHECK_OF_COPIES
    body += 'extern "C" int emulate(const void* a, const int* grid, int shared_bytes) {\n'
    body += "  arguments = (const Arguments*)a;\n"
    if entry == "hc_write_read":
        body += "  may_copy = is_there, used_bytes = shared_bytes;\n"
    body += "  return launch(grid, call);\n}\n"
    return compile_for_cpu(constants, ("route.h", "hyper_connection.h"), kernel, body)


CHECK_OF_COPIES = """
static bool is_in(const char* p, const void* from, long bytes) {
  return p >= from && p + 16 <= (const char*)from + bytes;
}
static bool is_there(const char* p) {
  const Arguments& a = *arguments;
  const long row = HIDDEN * 2l, waited = fibers[current].waited;
  if (is_in(p, a.trunk, a.rows * 4 * row)) return waited || AHEAD;
  const long parts = KIND == 1 ? 1 : KIND == 2 ? K : KIND == 3 ? 2 * K : 0;
  return waited && (is_in(p, a.update, a.rows * parts * row) || (KIND == 2 && is_in(p, a.shared, a.rows * row)));
}
"""


class _Kernel:
    """Stands in for :class:`nvrtc.Kernel`."""

    eager_copies = False
    """Copies run at once, instead of as late as the kernel allows."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def launch(
        self, grid: tuple[int, int, int], threads: int, arguments: Sequence[Any], *, shared_bytes: int = 0, **_: Any
    ) -> None:
        del threads
        result = self.function(ctypes.byref(arguments[0]), (ctypes.c_int * 3)(*grid), shared_bytes)
        assert result == 0, ("", "deadlock", "more shared memory than asked for")[result]


@pytest.fixture(autouse=True)
def _emulate(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    if device.type == "cuda":
        return

    def load_kernel(source: str, entry: str, defines: dict[str, int], *_: Any, **__: Any) -> _Kernel:
        defines = defines | {"EAGER": int(_Kernel.eager_copies)}
        return _Kernel(_emulator(source, entry, tuple(sorted(defines.items()))))

    monkeypatch.setattr(nvrtc, "load_kernel", load_kernel)
    monkeypatch.setattr(cuda, "is_available", lambda device: True)


CASES = [
    ("plain", SHAPES[0]),
    ("plain", SHAPES[3]),
    ("experts", SHAPES[0]),
    ("absent", SHAPES[1]),
    ("splits", SHAPES[2]),
    ("absent", SHAPES[4]),
    ("experts", SHAPES[5]),
    ("plain", SHAPES[6]),
    ("experts", Shape(4, 2)),
    ("splits", Shape(1, 2)),
    ("plain", SHAPES[7]),
    ("experts", SHAPES[8]),
    ("splits", SHAPES[8]),
    ("absent", SHAPES[9]),
    ("splits", Shape(2, 2, 1, serial=2, depth=2)),
]


@pytest.mark.parametrize(
    ("form", "shape", "eager_copies"),
    [(*case, False) for case in CASES] + [(*case, True) for case in CASES if case[1].depth],
)
def test_write_and_read_are_exact_where_sums_are(
    form: str, shape: Shape, eager_copies: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(_Kernel, "eager_copies", eager_copies)
    rows = 99 if shape.depth else 35
    trunk = torch.randint(-8, 9, (rows, 4, HIDDEN)).bfloat16().to(device)
    mixes, read = plain._small_mixes(rows, device), plain._small_mixes(rows, device).read
    update, value = plain._updates(rows, HIDDEN, device)[form]
    fn = (torch.randint(-8, 9, (24, 4 * HIDDEN)) / 8).to(device)
    done = hc_write_read(trunk, read, fn, update, mixes, wants_feature=True, shape=shape)
    expected = hc_write(trunk, value, mixes.write.double(), mixes.stream.double())
    assert torch.equal(done.trunk, expected)
    assert torch.equal(done.h, hc_read(expected, read.double()))
    assert torch.equal(done.feature, expected.double().mean(1).bfloat16())
    slices = done.partial.num_slices
    assert slices == HIDDEN // (32 * shape.warps * shape.serial)
    records = done.partial.records.double()
    products = records[:, : slices * 32].unflatten(1, (slices, 32)).sum(1)[:, :24]
    torch.testing.assert_close(products, expected.double().flatten(1) @ fn.double().T, rtol=1e-6, atol=1e-3)
    squares = records[:, slices * 32 : slices * 34].unflatten(1, (2, slices)).sum(2)
    torch.testing.assert_close(squares[:, 0], done.h.double().square().sum(1), rtol=1e-6, atol=0)
    torch.testing.assert_close(squares[:, 1], expected.double().square().sum((1, 2)), rtol=1e-6, atol=0)


def test_fn_enters_with_all_its_bits(device: torch.device):
    """One product per sum: float32 times an integer power of two comes out exactly."""
    fn = torch.randn(24, 4 * HIDDEN).to(device)
    trunk = torch.zeros(4 * HIDDEN, 4 * HIDDEN)
    trunk.fill_diagonal_(0.5)
    trunk = trunk.view(-1, 4, HIDDEN)[::3].bfloat16().contiguous().to(device)
    done = hc_write_read(trunk, plain._mixes(trunk.shape[0], device).read, fn, shape=Shape(8, 1))
    assert torch.equal(done.partial.records[:, :24], 0.5 * fn.T[::3])


def _inputs(rows: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Update, Mixes]:
    mixes, read = plain._mixes(rows, device), plain._mixes(rows, device).read
    update = torch.randn(rows, HIDDEN).bfloat16().to(device)
    return plain._trunk(rows, HIDDEN, device), read, plain._fn(HIDDEN, device), update, mixes


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
def test_sublayer_input_and_mixes_match_the_reference(weight_dtype: torch.dtype, device: torch.device):
    trunk, read, fn, update, mixes = _inputs(5, device)
    norm = (torch.rand(HIDDEN) + 0.5).to(weight_dtype).to(device)
    scale, base = torch.tensor([1.0, 0.5, 2.0]).to(device), torch.randn(24).to(device)
    done = hc_write_read(trunk, read, fn, update, mixes)
    parameters = norm, scale, base, plain.NORM_EPS, plain.HC_EPS, plain.ITERATIONS
    found = hc_finish(done.partial, done.h, *parameters, wants_codes=True)
    assert plain._share_different(found.x, rms_norm(done.h, norm.double(), plain.NORM_EPS)) < 2e-3
    codes, scales = nf.q8(found.x)
    assert torch.equal(found.codes, codes)
    assert torch.equal(found.scales, scales)
    assert torch.equal(found.xq.float(), nf.q8_round(found.x))
    wide = hc_mixes(done.trunk, fn.double(), scale.double(), base.double(), *parameters[3:])
    for name, expected in zip(("read", "write", "stream"), wide, strict=True):
        torch.testing.assert_close(getattr(found.mixes, name).double(), expected, rtol=5e-6, atol=1e-7)
    other = hc_finish(done.partial, done.h, *parameters, wants_codes=True, wants_xq=False, scale_dtype=torch.float32)
    assert torch.equal(other.scales, torch.exp2(scales.float() - 127))
    assert torch.equal(other.codes, codes)
    triton = hc_finish(done.partial, done.h, *parameters, columns=128)
    assert plain._share_different(found.x, triton.x) < 2e-3
    for one, two in zip(found.mixes, triton.mixes, strict=True):
        torch.testing.assert_close(one, two, rtol=5e-6, atol=1e-7)


@pytest.mark.parametrize("rows", [1, 5, 17, 33, 130])
def test_a_row_is_the_same_in_every_shape_and_batch(rows: int, device: torch.device):
    chosen = slice(rows - 1, rows)
    trunk, read, fn, update, mixes = _inputs(rows, device)
    scale, base, norm = torch.ones(3).to(device), torch.randn(24).to(device), torch.ones(HIDDEN).to(device)

    def run(part: slice, shape: Shape | None, finish_shape: FinishShape | None) -> list[Tensor]:
        own = Mixes(*(mix[part] for mix in mixes))
        done = hc_write_read(trunk[part], read[part], fn, update[part], own, shape=shape)
        eps = plain.NORM_EPS, plain.HC_EPS, plain.ITERATIONS
        found = hc_finish(done.partial, done.h, norm, scale, base, *eps, wants_codes=True, shape=finish_shape)
        return [done.trunk, done.h, *found[:4], *found.mixes]

    everything = slice(None)
    first = run(everything, SHAPES[0], FINISH_SHAPES[0])
    runs = [(chosen, None, None), (everything, None, None)]
    runs += [(everything, shape, FINISH_SHAPES[0]) for shape in SHAPES[1:]]
    runs += [(everything, SHAPES[0], finish_shape) for finish_shape in FINISH_SHAPES[1:]]
    for part, shape, finish_shape in runs if rows < 130 else runs[:4]:
        for expected, found in zip(first, run(part, shape, finish_shape), strict=True):
            assert torch.equal(expected[part], found), (shape, finish_shape)


def test_no_number_of_rows_changes_the_kernels_sums(device: torch.device):
    """Every shape that is ever chosen gives the bits of the first."""
    rows = 3
    trunk, read, fn, update, mixes = _inputs(rows, device)
    scale, base, norm = torch.ones(3).to(device), torch.randn(24).to(device), torch.ones(HIDDEN).to(device)
    numbers, updates = (1, 17, 33, 65, 129, 193, 257, 289, 513, 8192), ((1, 1), (2, 6), (2, 12))
    chosen = {
        (cuda.choose_shape(n, hidden, *of_update), cuda.choose_finish_shape(n))
        for n in numbers
        for of_update in updates
        for hidden in (HIDDEN, 5120)
    }
    results = []
    for shape, finish_shape in chosen:
        done = hc_write_read(trunk, read, fn, update, mixes, shape=shape)
        eps = plain.NORM_EPS, plain.HC_EPS, plain.ITERATIONS
        found = hc_finish(done.partial, done.h, norm, scale, base, *eps, wants_codes=True, shape=finish_shape)
        results.append([done.trunk, done.h, *found[:4], *found.mixes])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("hidden", [256, 1536, 2816])
@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.filterwarnings("ignore:All-NaN")
def test_row_codes_are_those_of_the_rounded_values(rows: int, hidden: int, device: torch.device):
    trunk, read = plain._trunk(rows, hidden, device), plain._mixes(rows, device).read
    trunk[0] *= torch.exp2(torch.randint(-20, 4, (hidden // 32,)).float()).repeat_interleave(32).to(device)
    if rows > 1:
        trunk[2], trunk[4, :, 7] = 0, torch.nan
    done = hc_write_read(trunk, read, plain._fn(hidden, device))
    norm = (torch.rand(hidden) + 0.5).bfloat16().to(device)
    scale, base = torch.ones(3).to(device), torch.randn(24).to(device)
    parameters = norm, scale, base, plain.NORM_EPS, plain.HC_EPS, plain.ITERATIONS
    usual = hc_finish(done.partial, done.h, *parameters)
    expected = RowCodes.of(usual.xq)
    for wants_xq in (True, False):
        for shape in (None, FinishShape(4, True)):
            options = {"wants_xq": wants_xq, "wants_row_codes": True, "shape": shape}
            found = hc_finish(done.partial, done.h, *parameters, **options)
            known = torch.arange(rows) != 4  # a row that is not a number has any scale
            assert torch.equal(found.row_codes.scales[:, known], expected.scales[:, known])
            assert torch.isfinite(found.row_codes.scales).all()
            assert torch.equal(found.row_codes.codes, expected.codes)
            assert (found.xq is not None) == wants_xq
            for one, other in zip((found.x, *found.mixes), (usual.x, *usual.mixes), strict=True):
                assert torch.equal(one.nan_to_num(7), other.nan_to_num(7))
    assert found.row_codes.codes[0, 0].any()
    if rows > 1:
        assert found.row_codes.scales[0, 2] == 2.0**-22
        assert ((found.row_codes.codes[0, 4] & 0x7F) == 0x7F).all()


def test_every_chosen_shape_fits_a_multiprocessor():
    for kind, parts in ((0, 1), (1, 1), (2, 6), (2, 8), (2, 12), (2, 24), (3, 3), (3, 5), (3, 8)):
        for rows in (1, 17, 33, 65, 129, 193, 257, 289, 385, 513, 8192):
            for hidden in (256, 2048, 5120, 7168):
                shape = cuda.choose_shape(rows, hidden, kind, parts)
                assert shape.shared_bytes(kind, parts) * shape.resident <= 227 * 1024, (kind, parts, rows)


def test_many_rows_occupy_the_multiprocessors_at_every_hidden_size():
    for hidden in (2048, 4096, 5120, 7168):
        for rows in (1024, 8192):
            columns, blocks, _ = cuda.choose_shape(rows, hidden, 1, 1).grid(rows, hidden)
            assert 88 <= columns * blocks <= 132


@pytest.mark.parametrize(("experts", "selected"), [(384, 6), (256, 6), (256, 8), (128, 8)])
def test_a_start_meets_the_shapes_of_every_number_of_rows(experts: int, selected: int):
    """Decoding of one sequence and prompts of typical lengths: see ``deepinfer.worker.warm_up``."""
    limits = row_limits(experts, selected)
    few = max(max(most, most_each * experts) for most, most_each, *_ in PLANS) // selected
    assert few in limits

    def behind_experts(rows: int) -> object:  # their outputs are added here as long as they have no places of their own
        return cuda.choose_shape(rows, 5120, *((2, selected) if rows <= few else (1, 1))), rows <= few

    choices = [behind_experts, cuda.choose_finish_shape]
    for kind, parts in ((0, 1), (1, 1), (2, 6), (3, 3), (2, 12)):
        choices.append(lambda rows, u=(kind, parts): cuda.choose_shape(rows, 5120, *u))
    for choose in choices:
        met = {choose(rows) for rows in (1, *typical_lengths(8192, limits))}
        assert {choose(rows) for rows in range(1, 8193)} <= met
