"""Sampling, acceptance and what they leave on the device as one function over tensors that stay: what a graph replays.

Launched one by one, head, sampler and acceptance cost the host about half of its work of a step. A step takes the graph
if its forward was one, every row of it is sampled, and nothing edits the logits or asks for log-probabilities; see
:meth:`SampleStep.takes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from deepinfer.kernels import device_tokens as kernels
from deepinfer.kernels.compile_ahead import compiling
from deepinfer.kernels.sampling.verification import accept_prefix
from deepinfer.sampling.device_choice import DeviceChoice
from deepinfer.sampling.edits import GrammarMask
from deepinfer.sampling.row_parameters import RowParameters
from deepinfer.sampling.sampler import SamplerOutput
from deepinfer.sampling.state import SamplingState
from deepinfer.sampling.transfer import copy_into
from deepinfer.speculative.verification import Verified
from deepinfer.worker.device_tokens import SampledRows
from deepinfer.worker.fused_runner import FusedRunner
from deepinfer.worker.graph_set import GraphSet
from deepinfer.worker.step_verifier import Sampling


class Outputs(NamedTuple):
    """Of the function: fields of :class:`Verified`, of its rows and of :class:`SampledRows`."""

    token_ids: Tensor
    num_accepted: Tensor
    is_bad: Tensor
    acceptance: Tensor
    first_row: Tensor
    row_tokens: Tensor
    row_bad: Tensor
    positions: Tensor
    firsts: Tensor
    drafts: Tensor


class SampleStep:
    """Inputs of a step's sampling that stay where they are, and the function over them.

    Args:
        runner: with graphs of its forward, whose outputs are the other inputs.
        choice: draws tokens; not used by anybody else, since graphs keep the address of its memory.
    """

    def __init__(self, runner: FusedRunner, choice: DeviceChoice) -> None:
        assert runner.graphs is not None, "a runner without graphs"
        self._runner, self._choice, self._forwards = runner, choice, runner.graphs
        self._tokens, device, most = runner.device_tokens, runner.device, max(runner.graph_sizes)
        choice.reserve(most)
        self._cells = torch.zeros(2 * most, dtype=torch.int64, device=device)
        self._filled: tuple[int, bytes] | None = None
        self._parameters = RowParameters.neutral(most, runner.config.vocab_size, device)
        self._members: tuple[int, ...] = ()
        self._numbers = torch.arange(most + 1, device=device)
        self.graphs: GraphSet[Outputs] = GraphSet(
            "the sampler",
            runner.graph_sizes,
            self.run,
            self._clear,
            runner.graph_pool,
            self._forwards.graphs.is_captured,
        )

    def prepare(self, show_progress: bool) -> None:
        """Compile what :meth:`run` launches, and capture it, for all sizes that have a forward.

        Steps that no graph samples launch the same kernels: a prompt beside rows that decode, or grammars.
        """
        with torch.inference_mode():
            with compiling("kernels of the sampler", show_progress):
                for size in filter(self._forwards.graphs.is_captured, self.graphs.sizes):
                    self.run(size)
                    draw_masked(self._runner, self._choice, self._parameters.first(size))
            self.graphs.capture_all(show_progress)

    def takes(self, sampling: Sampling) -> bool:
        """Whether a graph can sample these rows: what their requests ask for is in :class:`RowParameters`."""
        if sampling.step.result.graph_size is None or not sampling.has_every_row:
            return False
        for owner, first in zip(sampling.owners, sampling.firsts, strict=True):
            state = owner.sampling
            if owner.grammar is not None or not state.is_plain or first + 1 < state.early_until:
                return False
        return True

    def sample(self, sampling: Sampling) -> tuple[Verified, SampledRows] | None:
        """Choose tokens, and record on the device where every sequence stands. Nobody waits.

        Args:
            sampling: of a step that :meth:`takes` allows, and whose graph was replayed last.
        Returns:
            what the step emits, and its rows; they hold until the next graph is replayed. None if the graph of this
            size could not be captured.
        """
        size = sampling.step.result.graph_size
        assert size is not None
        if self.graphs.size_for(size) != size:
            return None
        self._fill(sampling, size)
        found = self.graphs.replay(size)
        count, num_rows = len(sampling.chunks), sampling.num_rows
        sampled = SamplerOutput(found.row_tokens[:num_rows], found.row_bad[:num_rows], None, None, None, None, ())
        verified = Verified(
            found.token_ids[:count], found.num_accepted[:count], found.is_bad[:count], found.acceptance[:count],
            sampled, found.first_row[:count],
        )  # fmt: skip
        return verified, SampledRows(found.positions[:num_rows], found.firsts[:count], found.drafts[:count])

    def _fill(self, sampling: Sampling, size: int) -> None:
        table = np.zeros((2, self._most_requests(size)), np.int64)
        table[:, : len(sampling.chunks)] = sampling.num_sampled, sampling.slots
        filled = size, table.tobytes()
        if filled != self._filled:
            copy_into(self._table(size), table)
            self._filled = filled
        owners = [owner.sampling for owner in sampling.owners]
        if sampling.num_rows > len(owners):  # drafts
            owners = [state for state, count in zip(owners, sampling.num_sampled, strict=True) for _ in range(count)]
        self._set_members(owners)

    def _set_members(self, owners: Sequence[SamplingState]) -> None:
        members = tuple([owner.serial for owner in owners])
        if members != self._members:
            runner = self._runner
            self._parameters.copy_(RowParameters.of(owners, runner.config.vocab_size, runner.device))
            self._members = members

    def _most_requests(self, size: int) -> int:
        return min(size, self._runner.caches.geometry.num_slots)  # each has a row and a slot

    def _table(self, size: int) -> Tensor:
        """Samples and state slot of each request, ``[2, requests]``: 0 and the null slot in padding."""
        most = self._most_requests(size)
        return self._cells[: 2 * most].view(2, most)

    def _clear(self, size: int) -> None:
        self._table(size).zero_()
        self._filled = None

    def run(self, size: int) -> Outputs:
        """The function, behind a forward of ``size`` rows. Launches only."""
        trunk, read_mix, ngram_ids, table = self._forwards.graphs.outputs(size)
        counts, slots = self._table(size)
        tokens, geometry = self._tokens, self._runner.caches.geometry
        assert tokens is not None
        positions, firsts, drafts = kernels.sampled_rows(
            table, self._numbers[:size], counts, tokens.num_drafts, geometry.num_slots
        )
        logits = self._runner.fused.logits(trunk, read_mix)
        chosen, is_bad = self._choice.draw(logits.contiguous(), self._parameters.first(size), positions)
        found = accept_prefix(chosen, is_bad, drafts, counts)
        # The rows of padding begin behind the last: one more than there are.
        inside = self._numbers[: size + 1].clamp_max(size - 1)
        kernels.advance(
            slots, found.token_ids, found.num_accepted, firsts, found.first_row, inside, ngram_ids,
            tokens.newest, tokens.next_position, tokens.ngrams,
        )  # fmt: skip
        emitted = found.token_ids, found.num_accepted, found.is_bad, found.acceptance, found.first_row
        return Outputs(*emitted, chosen, is_bad, positions, firsts, drafts)


def draw_masked(runner: FusedRunner, choice: DeviceChoice, parameters: RowParameters) -> None:
    """Launch what rows under a grammar take, which no graph has."""
    vocab_size, rows = runner.config.vocab_size, torch.arange(len(parameters.kind), device=runner.device)
    logits = torch.empty(len(rows), vocab_size, device=runner.device)
    bits = torch.zeros(1, -(-vocab_size // 32), dtype=torch.int32, device=runner.device)
    choice.draw(logits, parameters, rows, GrammarMask(rows[:1], bits))


def compile_sampler(runner: FusedRunner, show_progress: bool) -> None:
    """Compile what sampler and acceptance launch, where there are no graphs of them: of steps that wait for the host.

    With the rejection verifier, which works on distributions in torch, that is what its drafts are drawn by.
    """
    config, device = runner.config, runner.device
    choice = DeviceChoice(config.vocab_size, [], device)
    choice.reserve(max(runner.graph_sizes))
    assert runner.device_tokens is not None
    with compiling("kernels of the sampler", show_progress), torch.inference_mode():
        for size in runner.graph_sizes:
            trunk = torch.zeros(size, config.hc_mult, config.hidden_size, dtype=torch.bfloat16, device=device)
            logits = runner.fused.logits(trunk, torch.zeros(size, config.hc_mult, device=device))
            parameters = RowParameters.neutral(size, config.vocab_size, device)
            rows = torch.arange(size, device=device)
            chosen, is_bad = choice.draw(logits.contiguous(), parameters, rows)
            draw_masked(runner, choice, parameters)
            drafts = torch.zeros(size, runner.device_tokens.num_drafts, dtype=torch.int64, device=device)
            accept_prefix(chosen, is_bad, drafts, torch.ones_like(rows))
