"""The wgmma kernel of index scores: on a GPU where there is one, else compiled for the CPU and emulated."""

from __future__ import annotations

import ctypes
import functools
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from deepinfer.kernels import nvrtc
from deepinfer.kernels.indexer import chunks_cuda, selection
from deepinfer.kernels.indexer.chunks_cuda import Geometry
from deepinfer.kernels.indexer.selection import index_full
from tests.kernels.emulation import compile_for_cpu
from tests.kernels.indexer.test_indexer import Case, expected_full, make_case, padded, reference_keys
from tests.kernels.test_nvrtc import compiler_is_here

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() and shutil.which("g++") is None, reason="needs a GPU or a C++ compiler"
)
EMULATION = Path(__file__).parents[1] / "emulation"
ENTRY = """
static Arguments arguments;
static TensorMap map;
static void call() { index_chunks(arguments, map); }
extern "C" int emulate(void* a, const u64* query, int grid, int threads, int shared_bytes, const char** keys) {
  arguments = *(const Arguments*)a;
  std::memcpy(map.opaque, query, 5 * 8);
  keys_begin = keys[0], keys_end = keys[1], gridDim.x = grid;
  return launch(grid, 1, threads, shared_bytes, call);
}
"""
SMALL = Geometry(group_rows=16, piece_units=3, stages=2)
keys_of_the_case: list[Tensor] = []  # the launch has addresses only


@functools.cache
def emulator(defines: tuple[tuple[str, int], ...]) -> Callable[..., int]:
    text = nvrtc.read_source("index_chunks.cu")
    marks = [text.index(f"// {'-' * 64} {name}") for name in ("instructions", "the kernel")]
    constants, kernel = text[text.index("#define CHANNELS") : marks[0]], text[marks[1] :]
    start = "extern __shared__ char unaligned[];"
    assert start in kernel
    kernel = kernel.replace(start, "char* unaligned = shared_memory[0] + 16;")
    machine = (EMULATION / "index_chunks.h").read_text()
    return compile_for_cpu({**dict(defines), "CLUSTER": 1}, ("dense.h",), constants, machine, kernel, ENTRY)


class EmulatedKernel:
    """Stands for :class:`deepinfer.kernels.nvrtc.Kernel`."""

    def __init__(self, source: str, entry: str, defines: dict[str, int], device: torch.device, *, shared_bytes: int):
        assert shared_bytes <= 227 * 1024
        self.function = emulator(tuple(sorted(defines.items())))

    def launch(self, grid, threads, arguments, *, shared_bytes, overlap) -> None:
        (keys,) = keys_of_the_case
        ends = (ctypes.c_void_p * 2)(keys.data_ptr(), keys.data_ptr() + keys.numel())
        assert self.function(ctypes.byref(arguments[0]), arguments[1], grid[0], threads, shared_bytes, ends) == 0


def emulated_map(x: Tensor, box_rows: int, box_columns: int) -> ctypes.Array:
    assert box_columns == 64
    return (ctypes.c_uint64 * 5)(x.data_ptr(), *x.shape, x.stride(0) * 2, box_rows)


@pytest.fixture(autouse=True)
def emulated(monkeypatch, device):
    if device.type != "cuda":
        monkeypatch.setattr(nvrtc, "load_kernel", EmulatedKernel)
        monkeypatch.setattr(nvrtc, "tensor_map", emulated_map)
        monkeypatch.setattr(nvrtc, "num_multiprocessors", lambda _: 3)


def scored(case: Case, geometry: Geometry | None = None, ctas: int | None = None, min_scored: int = 0) -> Tensor:
    """Order keys ``[rows, capacity]``; 77 where nothing was written."""
    view = case.view
    keys_of_the_case[:] = [case.keys]
    keys = torch.full((len(case.query), view.capacity), 77, dtype=torch.int16, device=case.query.device)
    operands = (case.query, case.weights, case.keys, view.block_table, view.row_sequence, view.num_visible, keys)
    chunks_cuda.score_chunks(
        *operands, min_scored, view.entries_per_block, view.max_visible, geometry=geometry, num_ctas=ctas
    )
    return keys


def rows_of(case: Case, part: slice) -> Case:
    shown = replace(case.view, row_sequence=case.view.row_sequence[part], num_visible=case.view.num_visible[part])
    return replace(case, query=case.query[part], weights=case.weights[part], view=shown)


# (rows, visible entries of the last row) of each sequence
CHUNKS = {
    "one": [(41, 700)],  # crosses the keys of a CTA, and groups
    "prompt": [(50, 50), (1, 300), (23, 23)],  # rows that see little, so that a warpgroup has nothing to do
    "diagonal": [(30, 135), (22, 393)],  # the same for the first rows with some keys
    "verify": [(6, 260), (6, 5), (3, 513), (1, 256), (6, 257), (2, 1)],
}


@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
@pytest.mark.parametrize("min_scored", [0, 30])
def test_scores_have_the_bits_of_exact_sums(chunks, min_scored, device):
    """Whatever is hidden holds NaN scales; hidden entries and rows that score nothing stay as they were."""
    case = make_case(chunks, device, 32, 128, per_block=16, padding=3)
    expected = reference_keys(case)
    expected[case.view.num_visible <= min_scored] = 77
    assert torch.equal(scored(case, SMALL, min_scored=min_scored), expected)


@pytest.mark.parametrize(
    ("heads", "geometry"),
    [
        (16, Geometry(64, 2, 3, 8, 5)),
        (64, Geometry(128, 2, 2, 6, 2)),
        (32, Geometry(96, 2, 2, 12, 100)),
        (32, Geometry(64, 3, 4, 64, 1)),
        (32, None),
    ],
)
def test_every_geometry_has_the_bits_of_exact_sums(heads, geometry, device):
    case = make_case([(9, 300), (1, 0), (13, 270)], device, heads, 128, per_block=8)
    assert torch.equal(scored(case, geometry, ctas=2), reference_keys(case))


def test_random_scores_differ_by_one_rounding_at_most(device):
    case = make_case(CHUNKS["one"], device, 32, 128, exact=False)
    difference = (scored(case).int() - reference_keys(case).int()).abs()
    # Positive and negative weights cancel: near zero an order key is fine-grained, elsewhere one bf16 step is one key.
    assert (difference > 1).double().mean() <= 0.005
    assert (difference > 0).double().mean() <= 0.02


def test_a_row_scores_the_same_alone_in_any_tile_and_on_any_grid(device):
    case = make_case([(6, 300), (14, 290)], device, 32, 128, exact=False)
    together = scored(case)
    for ctas in (1, 7):
        assert torch.equal(scored(case, SMALL, ctas), together)
    for row in (0, 5, 6, 9, 19):
        assert torch.equal(scored(rows_of(case, slice(row, row + 1)))[0], together[row])


def test_all_codes_and_many_scales(device):
    """Every FP4 code at every place of a key, and scales that differ from group to group."""
    case = make_case([(5, 40)], device, 32, 128, per_block=8)
    generator = torch.Generator().manual_seed(3)
    used = case.stream.entry_slots(torch.arange(40, device=device)[None], slice(0, 1))[0]
    case.keys[used, :64] = torch.randint(0, 256, (40, 64), generator=generator).to(device, torch.uint8)
    case.keys[used, 64:] = torch.randint(124, 130, (40, 4), generator=generator).to(device, torch.uint8)
    assert torch.equal(scored(case), reference_keys(case))


def test_strides_of_weights_and_scores_are_free(device):
    case = make_case([(11, 40)], device, 32, 128)
    wide = torch.full((11, 50), torch.nan, dtype=torch.bfloat16, device=device)
    wide[:, 2:34] = case.weights
    assert torch.equal(scored(replace(case, weights=wide[:, 2:34])), reference_keys(case))


def test_more_rows_than_a_launch_takes(device, monkeypatch):
    case = make_case([(9, 30), (14, 300)], device, 32, 128, per_block=8)
    monkeypatch.setattr(chunks_cuda, "MAX_ROWS", 10)
    assert torch.equal(scored(case), reference_keys(case))


def test_nothing_to_score(device):
    case = make_case([(3, 3), (1, 0)], device, 32, 128, padding=2)
    assert (scored(case, min_scored=3) == 77).all()
    assert scored(rows_of(case, slice(0, 0))).numel() == 0


def test_selection_takes_the_kernel_for_long_chunks(device, monkeypatch):
    case = make_case([(12, 300), (2, 40)], device, 32, 128, per_block=8)
    keys_of_the_case[:] = [case.keys]
    monkeypatch.setattr(chunks_cuda, "accepts", lambda *_: True)
    monkeypatch.setattr(selection, "score_chunks", None)
    got = index_full(case.query, case.weights, case.keys, case.view, 16, wants_entries=True)
    assert got.entries is not None
    assert torch.equal(got.entries.long(), padded(expected_full(case, 16)[0], 16))


def test_covers_the_released_widths(device, monkeypatch):
    monkeypatch.setattr(nvrtc, "is_available", lambda _: True)
    assert chunks_cuda.accepts(32, 128, 128, device)
    assert not chunks_cuda.accepts(32, 64, 128, device)
    assert not chunks_cuda.accepts(5, 128, 128, device)
    assert not chunks_cuda.accepts(32, 128, 4, device)
    for heads in (16, 32, 64):
        geometry = chunks_cuda.default_geometry(heads)
        assert geometry.columns % heads == 0
        assert geometry.shared_bytes(chunks_cuda.MAX_ROWS, heads) <= 227 * 1024


@pytest.mark.skipif(not compiler_is_here(), reason="NVRTC is not installed")
@pytest.mark.parametrize("heads", [16, 32, 64])
def test_cuda_source_compiles(heads, tmp_path, monkeypatch):
    monkeypatch.setattr(nvrtc, "_cache_directory", tmp_path)
    defines = chunks_cuda.constants(chunks_cuda.default_geometry(heads), heads, 128)
    assert nvrtc.compile_cubin("index_chunks.cu", defines, "sm_90a").startswith(b"\x7fELF")
