"""The draft of a step as one function over device tensors: what a graph replays, and what runs where there is none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

from deepinfer.kernels import nvrtc
from deepinfer.kernels.compile_ahead import compiling
from deepinfer.layers.fused.draft_rows import DraftExpander
from deepinfer.models.fused_v41 import row_limits
from deepinfer.sampling.device_choice import DeviceChoice
from deepinfer.sampling.row_parameters import RowParameters
from deepinfer.sampling.transfer import copy_into
from deepinfer.speculative.verification import Verified
from deepinfer.worker.drafter import FollowingDrafts
from deepinfer.worker.fused_runner import FusedRunner
from deepinfer.worker.graph_set import GraphSet
from deepinfer.worker.warm_up import typical_lengths

Choose = Callable[[Tensor, Tensor, int], Tensor]
"""(logits ``[requests, vocab]`` float32, positions ``[requests]`` int64, slot) -> token ids ``[requests]`` int64."""


class DraftColumn(IntEnum):
    """Rows of the table ``[len(DraftColumn), requests]`` int32 that the host fills for a draft."""

    FIRST = 0
    """Position of the request's first sampled row; the drafts follow as many rows later as drafts were accepted. -1 for
    the padding of a graph."""
    FLOOR = 1
    """First position whose context keys are in the draft's rings."""
    SLOT = 2
    """State slot."""


class DraftStep:
    """Inputs of a draft that stay where they are, and the function over them.

    Everything is on the device: where a request stands and what its newest token is come from the results of its
    verification, which the host has not seen.

    Args:
        num_drafts: tokens per block. temperatures: of the confidence, ``[num_drafts]`` float32 on the device.
        choice: draws tokens; not used by anybody else, since graphs keep the address of its memory.
    """

    def __init__(self, runner: FusedRunner, num_drafts: int, temperatures: Tensor, choice: DeviceChoice) -> None:
        geometry, device = runner.caches.geometry, runner.device
        assert runner.fused_draft is not None, "a runner without a draft"
        self._runner, self._model, self._choice = runner, runner.fused_draft, choice
        self._num_drafts, self._temperatures = num_drafts, temperatures
        self._expander = DraftExpander(geometry, num_drafts, runner.plain_frequencies)
        self.max_requests = geometry.num_slots  # each has one
        most = self.max_requests
        choice.reserve(most)
        self._cells = torch.full((len(DraftColumn) * (most + 3),), -1, dtype=torch.int32, device=device)
        self._emitted = torch.zeros(most, num_drafts + 1, dtype=torch.int64, device=device)
        self._num_accepted = torch.zeros(most, dtype=torch.int64, device=device)
        self._is_bad = torch.zeros(most, dtype=torch.bool, device=device)
        self._parameters = RowParameters.neutral(most, runner.config.vocab_size, device)
        self._ahead = torch.arange(num_drafts, device=device)[:, None] + 2
        self.graphs: GraphSet[FollowingDrafts] | None = None
        if runner.draft_sizes:
            self.graphs = GraphSet("the draft", runner.draft_sizes, self.run, self._clear, runner.graph_pool)

    def prepare(self, show_progress: bool) -> None:
        """Compile what :meth:`run` launches, and capture it, for all sizes."""
        if self.graphs is None:
            return
        with torch.inference_mode():
            with compiling("kernels of the draft", show_progress):
                for size in (*self.graphs.sizes, *self._sizes_beyond(self.graphs.sizes[-1])):
                    self._clear(size)
                    self.run(size)
            self.graphs.capture_all(show_progress)

    def _sizes_beyond(self, largest: int) -> list[int]:
        """Requests above those of the largest graph, with blocks of typical lengths."""
        limits = row_limits(self._model.layers, self._runner.config.hidden_size)
        rows = typical_lengths(self.max_requests * self._num_drafts, limits)
        sizes = sorted({length // self._num_drafts for length in rows})
        return [size for size in sizes if size > largest]

    def set_parameters(self, parameters: RowParameters) -> None:
        """What the requests ask of their tokens, in their order; it stays until it is set again."""
        self._parameters.copy_(parameters)

    def draft(
        self, table: np.ndarray, verified: Verified, choose: Choose | None = None, firsts: Tensor | None = None
    ) -> FollowingDrafts:
        """Draft behind what a step emitted: one graph, or launches. Nobody waits.

        Args:
            table: ``[len(DraftColumn), requests]`` int32. verified: of the same requests, on the device.
            choose: draws the tokens of a slot, for requests whose logits are edited first; no graph has that. None
                draws with the parameters that were set.
            firsts: ``[requests]`` int32 on the device, where the host can only guess them.
        Returns:
            rows of bad requests mean nothing. They hold until the next graph is replayed.
        """
        count = table.shape[1]
        size = None if self.graphs is None or choose is not None else self.graphs.size_for(count)
        self._fill(table, verified, size or count, firsts)
        if self.graphs is None or size is None:
            return self.run(count, choose)
        return FollowingDrafts(*(tensor[:count] for tensor in self.graphs.replay(size)))

    def _fill(self, table: np.ndarray, verified: Verified, size: int, firsts: Tensor | None) -> None:
        count = table.shape[1]
        assert count <= size <= self.max_requests, f"{count} requests, {size=}, {self.max_requests=}"
        cells = self._table(size)
        padded = np.full(cells.shape, -1, np.int32)
        padded[:, :count] = table
        copy_into(cells, padded)
        if firsts is not None:
            cells[DraftColumn.FIRST, :count].copy_(firsts)
        self._emitted[:count].copy_(verified.token_ids)
        self._num_accepted[:count].copy_(verified.num_accepted)
        self._is_bad[:count].copy_(verified.is_bad)

    def _table(self, size: int) -> Tensor:
        """The table ``[len(DraftColumn), size or a little more]``, contiguous. Those of all sizes begin at the same
        place, and every column is aligned to 16 bytes: Triton compiles kernels anew for other alignments.
        """
        size = -(-size // 4) * 4
        return self._cells[: len(DraftColumn) * size].view(len(DraftColumn), size)

    def _clear(self, size: int) -> None:
        self._table(size).fill_(-1)

    def run(self, size: int, choose: Choose | None = None) -> FollowingDrafts:
        """The function: drafts of the first ``size`` requests of the inputs. Launches only."""
        table, accepted = self._table(size)[:, :size], self._num_accepted[:size]
        first = table[DraftColumn.FIRST]
        is_live = (first >= 0) & ~self._is_bad[:size]
        anchors = torch.where(is_live, first + accepted, -1)
        newest = self._emitted[:size].gather(1, accepted[:, None])[:, 0].clamp_min(0)
        # [drafts, requests], of the drafted tokens; every slot aligned to 16 bytes, as Triton compiles apart for others
        positions = torch.empty(self._num_drafts, size + size % 2, dtype=torch.int64, device=anchors.device)[:, :size]
        torch.add(anchors, self._ahead, out=positions)
        parameters = self._parameters.first(size)

        def draw(logits: Tensor, slot: int) -> Tensor:
            if choose is not None:
                return choose(logits, positions[slot], slot)
            drawn = self._choice.draw(logits.contiguous(), parameters, positions[slot])[0]
            return torch.zeros_like(drawn) if nvrtc.is_noting() else drawn  # an embedding is looked up with them

        rows = self._expander.expand(anchors.to(torch.int32), table[DraftColumn.FLOOR], table[DraftColumn.SLOT])
        proposal = self._model.draft(newest, self._num_drafts, rows, self._runner.caches, draw)
        logits = (proposal.confidence_logits / self._temperatures).clamp(-60, 60)
        return FollowingDrafts(proposal.token_ids, torch.sigmoid(logits))


def draft_table(firsts: Sequence[int], floors: Sequence[int], slots: Sequence[int]) -> np.ndarray:
    """The host's part of a draft's inputs ``[len(DraftColumn), requests]`` int32."""
    columns = {DraftColumn.FIRST: firsts, DraftColumn.FLOOR: floors, DraftColumn.SLOT: slots}
    return np.array([columns[column] for column in DraftColumn], dtype=np.int32)
