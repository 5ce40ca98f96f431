"""CUDA graphs of short steps: one per number of rows, replayed with the inputs of the step copied in front."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from deepinfer.layers.fused.device_rows import Column
from deepinfer.worker.device_step import HostTable

if TYPE_CHECKING:
    from deepinfer.worker.fused_runner import FusedRunner


class DecodeGraphs:
    """Captured forwards. A step takes the smallest graph that holds its rows; the rest is padding.

    Padding rows have position -1: they see no key, write nothing and reach no expert.

    Args:
        sizes: rows of the graphs. max_blocks: blocks per sequence that the graphs can address.
    """

    def __init__(self, runner: FusedRunner, sizes: Sequence[int], max_blocks: int) -> None:
        self._runner = runner
        self.sizes = sorted(sizes)
        largest, device = self.sizes[-1], runner.device
        self._table = torch.zeros(len(Column), largest, dtype=torch.int32, device=device)
        self._table[Column.POSITION] = -1
        self._tables = torch.zeros(largest, max_blocks, dtype=torch.int32, device=device)
        self._ngrams = None
        if runner.ngram_size:
            self._ngrams = torch.full((largest, runner.ngram_size), -1, dtype=torch.int32, device=device)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor, Tensor, Tensor | None]] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def covers(self, host: HostTable) -> bool:
        """Whether a graph can run this step."""
        return host.num_rows <= self.sizes[-1] and host.block_tables.shape[1] <= self._tables.shape[1]

    def capture_all(self) -> None:
        """Capture every size, largest first, so that the smaller ones live in the memory of the largest."""
        for size in reversed(self.sizes):
            self._capture(size)

    def replay(self, host: HostTable, ngrams: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Run the step. Returns trunk, read mix and n-gram ids of its rows; they hold until the next replay.

        Args:
            ngrams: ``[rows, n]`` int32 on the device.
        """
        count = host.num_rows
        size = next(size for size in self.sizes if size >= count)
        if size not in self._graphs:
            self._capture(size)
        self._fill(host, ngrams, size)
        graph, trunk, read_mix, known = self._graphs[size]
        graph.replay()
        return trunk[:count], read_mix[:count], None if known is None else known[:count]

    def _fill(self, host: HostTable, ngrams: Tensor | None, size: int) -> None:
        move, count = self._runner.move, host.num_rows
        table = np.zeros((len(Column), size), np.int32)
        table[Column.POSITION] = -1
        table[:, :count] = host.table
        self._table[:, :size].copy_(move(table), non_blocking=True)
        sequences, blocks = host.block_tables.shape
        self._tables[:sequences, :blocks].copy_(move(host.block_tables), non_blocking=True)
        if self._ngrams is not None and ngrams is not None:
            self._ngrams[:count].copy_(ngrams)

    def _capture(self, size: int) -> None:
        runner = self._runner

        def forward() -> tuple[Tensor, Tensor, Tensor | None]:
            ngrams = None if self._ngrams is None else self._ngrams[:size]
            step = runner.step_of(self._table[:, :size], self._tables[:size], ngrams, keys_first=True)
            return *runner.forward(step), step.ngram_ids

        table = self._table.clone()
        self._table[Column.POSITION] = -1  # warm-up and capture must not touch a cache
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                forward()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            trunk, read_mix, known = forward()
        self._graphs[size] = graph, trunk, read_mix, known
        self._table.copy_(table)
