"""The CUDA kernel of sparse attention: on a GPU where there is one, else compiled for the CPU and emulated."""

from __future__ import annotations

import ctypes
import functools
import shutil
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from deepinfer.kernels import nvrtc
from deepinfer.kernels.attention import sparse_attention_cuda
from deepinfer.ops import number_formats as nf
from tests.kernels.attention.test_sparse_attention import Case, assert_near, make_case
from tests.kernels.emulation import compile_for_cpu

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() and shutil.which("g++") is None, reason="needs a GPU or a C++ compiler"
)
ENTRY = """
static void* arguments[15];
static int number(int i) { return (int)(long)arguments[i]; }
static void call() {
  sparse_attention((const u16*)arguments[0], (const u8*)arguments[1], (const u8*)arguments[2], (const int*)arguments[3],
                   (const u8*)arguments[4], (const int*)arguments[5], (const float*)arguments[6],
                   (const float*)arguments[7], (const float*)arguments[8], (u16*)arguments[9], number(10), number(11),
                   number(12), number(13), number(14));
}
extern "C" int emulate(void** values, int grid) {
  std::memcpy(arguments, values, sizeof arguments);
  return launch(grid, call);
}
"""


@functools.cache
def emulator(**defines: int) -> Callable[..., int]:
    text = (nvrtc.SOURCES / sparse_attention_cuda.SOURCE).read_text()
    kernel = text[text.index("// ---------------------------------------------------------------- matrix operands") :]
    constants = text[text.index("#define D 512") : text.index("// ---------------------------------------------------")]
    kernel = kernel.replace("extern __shared__ __align__(1024) u8 shared_pointer[];", "u8* shared_pointer = at(0);")
    kernel = kernel.replace("at(0)", "shared_memory[fibers[current].cta]")
    return compile_for_cpu(defines, ("attention.h",), constants, kernel, ENTRY)


def run(case: Case, quantize_output: bool, splits: int, split_weights: bool, ctas: int | None = None) -> Tensor:
    """``ctas``: of a launch without splits, in the emulation."""
    if case.q.is_cuda:
        return case.run(quantize_output, implementation="cuda", splits=splits, split_weights=split_weights)
    rows, heads, dim = case.q.shape
    fp4 = case.entry_format == "fp4"
    function = emulator(**sparse_attention_cuda.definitions(heads, 2 * case.cos.shape[1], fp4, splits, split_weights))
    out = torch.full((rows, heads * dim), torch.nan, dtype=torch.bfloat16)
    slots = case.window_index[:, :0] if case.entry_slots is None else case.entry_slots
    entries = case.step_records if case.entries is None else case.entries
    tensors = [case.q, case.step_records, case.ring, case.window_index, entries, slots, case.sink, case.cos, case.sin]
    numbers = [rows, case.q.stride(0), case.window_index.shape[1], slots.shape[1], int(quantize_output)]
    values = (ctypes.c_void_p * 15)(*(t.data_ptr() for t in (*tensors, out)), *numbers)
    assert function(values, ctypes.c_int(ctas or rows * splits)) == 0, "deadlock"
    return out


def case_for(device: torch.device, rows: int, **options) -> Case:
    return make_case(rows, dim=512, rope_width=64, sharp=0.5, device=device, **options)


def test_persistent_ctas_agree_with_the_reference_and_with_rows_alone(device):
    case = case_for(device, 5, heads=64, window=70, selected=130)
    case.window_index[2], case.entry_slots[2] = -1, -1
    together = run(case, False, 1, False, ctas=2)
    assert_near(together, case.expected(False), one_part=True)
    assert torch.equal(together[2], torch.zeros_like(together[2]))
    assert torch.equal(run(case.row(3), False, 1, False)[0], together[3])
    rounded = run(case, True, 1, False, ctas=2)
    assert torch.equal(rounded, nf.q8_round(together.view(5, 64, 512)).bfloat16().flatten(1))
    case.entries = case.entry_slots = None
    assert_near(run(case, False, 1, False, ctas=2), case.expected(False), one_part=True)


def test_one_block_of_keys_per_row(device):
    """Every block is both the first and the last of its row, and its key buffer also holds the row's output."""
    case = case_for(device, 5, heads=64, window=3, selected=0)
    assert_near(run(case, False, 1, False, ctas=1), case.expected(False), one_part=True)


def test_clusters_add_their_splits(device):
    """A head count that is no multiple of 16, records in FP8, weights in two parts."""
    case = case_for(device, 2, heads=40, window=70, selected=130, entry_format="fp8")
    together = run(case, False, 4, True)
    assert_near(together, case.expected(False), one_part=False)
    assert torch.equal(run(case.row(1), False, 4, True)[0], together[1])
    few = case_for(device, 1, heads=40, window=3, selected=0, entry_format="fp8")  # fewer blocks than splits
    assert_near(run(few, False, 4, True), few.expected(False), one_part=False)
