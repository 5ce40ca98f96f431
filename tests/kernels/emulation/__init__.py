"""CUDA C++ kernels compiled for the CPU: a kernel's own text, its machine instructions replaced by a header here.

``common.h`` comes first, then the header of the kernel's family.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

_FOLDER = Path(__file__).parent
_LIBRARIES = _FOLDER.parents[2] / ".pytest_cache" / "emulation"  # a compilation takes a second, and there are sixty
_OPTIONS = ("-O1", "-w", "-std=c++17", "-ffp-contract=off", "-shared", "-fPIC")


def compile_for_cpu(defines: Mapping[str, int], headers: tuple[str, ...], *texts: str) -> Callable[..., int]:
    """The function ``emulate`` that the last of ``texts`` defines, after ``headers`` of this folder."""
    macros = [f"#define {name} {value}" for name, value in defines.items()]
    text = "\n".join([*macros, *((_FOLDER / name).read_text() for name in ("common.h", *headers)), *texts])
    key = hashlib.sha256(repr((text, _OPTIONS, platform.machine(), platform.libc_ver())).encode()).hexdigest()[:32]
    library = _LIBRARIES / f"{key}.so"
    if not library.exists():
        _compile(text, library)
    function: Callable[..., int] = ctypes.CDLL(str(library)).emulate
    return function


def _compile(text: str, library: Path) -> None:
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:  # beside it, so that it can be moved into place
        source, built = Path(folder) / "kernel.cpp", Path(folder) / "kernel.so"
        source.write_text(text)
        subprocess.run(["g++", *_OPTIONS, "-o", built, source], check=True)
        os.replace(built, library)
