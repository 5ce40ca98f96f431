"""What Triton's interpreter (3.6) gets wrong on the CPU and our kernels need: repaired here, for tests only.

It cuts float32 to bf16 instead of rounding, loses the carry when it rounds to e4m3, multiplies bf16 matrices as if
their bits were integers, and cannot run ``range`` over kernel values since NumPy 2.4. Its float32 products of matrices
are those of a library, on some processors with other last bits where there are other rows; here they are summed in
float64 and rounded once.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_TORCH_TYPES = {
    tl.float32: torch.float32,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
}
_BITS = {1: (np.uint8, torch.uint8), 2: (np.uint16, torch.int16), 4: (np.uint32, torch.int32)}


def repair() -> None:
    """Patch the interpreter. Once per process."""
    convert, patch_tensor = interpreter._convert_float, interpreter._patch_lang_tensor
    create_dot = interpreter.InterpreterBuilder.create_dot

    def convert_float(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source not in _TORCH_TYPES or target not in _TORCH_TYPES:
            return convert(data, source, target, rounding)
        return _from_torch(_saturate(_to_torch(data, source), target).to(_TORCH_TYPES[target]))

    def dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        if d.dtype.scalar != tl.float32:
            return create_dot(self, a, b, d, *options)
        total = np.matmul(_as_float64(a), _as_float64(b)) + d.data
        return interpreter.TensorHandle(total.astype(np.float32), tl.float32)

    def patch_tensor_with_bounds(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._convert_float = convert_float
    interpreter._patch_lang_tensor = patch_tensor_with_bounds
    interpreter.InterpreterBuilder.create_dot = dot


def _to_torch(data: Any, dtype: Any) -> torch.Tensor:
    array = np.ascontiguousarray(data)
    if array.dtype.kind != "u":
        return torch.from_numpy(array)
    signed = array.view({1: np.uint8, 2: np.int16, 4: np.int32}[array.itemsize])
    return torch.from_numpy(signed.copy()).view(_TORCH_TYPES[dtype])


def _as_float64(x: Any) -> Any:
    dtype = x.dtype.scalar
    return _to_torch(x.data, dtype).double().numpy() if dtype in _TORCH_TYPES else x.data.astype(np.float64)


def _from_torch(x: torch.Tensor) -> Any:
    numpy_type, torch_type = _BITS[x.element_size()]
    return x.view(torch_type).numpy().view(numpy_type)


def _saturate(x: torch.Tensor, target: Any) -> torch.Tensor:
    return x.clamp(-448, 448) if target == tl.float8e4nv else x
