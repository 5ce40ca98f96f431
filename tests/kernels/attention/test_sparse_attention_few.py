"""The CUDA kernel for few rows: on a GPU where there is one, else compiled for the CPU and emulated."""

from __future__ import annotations

import ctypes
import functools
import shutil
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from deepinfer.kernels import nvrtc
from deepinfer.kernels.attention import sparse_attention_few
from deepinfer.ops import number_formats as nf
from tests.kernels.attention.test_sparse_attention import Case, assert_near, make_case
from tests.kernels.emulation import compile_for_cpu

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() and shutil.which("g++") is None, reason="needs a GPU or a C++ compiler"
)
ENTRY = """
static const Arguments* arguments;
static void call() { sparse_attention_few(*arguments); }
extern "C" int emulate(const void* values, int grid, int cluster) {
  arguments = (const Arguments*)values;
  return launch(grid, cluster, call);
}
"""


@functools.cache
def emulator(**defines: int) -> Callable[..., int]:
    text = nvrtc.read_source(sparse_attention_few.SOURCE)
    section = "// ---------------------------------------------------------------- "
    begin, end = text.index(section + "instructions"), text.index(section + "number formats")
    shared = "Shared& shared = *(Shared*)shared_memory[fibers[current].cta];"
    kernel = text[end:].replace("__shared__ Shared shared;", shared)
    return compile_for_cpu(defines, ("attention_few.h",), text[:begin], kernel, ENTRY)


def run(case: Case, quantize_output: bool, splits: int, split_weights: bool) -> Tensor:
    if case.q.is_cuda:
        return case.run(quantize_output, implementation="few", splits=splits, split_weights=split_weights)
    rows, heads, dim = case.q.shape
    fp4 = case.entry_format == "fp4"
    function = emulator(**sparse_attention_few.definitions(heads, 2 * case.cos.shape[1], fp4, split_weights))
    out = torch.full((rows, heads * dim), torch.nan, dtype=torch.bfloat16)
    slots = case.window_index[:, :0] if case.entry_slots is None else case.entry_slots
    entries = case.step_records if case.entries is None else case.entries
    arguments = sparse_attention_few.arguments(
        case.q, case.step_records, case.ring, case.window_index.contiguous(), entries, slots.contiguous(), case.sink,
        case.cos, case.sin, quantize_output, out, splits,
    )  # fmt: skip
    assert function(ctypes.byref(arguments), rows * -(-heads // 16) * splits, splits) == 0, "deadlock"
    return out


def case_for(device: torch.device, rows: int, **options) -> Case:
    return make_case(rows, dim=512, rope_width=64, sharp=0.5, device=device, **options)


def test_rows_agree_with_the_reference_and_with_rows_alone(device):
    """Counts of keys that fill no tile; a CTA's keys, partly of the window, take two turns."""
    case = case_for(device, 2, heads=20, window=43, selected=201)
    together = run(case, False, 4, True)
    assert_near(together, case.expected(False), one_part=False)
    assert torch.equal(run(case.row(1), False, 4, True)[0], together[1])
    rounded = run(case, True, 4, True)
    assert torch.equal(rounded, nf.q8_round(together.view(2, 20, 512)).bfloat16().flatten(1))


@pytest.mark.parametrize("splits", [8, 16])
def test_more_splits_and_records_in_fp8(device, splits):
    case = case_for(device, 1, heads=16, window=70, selected=130, entry_format="fp8")
    assert_near(run(case, False, splits, False), case.expected(False), one_part=True)


def test_fewer_tiles_than_splits(device):
    """CTAs without a key, a layer without entries, a row with one key and one with none."""
    case = case_for(device, 3, heads=3, window=5, selected=0)
    key = int(case.window_index[0].max())
    case.window_index[1], case.window_index[2] = -1, -1
    case.window_index[1, 3] = key
    out = run(case, False, 8, True)
    assert_near(out, case.expected(False), one_part=False)
    assert torch.equal(out[2], torch.zeros_like(out[2]))


def test_stale_indices_are_not_followed_outside_of_the_pools(device):
    """Of the first pass: what it reads may be anything. Here its bounds are too narrow, and the result still right."""
    case = case_for(device, 1, heads=1, window=20, selected=30)
    expected = case.expected(False)
    assert_near(run(case, False, 4, True), expected, one_part=False)
    case.entry_slots[0, :4] = -5  # no slot either
    assert_near(run(case, False, 4, True), case.expected(False), one_part=False)
