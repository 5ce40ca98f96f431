from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from deepinfer.kernels import nvrtc


def test_included_files_come_once_where_they_are_first(tmp_path, monkeypatch):
    (tmp_path / "kernel.cu").write_text('// head\n#include "a.cuh"\n#include "b.cuh"\nkernel\n')
    (tmp_path / "a.cuh").write_text('// a\n#include "b.cuh"\na\n')
    (tmp_path / "b.cuh").write_text("b\n")
    monkeypatch.setattr(nvrtc, "SOURCES", tmp_path)
    assert nvrtc.read_source("kernel.cu") == "// head\n// a\nb\na\nkernel\n"


@pytest.mark.parametrize("source", sorted(path.name for path in Path(nvrtc.SOURCES).glob("*.cu")))
def test_every_included_file_exists(source):
    assert "#include" not in nvrtc.read_source(source)


def compiler_is_here() -> bool:
    try:
        return nvrtc._nvrtc() is not None
    except nvrtc.KernelError:
        return False


FIRST_USE = """
import pathlib, sys, threading
from concurrent.futures import ThreadPoolExecutor
from deepinfer.kernels import nvrtc

nvrtc.set_cache_directory(pathlib.Path(sys.argv[1]))
together = threading.Barrier(8)

def compile_one(k):
    together.wait()
    return nvrtc.compile_cubin("dense_unpack.cu", {"K": 64 * (k + 1), "ROW_SCALED": 0}, "sm_90a")

with ThreadPoolExecutor(8) as pool:
    assert all(cubin.startswith(b"\\x7fELF") for cubin in pool.map(compile_one, range(8)))
"""


@pytest.mark.skipif(not compiler_is_here(), reason="NVRTC is not installed")
def test_the_first_kernels_of_a_process_may_be_compiled_by_several_threads(tmp_path):
    """A thread that found the library half loaded could not compile."""
    done = subprocess.run([sys.executable, "-c", FIRST_USE, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.glob("*.cubin"))) == 8
