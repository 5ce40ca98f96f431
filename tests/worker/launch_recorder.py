"""Every launch of the fused model, recorded instead of run: checks the rule at the top of ``deepinfer.kernels.nvrtc``.

Kernels that read more than weights before they wait for the kernel before them say so in their compile-time constants
or arguments. What they read has to have ended when they begin.
"""

from __future__ import annotations

import ctypes
import functools
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import pytest
import torch
from torch import Tensor


class Kind(Enum):
    """How a launch stands to the one before and the one behind it."""

    ORDINARY = auto()
    """Begins when everything before it has ended."""
    OVERLAPPED = auto()
    """Begins beside the one before; lets the next one start when it has waited."""
    EARLY = auto()
    """The same, but lets the next one start before it has waited."""


@dataclass
class Launch:
    """One launch. Memory is told apart by the address of its storage."""

    name: str
    kind: Kind
    touched: set[int]
    ahead: dict[str, int] = field(default_factory=dict)
    """What it reads before it waits, besides weights: argument -> storage."""


def violations(launches: list[Launch]) -> list[str]:
    """Where the rule is broken. The first launch that names a storage is taken for its writer."""
    first: dict[int, int] = {}
    found = []
    ended = -1  # this launch and all before it have ended when the current one begins
    for index, launch in enumerate(launches):
        if launch.kind is Kind.ORDINARY:
            ended = index - 1
        elif index and launches[index - 1].kind is not Kind.EARLY:
            ended = index - 2  # the launch before began, or has waited, when these had ended
        for name, storage in launch.ahead.items():
            maker = first.get(storage, -1)
            if maker > ended:
                found.append(f"{index}: {launch.name} reads {name} ahead, which {launches[maker].name} ({maker}) makes")
        for storage in launch.touched:
            first.setdefault(storage, index)
    return found


class Recorder:
    """Collects launches while :meth:`installed`. Keeps every tensor alive, so that no address is used twice."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self._kept: list[Tensor] = []

    def storage_at(self, address: int) -> int:
        for tensor in reversed(self._kept):
            storage = tensor.untyped_storage()
            if storage.data_ptr() <= address < storage.data_ptr() + max(storage.nbytes(), 1):
                return storage.data_ptr()
        raise AssertionError(f"a pointer to no tensor: {address:x}")

    def mark(self) -> int:
        """A place in what is kept, for :meth:`forget`."""
        return len(self._kept)

    def forget(self, mark: int) -> None:
        """Launches so far, and tensors since ``mark``: of steps that are not compared they would fill memory."""
        self.launches.clear()
        del self._kept[mark:]

    def note(self, name: str, kind: Kind, *tensors: object) -> None:
        """A launch that reads nothing ahead."""
        known = [tensor for tensor in tensors if isinstance(tensor, Tensor)]
        self._kept += known
        self.launches.append(Launch(name, kind, {tensor.untyped_storage().data_ptr() for tensor in known}))

    @contextmanager
    def installed(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """Nothing runs inside: results are whatever memory holds."""
        from triton.runtime import interpreter

        from deepinfer.kernels import nvrtc
        from deepinfer.kernels.dense import linear, row_scaled

        recorder, address = self, Tensor.data_ptr

        def data_ptr(tensor: Tensor) -> int:
            recorder._kept.append(tensor)
            return address(tensor)

        def launcher(kernel: Any, _: object) -> Callable[..., None]:
            def launch(*values: object, **named: object) -> None:
                kind = Kind.EARLY if named.get("OVERLAP") else Kind.ORDINARY
                recorder.note(kernel.fn.__name__, kind, *values, *named.values())

            return launch

        _forget_answers()
        with monkeypatch.context() as patch:
            patch.setattr(Tensor, "data_ptr", data_ptr)
            patch.setattr(torch.cuda, "synchronize", lambda *_: None)
            patch.setattr(nvrtc, "is_available", lambda device: True)
            patch.setattr(nvrtc, "num_multiprocessors", lambda device: 132)
            patch.setattr(nvrtc, "tensor_map", lambda x, rows, columns: _Map(x.data_ptr()))
            patch.setattr(nvrtc, "block_map", lambda blocks, rows: _BlockMap(blocks.data_ptr()))
            patch.setattr(nvrtc, "load_kernel", lambda *args, **named: _Kernel(recorder, *args[:3]))
            patch.setattr(interpreter.InterpretedFunction, "__getitem__", launcher)
            patch.setattr(linear, "_cublas", lambda *tensors: recorder.note("cublas", Kind.ORDINARY, *tensors))
            patch.setattr(
                row_scaled, "product", lambda x, w, out: recorder.note("scaled_mm", Kind.ORDINARY, *x, *w, out)
            )
            try:
                yield
            finally:
                _forget_answers()
                self._kept.clear()


def _forget_answers() -> None:
    """What kernels' modules remember of the device: in here it is another."""
    for name, module in list(sys.modules.items()):
        if name.startswith("deepinfer.kernels"):
            for value in vars(module).values():
                if hasattr(value, "cache_clear"):
                    value.cache_clear()


@functools.cache
def _lets_start_early(source: str, entry: str) -> bool:
    """Whether the kernel's body lets the next one start before it waits."""
    from deepinfer.kernels import nvrtc

    text = nvrtc.read_source(source)
    begin = re.search(rf"__global__[^;{{]*\b{entry}\(", text)
    assert begin is not None, (source, entry)
    body = text[begin.end() :].split('extern "C"')[0]
    calls = [body.find(name) for name in ("let_next_kernel_start()", "wait_for_earlier_kernels()")]
    return -1 not in calls and calls[0] < calls[1]


class _Map(ctypes.Structure):
    _fields_ = (("x", ctypes.c_void_p),)


class _BlockMap(ctypes.Structure):
    _fields_ = (("weights", ctypes.c_void_p),)


class _Kernel:
    """Stands for :class:`deepinfer.kernels.nvrtc.Kernel`."""

    def __init__(self, recorder: Recorder, source: str, entry: str, defines: dict[str, int]) -> None:
        self.recorder, self.entry, self.defines = recorder, entry, defines
        self.kind = Kind.EARLY if _lets_start_early(source, entry) else Kind.OVERLAPPED

    def launch(
        self,
        grid: object,
        threads: object,
        arguments: list[Any],
        *,
        shared_bytes: int = 0,
        cluster: int = 1,
        overlap: bool = False,
    ) -> None:
        del grid, threads, shared_bytes, cluster
        storages: dict[str, int] = {}
        numbers: dict[str, int] = {}
        for index, argument in enumerate(arguments):
            for name, value in _parts(str(index), argument):
                if isinstance(value, Tensor):
                    value = ctypes.c_void_p(value.data_ptr())
                if isinstance(value, ctypes.c_void_p):
                    if value.value:
                        storages[name] = self.recorder.storage_at(value.value)
                elif isinstance(value, int):
                    numbers[name] = value
        kind = self.kind if overlap else Kind.ORDINARY
        ahead = self._ahead(storages, numbers) if overlap else {}
        self.recorder.launches.append(Launch(self.entry, kind, set(storages.values()), ahead))

    def _ahead(self, storages: dict[str, int], numbers: dict[str, int]) -> dict[str, int]:
        names: tuple[str, ...] = ()
        if self.defines.get("BESIDE"):  # x: a tensor map, or the third argument
            names = ("x",) if "x" in storages else ("2",)
        elif self.entry == "hc_write_read" and self.defines["AHEAD"]:
            names = ("trunk", "read_mix", "write_mix", "stream_mix", "experts")
        elif self.entry == "moe_skinny" and numbers["early"]:
            names = ("ordered", "block_expert", "num_ordered", *(("x",) if self.defines["AHEAD"] else ()))
        return {name: storages[name] for name in names if name in storages}


def _parts(name: str, argument: object) -> Iterator[tuple[str, object]]:
    if not isinstance(argument, ctypes.Structure):
        yield name, argument
        return
    for field_name, kind, *_ in argument._fields_:
        value = getattr(argument, field_name)
        yield field_name, ctypes.c_void_p(value) if kind is ctypes.c_void_p else value
