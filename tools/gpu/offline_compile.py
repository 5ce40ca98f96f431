"""Compile a Triton kernel for Hopper on a machine without a GPU, and report registers, spills and shared memory.

Catches what the interpreter lets pass (types, layouts, shapes that are no power of two) before a GPU is at hand.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_TYPES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.uint16: "u16",
    torch.uint32: "u32",
    torch.bool: "i1",
}


@dataclass(frozen=True, slots=True)
class Compiled:
    """What ``cuobjdump`` says about the machine code."""

    registers: int
    stack_bytes: int
    """Local memory per thread: above 0 means spills or arrays that are indexed at run time."""
    shared_bytes: int
    ptx: str
    sass: str


def compile_for_hopper(
    kernel: Any, args: Mapping[str, Any], constants: Mapping[str, Any], num_warps: int = 4, num_stages: int = 3
) -> Compiled:
    """Compile ``kernel`` (a ``triton.jit`` function; ``TRITON_INTERPRET`` must not be set) for SM90.

    Args:
        args: name -> tensor (its dtype counts), int or float, for every argument that is no constant.
        constants: name -> value of every ``tl.constexpr`` argument.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature: dict[str, str] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        else:
            value = args[name]
            signature[name] = _type_of(value)
            if isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0):
                attributes[(index,)] = [["tt.divisibility", 16]]
    fixed = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, fixed, attributes)
    options = {"num_warps": num_warps, "num_stages": num_stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run([tools / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True).stdout
        sass = subprocess.run([tools / "cuobjdump", "--dump-sass", file.name], capture_output=True, text=True).stdout

    def number(name: str) -> int:
        found = re.search(rf"{name}:(\d+)", usage)
        return int(found.group(1)) if found else -1

    return Compiled(number("REG"), number("STACK"), compiled.metadata.shared, compiled.asm["ptx"], sass)


def _type_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "*" + _TYPES[value.dtype]
    if isinstance(value, bool):
        return "i1"
    return "i32" if isinstance(value, int) else "fp32"
