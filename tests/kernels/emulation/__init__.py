"""CUDA C++ kernels compiled for the CPU: a kernel's own text, its machine instructions replaced by a header here.

``common.h`` comes first, then the header of the kernel's family.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

_FOLDER = Path(__file__).parent
_OPTIONS = ("-O1", "-w", "-std=c++17", "-ffp-contract=off", "-shared", "-fPIC")


def compile_for_cpu(defines: Mapping[str, int], headers: tuple[str, ...], *texts: str) -> Callable[..., int]:
    """The function ``emulate`` that the last of ``texts`` defines, after ``headers`` of this folder."""
    macros = [f"#define {name} {value}" for name, value in defines.items()]
    parts = [*macros, *((_FOLDER / name).read_text() for name in ("common.h", *headers)), *texts]
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "kernel.cpp", Path(folder) / "kernel.so"
        source.write_text("\n".join(parts))
        subprocess.run(["g++", *_OPTIONS, "-o", library, source], check=True)
        function: Callable[..., int] = ctypes.CDLL(str(library)).emulate
    return function
