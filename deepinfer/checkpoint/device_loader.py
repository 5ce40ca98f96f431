"""Weights from any source into device memory, with progress: peak memory is the weights and one tensor."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm import tqdm

from deepinfer.checkpoint.device_dummy import DeviceDummyCheckpoint, device_table_rows
from deepinfer.checkpoint.dummy import DummyEngramTable
from deepinfer.checkpoint.engram_table import EngramTable
from deepinfer.checkpoint.expert_stack import ExpertStack, read_expert_stack
from deepinfer.checkpoint.stored import StoredTensor, TensorSource
from deepinfer.checkpoint.tensor_specs import Kind

logger = logging.getLogger(__name__)

_TABLE_CHUNK_ROWS = 1 << 20
"""Rows of an n-gram table that are copied at a time: 276 MB of the released ones."""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What loading took."""

    num_bytes: int
    elapsed_s: float
    peak_bytes: int
    """Most device memory that this process held while loading; 0 on a CPU."""

    @property
    def gb_per_s(self) -> float:
        return self.num_bytes / 1e9 / self.elapsed_s

    def __str__(self) -> str:
        peak = f", peak {self.peak_bytes / 1e9:.2f} GB of device memory" if self.peak_bytes else ""
        return f"loaded {self.num_bytes / 1e9:.2f} GB in {self.elapsed_s:.2f} s ({self.gb_per_s:.2f} GB/s){peak}"


class DeviceLoader:
    """Hands out a model's tensors on ``device`` and counts the bytes. Call :meth:`close` when all are loaded.

    Args:
        source: a checkpoint, or synthetic weights (made on the device where :class:`DeviceDummyCheckpoint` makes them).
        device: where the tensors go.
        show_progress: a bar in bytes and GB/s on stderr.
    """

    def __init__(self, source: TensorSource, device: torch.device, *, show_progress: bool = False) -> None:
        self.source = source
        self.device = device
        total = sum(spec.num_bytes for spec in source.specs.values() if spec.kind is not Kind.TABLE)
        self._bar = tqdm(total=total, unit="B", unit_scale=True, desc="weights", disable=not show_progress)
        self._begin_s = time.perf_counter()
        self._num_bytes = 0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def tensor(self, name: str) -> StoredTensor:
        """One tensor in stored form. Raises as :meth:`TensorSource.tensor`."""
        stored = self.source.tensor(name)
        self._count(stored.num_bytes)
        scale = None if stored.scale is None else stored.scale.to(self.device)
        return StoredTensor(stored.name, stored.kind, stored.shape, stored.data.to(self.device), scale)

    def expert_stack(self, block: str, projection: str) -> ExpertStack:
        """``w1``, ``w2`` or ``w3`` of all routed experts of a block (``layers.L`` or ``mtp.I``), stacked.

        Raises:
            CheckpointError: there is no such block, or its experts are damaged.
        """
        if isinstance(self.source, DeviceDummyCheckpoint) and self.source.device == self.device:
            stack = self.source.expert_stack(block, projection)
            self._count(stack.num_bytes)
            return stack
        return read_expert_stack(
            self.source, block, projection, self.device, lambda stored: self._count(stored.num_bytes)
        )

    def engram_table(self, layer_id: int) -> EngramTable:
        """The n-gram table of a layer on the host; see :func:`copy_table` for one in other memory."""
        return self.source.engram_table(layer_id)

    def close(self) -> LoadReport:
        """Wait for the copies and say what loading took."""
        peak = 0
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            peak = torch.cuda.max_memory_allocated(self.device)
        self._bar.close()
        report = LoadReport(self._num_bytes, max(time.perf_counter() - self._begin_s, 1e-9), peak)
        logger.info("%s", report)
        return report

    def _count(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        self._bar.update(num_bytes)


def copy_table(table: EngramTable, codes: Tensor, scales: Tensor) -> None:
    """Copy a whole n-gram table into ``codes`` uint8 ``[rows, width]`` and ``scales`` uint8 ``[rows, width / 32]``.

    The tensors may lie in device or in (pinned) host memory. Synthetic rows are made on the tensors' device.

    Raises:
        CheckpointError: a scale of the table is NaN.
    """
    for start in range(0, table.rows, _TABLE_CHUNK_ROWS):
        stop = min(start + _TABLE_CHUNK_ROWS, table.rows)
        if isinstance(table, DummyEngramTable):
            part = device_table_rows(table, torch.arange(start, stop, device=codes.device))
        else:
            part = table.read(start, stop)
        codes[start:stop].copy_(part[0])
        scales[start:stop].copy_(part[1])
