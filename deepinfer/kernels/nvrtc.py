"""CUDA C++ kernels compiled at run time by NVRTC, kept as machine code on disk, launched on torch's current stream.

Uses the driver and NVRTC through ctypes: both come with torch, so nothing else is needed and importing this module
works everywhere. A launch does not synchronise and can be captured in a CUDA graph; load kernels before capturing.

Overlapped launches (programmatic dependent launch): a kernel launched with ``overlap`` may begin as soon as every CTA
of the kernel before it in the stream has executed ``griddepcontrol.launch_dependents`` or has ended. Its own
``griddepcontrol.wait`` returns when that kernel has ended and its writes are visible. Kernels further back have ended
by then too, provided that the kernel before waited for them: it was launched without ``overlap``, or it executes
``griddepcontrol.wait`` itself. Hence the rule for a kernel that is launched with ``overlap``, after any kernel:

- it executes ``griddepcontrol.wait`` on every path, in each CTA;
- before that it reads only what no kernel in flight can write (weights, complete since they were loaded) and writes no
  global memory, since the allocator may have given it a buffer that an earlier kernel still reads;
- in a CTA where one thread waits for all, the others touch global memory other than weights only after a barrier that
  follows the wait;
- no thread executes ``griddepcontrol.launch_dependents`` before it has waited. So when a kernel begins, whatever came
  before the kernel before it has ended.

Hence an exception to the second point: before it waits a kernel may also read what is older than the kernel before it,
past the L1 cache (``ld.global.cg``, ``cp.async.cg``, the copy engine). A product that is launched ``beside`` the kernel
before it multiplies meanwhile, and waits before it writes; ``hyper_connection_write_read.cu`` loads the streams.
(``moe_skinny.cu`` reads the order of pairs through the L1. A line of an earlier order would have to outlive the dozen
launches in between.)

And an exception to the last point: the small Triton kernels of :mod:`deepinfer.kernels.overlap`, and the selection and
the order of the router, let the next kernel start before they wait themselves. So what comes behind them begins one
kernel earlier: to load its weights or, behind the router, to multiply, since the shared expert's product needs the
router's input only. When a kernel begins behind such a one, no more has ended than when that one began; that is the age
of what it may read before it waits. (The other kernels were measured to gain nothing by it.)

``tests/worker/test_launch_order.py`` checks both over whole steps.

Kernels launched without ``overlap`` (torch's, Triton's) begin when everything before them has ended, as ever.

A multiprocessor divides its memory between L1 and shared memory for all its CTAs at once, and anew only when it is
empty. The driver's choice just fits a kernel, which leaves the next one no room beside it; so all kernels here ask for
as much shared memory as there is. On an H200 that takes 3 to 4 of 128 us from a layer at one sequence.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib.util
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepinfer.errors import EngineError

SOURCES = Path(__file__).parent / "cuda"
_OPTIONS = ("--std=c++17",)
_SHARED_BYTES_LIMIT = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_SHARED_CARVEOUT = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, in percent
_NON_PORTABLE_CLUSTER = 14  # CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
_PORTABLE_CLUSTER = 8  # CTAs
_CLUSTER_DIMENSION, _PROGRAMMATIC_LAUNCH = 4, 6  # CUlaunchAttributeID
_DEFAULT_SHARED_BYTES = 48 * 1024
_cache_directory = Path.home() / ".cache" / "deepinfer" / "kernels"


class KernelError(EngineError, RuntimeError):
    """A kernel that does not compile, load or launch."""


def set_cache_directory(directory: Path) -> None:
    """Where compiled kernels are kept; default ``~/.cache/deepinfer/kernels``."""
    global _cache_directory
    _cache_directory = directory


class _Attribute(ctypes.Structure):  # CUlaunchAttribute
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint * 16))


class _LaunchConfig(ctypes.Structure):  # CUlaunchConfig
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    )


MAX_SHARED_BYTES = 227 * 1024
"""Most shared memory of a CTA on Hopper."""
int64 = ctypes.c_int64
"""For arguments of 64 bits."""


class Kernel:
    """One entry point of a loaded module. Make it with :func:`load_kernel`."""

    def __init__(self, function: ctypes.c_void_p, name: str, device_index: int, max_shared_bytes: int) -> None:
        self._function = function
        self._name = name
        self._device_index = device_index
        self._max_shared_bytes = max_shared_bytes
        self._is_wide = False

    def launch(
        self,
        grid: tuple[int, int, int],
        threads: int,
        arguments: Sequence[Any],
        *,
        shared_bytes: int = 0,
        cluster: int = 1,
        overlap: bool = False,
    ) -> None:
        """Queue one launch on the current stream of the device the kernel was loaded for.

        Args:
            arguments: tensors (passed as pointers), ints (32 bits) or ctypes values, in the kernel's order.
            cluster: CTAs per cluster along x; the grid's x is a multiple of it.
            overlap: programmatic dependent launch: start while the kernel before finishes. Only for kernels that keep
                the rule at the top of this module.
        """
        assert shared_bytes <= self._max_shared_bytes, (self._name, shared_bytes)
        self._allow_cluster(cluster)
        values = [_as_ctypes(argument) for argument in arguments]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        attributes = (_Attribute * 2)()
        count = 0
        if cluster > 1:
            attributes[count].id = _CLUSTER_DIMENSION
            attributes[count].value[0:3] = (cluster, 1, 1)
            count += 1
        if overlap:
            attributes[count].id = _PROGRAMMATIC_LAUNCH
            attributes[count].value[0] = 1
            count += 1
        stream = torch._C._cuda_getCurrentRawStream(self._device_index)
        config = _LaunchConfig(grid, (threads, 1, 1), shared_bytes, stream, attributes, count)
        _bind_context(self._device_index)
        _check(_driver().cuLaunchKernelEx(ctypes.byref(config), self._function, pointers, None), f"launch {self._name}")

    def _allow_cluster(self, cluster: int) -> None:
        if cluster > _PORTABLE_CLUSTER and not self._is_wide:
            result = _driver().cuFuncSetAttribute(self._function, _NON_PORTABLE_CLUSTER, 1)
            _check(result, f"give {self._name} clusters of {cluster}")
            self._is_wide = True


def _as_ctypes(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    if isinstance(argument, int):
        return ctypes.c_int32(argument)
    return argument


class TensorMap(ctypes.Structure):  # CUtensorMap; its creation demands 64-byte alignment
    _fields_ = (("opaque", ctypes.c_uint64 * 16),)


@functools.lru_cache(maxsize=4096)
def _tensor_map(
    address: int, element: int, size: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...], swizzle: int
) -> TensorMap:
    """Sizes and boxes from the dimension with the densest elements on, strides in bytes from the second."""
    room = ctypes.create_string_buffer(ctypes.sizeof(TensorMap) + 63)
    tensor_map = TensorMap.from_buffer(room, -ctypes.addressof(room) % 64)
    rank = len(size)
    of_size, of_strides, of_box = ctypes.c_uint64 * rank, ctypes.c_uint64 * (rank - 1), ctypes.c_uint32 * rank
    no_interleave, promote_128, fill_zero = 0, 2, 0
    result = _driver().cuTensorMapEncodeTiled(
        ctypes.byref(tensor_map), element, rank, ctypes.c_void_p(address), of_size(*size), of_strides(*strides),
        of_box(*box), of_box(*(1,) * rank), no_interleave, swizzle, promote_128, fill_zero,
    )  # fmt: skip
    _check(result, f"describe an operand of {size[::-1]} elements to the tensor copy engine")
    return tensor_map


_BF16, _UINT64 = 9, 4  # CUtensorMapDataType
_NO_SWIZZLE, _SWIZZLE_128 = 0, 3


def tensor_map(x: Tensor, box_rows: int, box_columns: int) -> TensorMap:
    """How the tensor copy engine finds boxes of a bf16 matrix, with the 128-byte swizzle and zeros outside.

    Args:
        x: ``[rows, columns]``, dense columns, rows and start aligned to 16 bytes.
        box_columns: 64, the width of the swizzle.
    """
    rows, columns = x.shape
    stride = x.stride(0) if rows > 1 else columns  # the stride of a single row may be anything
    return _tensor_map(x.data_ptr(), _BF16, (columns, rows), (stride * 2,), (box_columns, box_rows), _SWIZZLE_128)


def block_map(blocks: Tensor, box_rows: int) -> TensorMap:
    """How the tensor copy engine finds ``[box_rows, 1, bytes]`` of ``blocks``, with zeros outside.

    Args:
        blocks: contiguous uint8 ``[rows, columns, bytes]``; at most 2,048 bytes, a multiple of 16.
    """
    rows, columns, num_bytes = blocks.shape
    size, box = (num_bytes // 8, columns, rows), (num_bytes // 8, 1, box_rows)
    return _tensor_map(blocks.data_ptr(), _UINT64, size, (num_bytes, columns * num_bytes), box, _NO_SWIZZLE)


@functools.cache
def is_available(device: torch.device) -> bool:
    """Whether kernels can be compiled for and run on ``device``: a Hopper GPU, the driver and NVRTC."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return False
    try:
        return _driver() is not None and _nvrtc() is not None
    except (OSError, KernelError):
        return False


def pointer(tensor: Tensor | None) -> int:
    """Address for a kernel's argument; 0 for an absent tensor."""
    return 0 if tensor is None else tensor.data_ptr()


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU: how many CTAs run at once, times those that fit in each."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def load_kernel(
    source: str,
    entry: str,
    defines: Mapping[str, int],
    device: torch.device,
    *,
    shared_bytes: int = 0,
) -> Kernel:
    """Compile (or fetch from the cache) and load one kernel.

    Args:
        source: file name in ``deepinfer/kernels/cuda``.
        entry: name of the ``extern "C"`` function.
        defines: its compile-time constants.
        shared_bytes: most dynamic shared memory of a launch.
    Raises:
        KernelError: with the compiler's log.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    constants = tuple(sorted(defines.items()))
    note = getattr(_noting, "note", None)
    if note is not None:
        note(source, constants, index)
        return _Unlaunched()
    return _load(source, entry, constants, index, shared_bytes)


_noting = threading.local()


def is_noting() -> bool:
    """Whether this thread is inside :func:`noting`: what kernels should have written is whatever memory holds."""
    return getattr(_noting, "note", None) is not None


class _Unlaunched(Kernel):
    """What :func:`load_kernel` gives inside :func:`noting`."""

    def __init__(self) -> None:
        pass

    def launch(self, *args: Any, **kwargs: Any) -> None:
        pass


@contextlib.contextmanager
def noting(submit: Callable[[Callable[[], None]], object]) -> Iterator[None]:
    """In this thread kernels are neither compiled nor launched.

    Args:
        submit: called once for every kernel that is asked for, with a function that compiles it, in any thread, so that
            :func:`load_kernel` finds it later.
    """
    _noting.note = functools.cache(lambda *kernel: submit(functools.partial(_compile_for, *kernel)))
    try:
        yield
    finally:
        _noting.note = None


def _compile_for(source: str, defines: tuple[tuple[str, int], ...], index: int) -> None:
    key = source, defines, _architecture(index)
    if key not in _compiled:  # another engine of the process may have had it
        _compiled[key] = compile_cubin(source, dict(defines), key[2])


_compiled: dict[tuple[str, tuple[tuple[str, int], ...], str], bytes] = {}
"""What :func:`noting` led to: the disk may not have taken it, and a file may have several entries to load."""


def _architecture(index: int) -> str:
    major, minor = torch.cuda.get_device_capability(index)
    return f"sm_{major}{minor}a"


@functools.cache
def _load(source: str, entry: str, defines: tuple[tuple[str, int], ...], index: int, shared_bytes: int) -> Kernel:
    architecture = _architecture(index)
    cubin = _compiled.get((source, defines, architecture)) or compile_cubin(source, dict(defines), architecture)
    _bind_context(index)
    driver, module, function = _driver(), ctypes.c_void_p(), ctypes.c_void_p()
    _check(driver.cuModuleLoadData(ctypes.byref(module), cubin), f"load {source}")
    _check(driver.cuModuleGetFunction(ctypes.byref(function), module, entry.encode()), f"find {entry} in {source}")
    if shared_bytes > _DEFAULT_SHARED_BYTES:
        result = driver.cuFuncSetAttribute(function, _SHARED_BYTES_LIMIT, shared_bytes)
        _check(result, f"give {entry} {shared_bytes} bytes of shared memory")
    _check(driver.cuFuncSetAttribute(function, _SHARED_CARVEOUT, 100), f"divide the memory for {entry}")
    return Kernel(function, entry, index, max(shared_bytes, _DEFAULT_SHARED_BYTES))


def read_source(source: str) -> str:
    """The text of ``deepinfer/kernels/cuda/<source>`` with the files that it includes in place of their names.

    Included files may include others. Each comes once, where it is included first: so not under a condition, unless
    nothing after it includes it.
    """
    found: set[str] = set()

    def expand(name: str) -> str:
        found.add(name)
        return re.sub(r'^#include "(.+)"\n', included, (SOURCES / name).read_text(), flags=re.MULTILINE)

    def included(match: re.Match[str]) -> str:
        return "" if match[1] in found else expand(match[1])

    return expand(source)


def compile_cubin(source: str, defines: Mapping[str, int], architecture: str) -> bytes:
    """Machine code for ``architecture`` (``sm_90a``), from the cache or newly compiled. Needs NVRTC, but no GPU."""
    text = read_source(source).encode()
    options = [*_OPTIONS, f"--gpu-architecture={architecture}", *(f"-D{k}={v}" for k, v in sorted(defines.items()))]
    nvrtc = _nvrtc()
    version = (ctypes.c_int(), ctypes.c_int())
    nvrtc.nvrtcVersion(ctypes.byref(version[0]), ctypes.byref(version[1]))
    key = hashlib.sha256(text + repr((options, version[0].value, version[1].value)).encode()).hexdigest()[:32]
    cached = _cache_directory / f"{Path(source).stem}-{key}.cubin"
    if cached.exists():
        return cached.read_bytes()
    cubin = _compile(nvrtc, text, source, options)
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        partial = cached.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
        partial.write_bytes(cubin)
        partial.replace(cached)
    except OSError:  # a read-only home costs a second at every start, nothing else
        pass
    return cubin


def _compile(nvrtc: ctypes.CDLL, text: bytes, name: str, options: list[str]) -> bytes:
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), text, name.encode(), 0, None, None)
    encoded = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    try:
        if nvrtc.nvrtcCompileProgram(program, len(options), encoded) != 0:
            nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            nvrtc.nvrtcGetProgramLog(program, log)
            raise KernelError(
                f"{name} with {' '.join(options)}",
                why="NVRTC refused it: " + log.value.decode(errors="replace").strip(),
                fix="report it with this message",
            )
        nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
        cubin = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetCUBIN(program, cubin)
        return cubin.raw
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


_bound = threading.local()


def _bind_context(index: int) -> None:
    """Make torch's context current in this thread: the driver calls need it, torch binds it only on use."""
    if getattr(_bound, "index", None) != index:
        torch.cuda.set_device(index)
        _bound.index = index


def _check(result: int, action: str) -> None:
    if result != 0:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(result, ctypes.byref(text))
        why = (text.value or b"unknown error").decode()
        raise KernelError(
            f"could not {action}", why=f"the driver says {why} ({result})", fix="report it with this line"
        )


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


_loading = threading.Lock()


def _nvrtc() -> ctypes.CDLL:
    with _loading:  # a second thread would find the library by its name, before its builtins are loaded
        return _load_nvrtc()


@functools.cache
def _load_nvrtc() -> ctypes.CDLL:
    names = [f"libnvrtc.so.{major}" for major in (13, 12)]
    folders = [Path("/usr/local/cuda/lib64")]
    package = importlib.util.find_spec("nvidia")
    if package is not None:
        for root in package.submodule_search_locations or ():
            folders += [Path(root) / "cu13/lib", Path(root) / "cuda_nvrtc/lib"]
    for name in [*names, *(str(folder / name) for folder in reversed(folders) for name in names)]:
        try:
            found = ctypes.CDLL(name)
        except OSError:
            continue
        if Path(name).is_absolute():
            for builtins in Path(name).parent.glob("libnvrtc-builtins.so.*"):  # looked up by name when it compiles
                with contextlib.suppress(OSError):
                    ctypes.CDLL(str(builtins))
        return found
    raise KernelError(
        "NVRTC was not found", why="CUDA kernels are compiled with it", fix="pip install nvidia-cuda-nvrtc"
    )
