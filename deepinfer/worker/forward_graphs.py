"""CUDA graphs of steps: one per number of rows, replayed with the inputs of the step copied in front."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from deepinfer.layers.fused.device_rows import NUM_COLUMNS, Column
from deepinfer.sampling.transfer import copy_into
from deepinfer.worker.device_step import HostTable
from deepinfer.worker.graph_set import GraphPool, GraphSet

if TYPE_CHECKING:
    from deepinfer.worker.fused_runner import FusedRunner

Forward = tuple[Tensor, Tensor, Tensor | None, Tensor]
"""Trunk ``[rows, M, hidden]``, read mix ``[rows, M]``, n-gram ids ``[rows, n]``, completed table."""


class ForwardGraphs:
    """Captured forwards. A step takes the smallest graph that holds its rows; the rest is padding.

    A graph knows no chunks, so the index scores every row on its own.

    Padding rows have position -1: they see no key, write nothing and reach no expert.

    Args:
        name: of these steps, for messages.
        sizes: rows of the graphs. max_blocks: blocks per sequence that the graphs can address.
        keys_first: of :class:`~deepinfer.layers.fused.device_rows.DeviceRows`. True for steps of short chunks only,
            decoding and verification; False takes any, with some launches more.
    """

    def __init__(
        self,
        runner: FusedRunner,
        sizes: Sequence[int],
        max_blocks: int,
        pool: GraphPool,
        name: str = "the backbone",
        keys_first: bool = True,
    ) -> None:
        self._runner, self._keys_first = runner, keys_first
        largest, device = max(sizes), runner.device
        self._cells = torch.zeros(NUM_COLUMNS * largest, dtype=torch.int32, device=device)
        self._tables = torch.zeros(largest, max_blocks, dtype=torch.int32, device=device)
        self._last_tables = np.zeros((0, 0), np.int32)
        """Of the step before. A table stays the same for 128 steps, so few mostly do and hundreds hardly ever."""
        self._ngrams = None
        if runner.ngram_size:
            self._ngrams = torch.full((largest, runner.ngram_size), -1, dtype=torch.int32, device=device)
        self.graphs: GraphSet[Forward] = GraphSet(name, sizes, self.launch, self._clear, pool)

    def replay(self, host: HostTable, ngrams: Tensor | None) -> tuple[Forward, int] | None:
        """Run the step. Returns what its rows gave, which holds until the next replay, and the size of the graph.

        None if no graph can run it: it has too many rows or blocks, or no size that holds it could be captured.

        Args:
            ngrams: ``[rows, n]`` int32 on the device; None where the device knows the ids of all rows.
        """
        count = host.num_rows
        if host.block_tables.shape[1] > self._tables.shape[1]:
            return None
        size = self.graphs.size_for(count)
        if size is None:
            return None
        self._fill(host, ngrams, size)
        trunk, read_mix, known, table = self.graphs.replay(size)
        return (trunk[:count], read_mix[:count], None if known is None else known[:count], table[:, :count]), size

    def _fill(self, host: HostTable, ngrams: Tensor | None, size: int) -> None:
        count = host.num_rows
        table = np.zeros((NUM_COLUMNS, size), np.int32)
        table[Column.POSITION] = -1
        table[:, :count] = host.table
        copy_into(self._table(size), table)
        if not np.array_equal(host.block_tables, self._last_tables):
            sequences, blocks = host.block_tables.shape
            self._tables[:sequences, :blocks].copy_(self._runner.move(host.block_tables))
            self._last_tables = host.block_tables.copy()
        if self._ngrams is not None and ngrams is not None:
            self._ngrams[:count].copy_(ngrams)

    def _table(self, size: int) -> Tensor:
        """The table ``[len(Column), size]`` of a graph, contiguous. Those of all sizes begin at the same place."""
        return self._cells[: NUM_COLUMNS * size].view(NUM_COLUMNS, size)

    def _clear(self, size: int) -> None:
        self._table(size).zero_()[Column.POSITION] = -1

    def launch(self, size: int) -> Forward:
        """What a graph of ``size`` rows replays, launch by launch."""
        runner = self._runner
        ngrams = None if self._ngrams is None else self._ngrams[:size]
        step = runner.step_of(self._table(size), self._tables[:size], ngrams, self._keys_first)
        assert step.table is not None
        return *runner.forward(step), step.ngram_ids, step.table
