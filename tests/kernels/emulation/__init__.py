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
_LIBRARIES = _FOLDER.parents[2] / ".pytest_cache" / "emulation"  # a compilation takes a second, and there are 350
_OPTIONS = ("-O1", "-w", "-std=c++17", "-ffp-contract=off", "-fPIC")


def compile_for_cpu(defines: Mapping[str, int], headers: tuple[str, ...], *texts: str) -> Callable[..., int]:
    """The function ``emulate`` that the last of ``texts`` defines, after ``headers`` of this folder."""
    macros = [f"#define {name} {value}" for name, value in defines.items()]
    text = "\n".join([*macros, *((_FOLDER / name).read_text() for name in ("common.h", *headers)), *texts])
    library = _LIBRARIES / f"{_key(text)}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        _compile(text, library, ("-shared", "-include", _standard_headers()))
    function: Callable[..., int] = ctypes.CDLL(str(library)).emulate
    return function


def _standard_headers() -> Path:
    """What ``common.h`` includes, compiled once: 0.4 s less for every kernel. Without it g++ reads the text."""
    lines = [line for line in (_FOLDER / "common.h").read_text().splitlines() if line.startswith("#include")]
    text = "\n".join([*lines, ""])
    header = _LIBRARIES / f"{_key(text)}.h"
    compiled = header.with_suffix(".h.gch")
    if not compiled.exists():
        header.write_text(text)
        _compile(text, compiled, ("-x", "c++-header"))
    return header


def _key(text: str) -> str:
    return hashlib.sha256(repr((text, _OPTIONS, platform.machine(), platform.libc_ver())).encode()).hexdigest()[:32]


def _compile(text: str, result: Path, options: tuple[str | Path, ...]) -> None:
    with tempfile.TemporaryDirectory(dir=result.parent) as folder:  # beside it, so that it can be moved into place
        source, built = Path(folder) / "kernel.cpp", Path(folder) / "built"
        source.write_text(text)
        subprocess.run(["g++", *_OPTIONS, *options, "-o", built, source], check=True)
        os.replace(built, result)
