"""The hyper-connection's CUDA kernels, compiled for the CPU where there is no GPU."""

from __future__ import annotations

import ctypes
import functools
import re
import shutil
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from deepinfer.kernels import nvrtc
from deepinfer.kernels.hyper_connection import launches_cuda as cuda
from tests.kernels.emulation import compile_for_cpu

MARK = "// ---------------------------------------------------------------- "
needs_compiler = pytest.mark.skipif(
    not torch.cuda.is_available() and shutil.which("g++") is None, reason="needs a C++ compiler"
)


@functools.cache
def _emulator(source: str, entry: str, defines: tuple[tuple[str, int], ...]) -> Any:
    kernel = re.sub(f"{MARK}instructions.*?(?={MARK})", "", nvrtc.read_source(source), flags=re.DOTALL)
    kernel = kernel.replace("extern __shared__ __align__(16) char shared[];", "char* shared = at(0);")
    kernel = re.sub(r"__shared__ __align__\(16\) float sums\[.*\];", "float* sums = (float*)at(0);", kernel)
    kernel = kernel.replace("#define THREADS 160\n", "")
    constants = {"TILES": 1, "CLUSTER": 1} | dict(defines)
    constants["THREADS"] = _threads(entry, constants)
    body = "static const Arguments* arguments;\n"
    body += f"static void call() {{ {entry}(*arguments); }}\n"
    body += 'extern "C" int emulate(const void* a, const int* grid) {\n'
    body += "  arguments = (const Arguments*)a;\n  return launch(grid, call);\n}\n"
    return compile_for_cpu(constants, ("route.h", "hyper_connection.h"), kernel, body)


def _threads(entry: str, constants: dict[str, int]) -> int:
    if entry == "hc_cluster":
        return 32 * (constants["WARPS"] + 1)
    if entry == "hc_write_read":
        return 32 * constants["WARPS"] * constants["TILES"]
    return {"hc_finish": 160, "hc_mixes": 64}[entry]


class _Kernel:
    """Stands in for :class:`nvrtc.Kernel`."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def launch(self, grid: tuple[int, int, int], threads: int, arguments: Sequence[Any], **_: Any) -> None:
        del threads
        assert self.function(ctypes.byref(arguments[0]), (ctypes.c_int * 3)(*grid)) == 0, "deadlock"

    def max_clusters(self, *_: Any, **__: Any) -> int:
        return 3


def emulate(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """A fixture: without a GPU, launches run on the CPU."""
    if device.type == "cuda":
        return

    def load_kernel(source: str, entry: str, defines: dict[str, int], *_: Any, **__: Any) -> _Kernel:
        return _Kernel(_emulator(source, entry, tuple(sorted(defines.items()))))

    monkeypatch.setattr(nvrtc, "load_kernel", load_kernel)
    monkeypatch.setattr(cuda, "is_available", lambda device: True)
