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
from deepinfer.kernels.dense.row_scaled import RowCodes
from deepinfer.ops import number_formats as nf
from deepinfer.ops.records import Fp8Record
from tests.kernels.attention.test_sparse_attention import Case, assert_near, make_case
from tests.kernels.emulation import compile_for_cpu
from tests.kernels.test_nvrtc import compiler_is_here

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() and shutil.which("g++") is None, reason="needs a GPU or a C++ compiler"
)
ENTRY = """
static void* arguments[16];
static int number(int i) { return (int)(long)arguments[i]; }
static void call() {
  sparse_attention((const u16*)arguments[0], (const u8*)arguments[1], (const u8*)arguments[2], (const int*)arguments[3],
                   (const u8*)arguments[4], (const int*)arguments[5], (const float*)arguments[6],
                   (const float*)arguments[7], (const float*)arguments[8], (u16*)arguments[9], number(10), number(11),
                   number(12), number(13), number(14) SCALES((float*)arguments[15]));
}
extern "C" int emulate(void** values, int grid) {
  std::memcpy(arguments, values, sizeof arguments);
  return launch(grid, call);
}
"""


@functools.cache
def emulator(**defines: int) -> Callable[..., int]:
    text = nvrtc.read_source(sparse_attention_cuda.SOURCE)
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
    out = torch.full((rows, heads * dim), torch.nan, dtype=torch.bfloat16)
    emulate(case, quantize_output, splits, split_weights, ctas or rows * splits, out)
    return out


def run_codes(case: Case, groups: int, split_weights: bool, ctas: int) -> RowCodes:
    """The output as codes; with places of the codes and scales that are poisoned before."""
    rows, heads, dim = case.q.shape
    made = RowCodes.empty(groups, rows, heads // groups * dim, case.q.device)
    made.codes.fill_(0x7F)
    made.scales.fill_(torch.nan)
    if not case.q.is_cuda:
        emulate(case, True, 1, split_weights, ctas, made.codes, made.scales)
        return made
    slots, entries = keys_of(case)
    sparse_attention_cuda.launch(
        case.q, case.step_records, case.ring, case.window_index, entries, slots, case.entry_format == "fp4",
        case.sink, case.cos, case.sin, True, made.codes, 1, split_weights, made.scales,
    )  # fmt: skip
    return made


def keys_of(case: Case) -> tuple[Tensor, Tensor]:
    slots = case.window_index[:, :0] if case.entry_slots is None else case.entry_slots
    return slots, case.step_records if case.entries is None else case.entries


def emulate(
    case: Case, quantize_output: bool, splits: int, split_weights: bool, ctas: int, out: Tensor,
    scales: Tensor | None = None,
) -> None:  # fmt: skip
    rows, heads, _ = case.q.shape
    fp4, group_heads = case.entry_format == "fp4", 0 if scales is None else heads // len(scales)
    function = emulator(
        **sparse_attention_cuda.definitions(heads, 2 * case.cos.shape[1], fp4, splits, split_weights, group_heads)
    )
    slots, entries = keys_of(case)
    tensors = [case.q, case.step_records, case.ring, case.window_index, entries, slots, case.sink, case.cos, case.sin]
    numbers = [rows, case.q.stride(0), case.window_index.shape[1], slots.shape[1], int(quantize_output)]
    pointers = [t.data_ptr() for t in (*tensors, out)]
    values = (ctypes.c_void_p * 16)(*pointers, *numbers, None if scales is None else scales.data_ptr())
    assert function(values, ctypes.c_int(ctas)) == 0, "deadlock"


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


# ---------------------------------------------------------------- codes with one scale per row and group of heads


def two_steps(case: Case, groups: int, split_weights: bool, ctas: int) -> RowCodes:
    return RowCodes.of(run(case, True, 1, split_weights, ctas), groups)


def assert_equal_codes(found: RowCodes, expected: RowCodes) -> None:
    assert torch.equal(found.scales, expected.scales)
    assert torch.equal(found.codes, expected.codes)


@pytest.mark.parametrize(
    ("heads", "groups", "options"),
    [
        (64, 8, {"window": 70, "selected": 130}),
        (40, 5, {"window": 70, "selected": 9, "entry_format": "fp8"}),  # the last warps have no head
        (24, 6, {"window": 3, "selected": 0}),  # groups of 4, every block is the first and the last
        (48, 3, {"window": 5, "selected": 70}),  # groups of 16
    ],
)
def test_codes_are_those_of_the_rounded_output(heads, groups, options, device):
    case = case_for(device, 5, heads=heads, **options)
    case.window_index[2] = -1  # a row without keys
    if case.entry_slots is not None:
        case.entry_slots[2] = -1
    split_weights = groups == 5
    found = run_codes(case, groups, split_weights, ctas=2)
    expected = two_steps(case, groups, split_weights, ctas=2)
    assert_equal_codes(found, expected)
    assert found.codes[:, [0, 1, 3, 4]].any()
    assert not (found.codes[:, 2] & 0x7F).any(), "zeros, maybe negative ones"
    assert (found.scales[:, 2] == 2.0**-22).all(), "the scale of the smallest magnitude that counts, 1e-4"
    alone = run_codes(case.row(3), groups, split_weights, ctas=1)
    assert torch.equal(alone.codes[:, 0], found.codes[:, 3])


def test_codes_of_values_over_many_binades(device):
    """One key per row and no competition, so that the output is the key: groups of 32 far below the row's largest,
    zeros of both signs."""
    case = case_for(device, 4, heads=64, window=2, selected=0)
    case.cos.fill_(1)
    case.sin.zero_()
    case.sink.fill_(-1e4)
    case.window_index[:, 0], case.window_index[:, 1] = torch.arange(4), -1
    generator = torch.Generator().manual_seed(3)
    keys = torch.randn(4, 512, generator=generator)
    keys *= torch.exp2(torch.randint(-24, 8, (4, 16), generator=generator).float()).repeat_interleave(32, 1)
    keys[1], keys[1, 40] = 2.0**-9, 240.0
    keys[2] = -(2.0 ** -torch.arange(512.0).div(32, rounding_mode="floor"))
    keys[3] = 0.0
    case.step_records.copy_(Fp8Record(512).encode(keys))
    found, expected = run_codes(case, 8, False, ctas=1), two_steps(case, 8, False, ctas=1)
    assert_equal_codes(found, expected)
    assert found.scales[0, 1] == 1.0
    assert (found.codes[:, 0] == 0).any(), "some values lie below all codes"
    assert (found.codes[:, 0] == 0x80).any()
    case.q.zero_()
    case.sink.fill_(-2.78)  # 240 becomes 226, and Q8 rounds it to 224, which a smaller scale holds
    found = run_codes(case, 8, True, ctas=1)
    assert_equal_codes(found, two_steps(case, 8, True, ctas=1))
    assert found.scales[0, 1] == 0.5
    # Heads differ in what they see, so that groups have scales of their own.
    case.sink[:32] = 20.0
    found = run_codes(case, 8, False, ctas=3)
    assert_equal_codes(found, two_steps(case, 8, False, ctas=3))
    assert not torch.equal(found.scales[0], found.scales[7])


def test_a_query_that_is_not_a_number_spoils_its_own_group_only(device):
    case = case_for(device, 2, heads=64, window=3, selected=5)
    clean = run_codes(case, 8, False, ctas=1)
    case.q[1, 17, 3] = torch.nan
    found = run_codes(case, 8, False, ctas=1)
    spoilt = found.codes[2, 1].view(8, 512)[1]
    assert ((spoilt & 0x7F) == 0x7F).all()
    others = torch.arange(8) != 2
    assert torch.equal(found.codes[:, 0], clean.codes[:, 0])
    assert torch.equal(found.codes[others], clean.codes[others])
    assert torch.isfinite(found.scales).all()


@pytest.mark.skipif(not compiler_is_here(), reason="NVRTC is not installed")
@pytest.mark.parametrize("group_heads", [0, 8])
def test_cuda_source_compiles(group_heads, tmp_path, monkeypatch):
    monkeypatch.setattr(nvrtc, "_cache_directory", tmp_path)
    defines = sparse_attention_cuda.definitions(64, 64, True, 1, False, group_heads)
    assert nvrtc.compile_cubin(sparse_attention_cuda.SOURCE, defines, "sm_90a").startswith(b"\x7fELF")
