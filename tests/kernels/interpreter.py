"""What Triton's interpreter (3.6) gets wrong on the CPU and our kernels need: repaired here, for tests only.

It cuts float32 to bf16 instead of rounding, loses the carry when it rounds to e4m3, multiplies bf16 matrices as if
their bits were integers, and cannot run ``range`` over kernel values since NumPy 2.4. Its float32 products of matrices
are those of a library, on some processors with other last bits where there are other rows; here they are summed in
float64 and rounded once.

It is also slow at what has nothing to do with values: types, shapes and patches of the language are made anew for every
operation. :func:`quicken` keeps them, so that the tests' kernels take less than half the time.
"""

from __future__ import annotations

import functools
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton._utils import validate_block_shape
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

_TORCH_TYPES = {
    tl.float32: torch.float32,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
}
_BITS = {1: (np.uint8, torch.uint8), 2: (np.uint16, torch.int16), 4: (np.uint32, torch.int32)}


@functools.cache
def repair() -> None:
    """Patch the interpreter. Once per process."""
    quicken()
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


def quicken() -> None:
    """Keep what the interpreter makes again and again; no value of any kernel depends on it."""
    _patch_language_once_a_launch()
    _keep_shapes()
    names: dict[str, Any] = {}
    make_numpy_type, check_overflow = interpreter._get_np_dtype, TritonSemantic.binary_op_sanitize_overflow_impl

    def numpy_type(kind: Any) -> Any:
        scalar = kind.scalar
        if isinstance(scalar, tl.pointer_type):
            return make_numpy_type(scalar)
        if scalar.name not in names:
            names[scalar.name] = make_numpy_type(scalar)
        return names[scalar.name]

    def check_if_heard(self: Any, *arguments: Any) -> None:
        if self.builder.options.debug:  # else the check is computed and then dropped
            check_overflow(self, *arguments)

    interpreter._get_np_dtype = numpy_type
    TritonSemantic.binary_op_sanitize_overflow_impl = check_if_heard


def _patch_language_once_a_launch() -> None:
    """Every call of a device function patches the language again, though its kernel's launch has done so."""
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    nothing = SimpleNamespace(restore=lambda: None)
    patched: set[tuple[bool, bool]] | None = None  # modules that the running kernel has patched; None between kernels

    @functools.cache
    def modules_of(function: Any) -> tuple[bool, bool]:
        seen = [id(value) for value in function.__globals__.values()]
        return id(tl) in seen, id(tl.core) in seen

    def patch_once(function: Any) -> Any:
        if patched is None:
            return patch(function)
        modules = modules_of(function)
        if modules in patched:
            return nothing
        patched.add(modules)
        return patch(function)  # only the launch restores what it is given, as ever

    def launch_afresh(self: Any, *arguments: Any, **options: Any) -> None:
        nonlocal patched
        before, patched = patched, set()
        try:
            launch(self, *arguments, **options)
        finally:
            patched = before

    interpreter._patch_lang = patch_once
    interpreter.GridExecutor.__call__ = launch_afresh


def _keep_shapes() -> None:
    """One object for every shape of blocks, checked once, and names of types only where somebody reads them."""
    shapes: dict[tuple[int, ...], tuple[Any, int, Any, Any]] = {}
    scalar_shape, one = tl.tuple([]), tl.constexpr(1)

    def init_block(self: Any, element_ty: Any, shape: Any) -> None:
        assert isinstance(shape, list | tl.tuple)
        key = tuple(tl.core._unwrap_if_constexpr(size) for size in shape)
        if not key:
            raise TypeError("0d block_type is forbidden")
        if key not in shapes:
            numel = validate_block_shape(key)
            in_tensor = tl.tuple([tl.constexpr(size) for size in key])
            shapes[key] = (tl.tuple(key), numel, in_tensor, tl.constexpr(math.prod(key)))
        self.element_ty = element_ty
        self.shape, self.numel, self.shape_of_tensor, self.numel_of_tensor = shapes[key]

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        if type.is_block():
            self.shape, self.numel = type.shape_of_tensor, type.numel_of_tensor
        else:
            self.shape, self.numel = scalar_shape, one

    tl.block_type.__init__ = init_block
    tl.block_type.name = property(lambda self: f"<{self.shape}, {self.element_ty}>")
    tl.tensor.__init__ = init_tensor


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
