"""Where an n-gram table lives, and how its rows reach the device before the layer that needs them.

Each placement has two steps: :meth:`begin` as soon as the step's token ids are known, :meth:`rows` at the layer.

========  =====================================  =========================================================
device    device memory                          gather kernel at :meth:`begin`
pinned    pinned host memory, read by the GPU    the same kernel on a stream of its own, beside other work
mapped    a file                                 a host thread gathers, copies follow on a stream of its own
========  =====================================  =========================================================

``device`` and ``pinned`` can be captured in a CUDA graph. ``mapped`` cannot: it has to run before the graph's replay.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch
from torch import Tensor

from deepinfer.kernels import nvrtc
from deepinfer.kernels.engram.gather import NgramHash, dequantize_table_rows, engram_gather, engram_row_numbers


class HostTable(Protocol):
    """Random access to rows on the host; :class:`deepinfer.checkpoint.engram_table.EngramTable` is one."""

    width: int

    def gather(self, ids: Tensor) -> tuple[Tensor, Tensor]: ...


class EngramPlacement(Protocol):
    """Fetches the rows of a step. One step at a time."""

    def begin(self, ngram_ids: Tensor) -> None:
        """Start fetching for ``ngram_ids`` (int32 or int64 ``[rows, n]`` on the device)."""
        ...

    def rows(self) -> Tensor:
        """bfloat16 ``[rows, (n - 1) * heads * width]``, ready on the current stream."""
        ...


class DeviceTable:
    """Rows in device memory.

    Args:
        codes: uint8 ``[table rows, width]``; scales: uint8 ``[table rows, width / 32]``.
        constants: of the layer's hash.
        max_rows: rows of the largest step.
    """

    def __init__(self, codes: Tensor, scales: Tensor, constants: NgramHash, max_rows: int) -> None:
        self._codes, self._scales, self._constants = codes, scales, constants
        columns = constants.num_columns * codes.shape[1]
        self._buffer = torch.empty((max_rows, columns), dtype=torch.bfloat16, device=constants.primes.device)
        self._num_rows = 0

    def begin(self, ngram_ids: Tensor) -> None:
        self._num_rows = ngram_ids.shape[0]
        engram_gather(ngram_ids, self._constants, self._codes, self._scales, self._buffer[: self._num_rows])

    def rows(self) -> Tensor:
        return self._buffer[: self._num_rows]


class PinnedTable(DeviceTable):
    """Rows in pinned host memory (see :func:`pinned_bytes`), which the kernel reads over the bus.

    The gather has a stream of its own: it waits for the ids, and the layer waits for it.
    """

    def __init__(self, codes: Tensor, scales: Tensor, constants: NgramHash, max_rows: int) -> None:
        super().__init__(codes, scales, constants, max_rows)
        device = constants.primes.device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def begin(self, ngram_ids: Tensor) -> None:
        if self._stream is None:
            super().begin(ngram_ids)
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            super().begin(ngram_ids)
        ngram_ids.record_stream(self._stream)

    def rows(self) -> Tensor:
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        return super().rows()


class MappedTable:
    """Rows in a file: their numbers go to the host, a thread gathers, and the rows come back asynchronously.

    Args:
        table: rows on the host.
        constants: of the layer's hash.
        max_rows: rows of the largest step.
    """

    def __init__(self, table: HostTable, constants: NgramHash, max_rows: int) -> None:
        self._table, self._constants = table, constants
        self._device = constants.primes.device
        is_cuda = self._device.type == "cuda"
        count = max_rows * constants.num_columns
        groups = table.width // 32
        self._host_numbers = torch.empty(count, dtype=torch.int64, pin_memory=is_cuda)
        self._host_codes = torch.empty((count, table.width), dtype=torch.uint8, pin_memory=is_cuda)
        self._host_scales = torch.empty((count, groups), dtype=torch.uint8, pin_memory=is_cuda)
        self._codes = torch.empty((count, table.width), dtype=torch.uint8, device=self._device)
        self._scales = torch.empty((count, groups), dtype=torch.uint8, device=self._device)
        columns = constants.num_columns * table.width
        self._buffer = torch.empty((max_rows, columns), dtype=torch.bfloat16, device=self._device)
        self._stream = torch.cuda.Stream(self._device) if is_cuda else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engram-ahead")
        self._pending: Future[None] | None = None
        self._num_rows = 0

    def begin(self, ngram_ids: Tensor) -> None:
        self._num_rows = ngram_ids.shape[0]
        numbers = engram_row_numbers(ngram_ids, self._constants).view(-1)
        if nvrtc.is_noting():  # nobody computed the numbers: there are no such rows
            self._dequantize(numbers.numel())
            self._pending = Future()
            self._pending.set_result(None)
            return
        host = self._host_numbers[: numbers.numel()]
        known: torch.cuda.Event | None = None
        if self._stream is None:
            host.copy_(numbers)
        else:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                host.copy_(numbers, non_blocking=True)
                known = torch.cuda.Event()
                known.record(self._stream)
            numbers.record_stream(self._stream)
        self._pending = self._thread.submit(self._fetch, host, known)

    def rows(self) -> Tensor:
        """As :meth:`EngramPlacement.rows`; waits for the host's gather, not for the device."""
        assert self._pending is not None, "begin() comes first"
        self._pending.result()
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        return self._buffer[: self._num_rows]

    def _fetch(self, host: Tensor, known: torch.cuda.Event | None) -> None:
        # The stream is in order: once the numbers are here, the last step's copies out of the staging memory are over.
        if known is not None:
            known.synchronize()
        codes, scales = self._table.gather(host)
        count = host.numel()
        self._host_codes[:count].copy_(codes)
        self._host_scales[:count].copy_(scales)
        if self._stream is None:
            self._to_device(count)
            return
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._to_device(count)

    def _to_device(self, count: int) -> None:
        self._codes[:count].copy_(self._host_codes[:count], non_blocking=True)
        self._scales[:count].copy_(self._host_scales[:count], non_blocking=True)
        self._dequantize(count)

    def _dequantize(self, count: int) -> None:
        dequantize_table_rows(self._codes[:count], self._scales[:count], self._buffer[: self._num_rows])


def pinned_bytes(rows: int, width: int) -> Tensor:
    """Pinned host memory, uint8 ``[rows, width]``, of exactly that size (an allocator of torch rounds up to a power of
    two). It stays pinned while the process lives. Without CUDA it is ordinary memory.

    Raises:
        RuntimeError: the system refuses to pin so much.
    """
    memory = torch.empty((rows, width), dtype=torch.uint8)
    if torch.cuda.is_available():
        status = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
        if int(status) != 0:
            raise RuntimeError(f"pinning {memory.numel() / 1e9:.1f} GB of host memory failed: {status}")
    return memory
