"""``SamplingBatch``: the parameters of all rows of a step as tensors, and the builder that reuses what it can."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from deepinfer.sampling.edits import EarlyBans, GrammarMask, PenaltyEntries, TokenEdits, early_bans, penalty_entries
from deepinfer.sampling.row_parameters import Kind, RowParameters, bounded_top_k, kind_of
from deepinfer.sampling.state import SamplingState
from deepinfer.sampling.transfer import has_kernels, to_device

Rows = slice | Tensor
"""Selects rows of a batch: a slice (a view, free) where they are consecutive, else int64 indices."""

# rows * vocab of a group at most. It bounds the sampler's temporaries to 0.5 GiB, on a CPU to what its caches can hold.
_GROUP_ELEMENTS = 1 << 24
_GROUP_ELEMENTS_CPU = 1 << 20
_REMEMBERED = 4  # memberships: prefill and decode steps alternate


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows that take the same path through the sampler, with their parameters."""

    kind: Kind
    rows: Rows
    wants_logprobs: bool
    """Log-probabilities of the processed distribution."""
    num_top: int
    """Alternatives to extract: the most that a row of the group asks for."""
    seeds: Tensor
    """int64 ``[rows]``."""
    temperature: Tensor | None
    """float32 ``[rows, 1]``; None if it is 1 in all rows."""
    min_log_p: Tensor | None
    """float32 ``[rows, 1]``; None if min_p is off in all rows."""
    top_p: Tensor | None
    """float64 ``[rows]``; None if off."""
    top_k: Tensor | None
    """int64 ``[rows]``; None if off."""
    max_top_k: int


@dataclass(frozen=True, slots=True)
class RowConstants:
    """What depends only on which sequences are in which rows."""

    groups: tuple[RowGroup, ...]
    raw_groups: tuple[tuple[Rows, int], ...]
    """Rows that want raw log-probabilities, and how many alternatives."""
    top_counts: tuple[int, ...]
    """Alternatives that each row asks for."""
    wants_logprobs: bool
    edits: TokenEdits
    early_rows: tuple[int, ...]
    """Rows that have tokens banned at the start of the output."""
    golden_rows: tuple[int, ...]
    penalty_rows: tuple[int, ...]
    parameters: RowParameters | None = None
    """On a GPU."""


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """Everything that :class:`~deepinfer.sampling.sampler.Sampler` needs besides the logits."""

    num_rows: int
    vocab_size: int
    positions: Tensor
    """int64 ``[rows]``: absolute position that each sampled token will have. Keys the random numbers. May be replaced
    (:func:`dataclasses.replace`) by a tensor that the device corrected."""
    constants: RowConstants
    early: EarlyBans | None
    penalties: PenaltyEntries | None
    forced: Tensor | None
    """int64 ``[rows]``: the token that teacher forcing demands, -1 for none."""
    grammar: GrammarMask | None = None

    @classmethod
    def build(
        cls, states: Sequence[SamplingState], positions: Sequence[int], *, device: torch.device | None = None
    ) -> SamplingBatch:
        """Build once, without a cache; see :meth:`SamplingBatchBuilder.build`."""
        return SamplingBatchBuilder(states[0].vocab_size, device=device).build(states, positions)

    def with_grammar(self, grammar: GrammarMask) -> SamplingBatch:
        """The same batch with the masks of structured output, which are ready later than the rest."""
        return replace(self, grammar=grammar)


class SamplingBatchBuilder:
    """Builds the batch of each step; a step with the same sequences in the same rows costs a few microseconds.

    Owned by the sampling rank. Its cache is keyed by the states' serial numbers, whose parameters never change.

    Args:
        vocab_size: width of the logits.
        device: where the logits are.
        every_logprob: give log-probabilities for all rows, asked for or not.
    """

    def __init__(self, vocab_size: int, *, device: torch.device | None = None, every_logprob: bool = False) -> None:
        self.vocab_size = vocab_size
        self.device = device or torch.device("cpu")
        self.every_logprob = every_logprob
        self._remembered: OrderedDict[tuple[int, ...], RowConstants] = OrderedDict()

    def build(
        self,
        states: Sequence[SamplingState],
        positions: Sequence[int],
        pending: Sequence[Sequence[int]] | None = None,
        on_device: Tensor | None = None,
    ) -> SamplingBatch:
        """The batch for one row per entry. A state appears once per row that it samples (verification: several).

        Args:
            states: owner of each row.
            positions: absolute position that the row's token will have (``state.next_position`` for the next one).
                Where only the device has them, give lower bounds.
            pending: per row, tokens assumed between the state's output and this row (the drafts before it); they
                count for penalties. None for none.
            on_device: int64 ``[rows]`` the positions as the device has them; None if the host knows them.
        """
        assert len(states) == len(positions), f"{len(states)} states, {len(positions)} positions"
        constants = self._constants(states)
        forced = None
        if constants.golden_rows:
            ids = np.full(len(states), -1, dtype=np.int64)
            for row in constants.golden_rows:
                ids[row] = states[row].golden_at(positions[row])
            forced = to_device(ids, self.device)
        return SamplingBatch(
            num_rows=len(states),
            vocab_size=self.vocab_size,
            positions=to_device(np.asarray(positions, dtype=np.int64), self.device) if on_device is None else on_device,
            constants=constants,
            early=early_bans(states, positions, constants.early_rows, self.device),
            penalties=penalty_entries(states, pending, constants.penalty_rows, self.device),
            forced=forced,
        )

    def _constants(self, states: Sequence[SamplingState]) -> RowConstants:
        key = tuple([state.serial for state in states])
        constants = self._remembered.get(key)
        if constants is None:
            constants = self._make_constants(states)
            self._remembered[key] = constants
            if len(self._remembered) > _REMEMBERED:
                self._remembered.popitem(last=False)
        else:
            self._remembered.move_to_end(key)
        return constants

    def _make_constants(self, states: Sequence[SamplingState]) -> RowConstants:
        params = [state.params for state in states]
        wants = [self.every_logprob or each.wants_logprobs for each in params]
        raw_rows = [row for row, each in enumerate(params) if wants[row] and each.logprobs_mode == "raw"]
        kinds: dict[tuple[Kind, bool], list[int]] = {}
        for row, state in enumerate(states):
            processed = wants[row] and state.params.logprobs_mode == "processed"
            kinds.setdefault((kind_of(state, self.vocab_size), processed), []).append(row)
        return RowConstants(
            groups=tuple(
                self._make_group(kind, part, wants_processed, states)
                for (kind, wants_processed), rows in kinds.items()
                for part in self._parts(rows)
            ),
            raw_groups=tuple(
                (self._selector(part), max(params[row].top_logprobs for row in part)) for part in self._parts(raw_rows)
            ),
            top_counts=tuple(each.top_logprobs for each in params),
            wants_logprobs=any(wants),
            edits=TokenEdits.of(states, self.device),
            early_rows=tuple(row for row, state in enumerate(states) if state.early_bans),
            golden_rows=tuple(row for row, each in enumerate(params) if each.golden_token_ids),
            penalty_rows=tuple(row for row, state in enumerate(states) if state.counts is not None),
            parameters=RowParameters.of(states, self.vocab_size, self.device) if has_kernels(self.device) else None,
        )

    def _parts(self, rows: list[int]) -> list[list[int]]:
        elements = _GROUP_ELEMENTS_CPU if self.device.type == "cpu" else _GROUP_ELEMENTS
        step = max(1, elements // self.vocab_size)
        return [rows[start : start + step] for start in range(0, len(rows), step)]

    def _selector(self, rows: list[int]) -> Rows:
        if rows[-1] - rows[0] + 1 == len(rows):  # ascending and distinct
            return slice(rows[0], rows[-1] + 1)
        return to_device(np.asarray(rows, dtype=np.int64), self.device)

    def _make_group(
        self, kind: Kind, rows: list[int], wants_logprobs: bool, states: Sequence[SamplingState]
    ) -> RowGroup:
        owners = [states[row] for row in rows]
        params = [state.params for state in owners]
        sampled = kind is not Kind.GREEDY
        truncated = kind is Kind.TRUNCATED
        # A min_p of 0 drops nothing, which as a logarithm is -inf.
        min_log_p = [math.log(each.min_p) if each.min_p else -math.inf for each in params]
        top_k = [bounded_top_k(each.top_k, self.vocab_size) for each in params]

        def column(values: list[float] | list[int], dtype: type[np.generic], is_used: bool) -> Tensor | None:
            return to_device(np.asarray(values, dtype=dtype), self.device) if is_used else None

        temperature = column(
            [each.temperature for each in params],
            np.float32,
            sampled and any(each.temperature != 1.0 for each in params),
        )
        low = column(min_log_p, np.float32, sampled and any(each.min_p for each in params))
        return RowGroup(
            kind=kind,
            rows=self._selector(rows),
            wants_logprobs=wants_logprobs,
            num_top=max(each.top_logprobs for each in params) if wants_logprobs else 0,
            seeds=to_device(np.asarray([state.seed_int64 for state in owners], dtype=np.int64), self.device),
            temperature=None if temperature is None else temperature[:, None],
            min_log_p=None if low is None else low[:, None],
            top_p=column([each.top_p for each in params], np.float64, truncated and any(p.top_p < 1.0 for p in params)),
            top_k=column(top_k, np.int64, truncated and min(top_k) < self.vocab_size),
            max_top_k=max(top_k),
        )
