"""The parameters of a step's rows, one entry per row: what the kernels of an accelerator read."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from deepinfer.sampling.state import SamplingState
from deepinfer.sampling.transfer import to_device


class Kind(enum.Enum):
    """How the token of a row is found."""

    GREEDY = "greedy"  # arg-max
    FULL = "full"  # drawn from the whole vocabulary
    TRUNCATED = "truncated"  # drawn from what top-p and top-k leave


KIND_NUMBERS = {Kind.GREEDY: 0, Kind.FULL: 1, Kind.TRUNCATED: 2}
"""As the kernels count them."""


def kind_of(state: SamplingState, vocab_size: int) -> Kind:
    """The path of a row with the parameters of ``state``."""
    params = state.params
    if params.is_greedy:
        return Kind.GREEDY
    is_truncated = params.top_p < 1.0 or 0 < params.top_k < vocab_size
    return Kind.TRUNCATED if is_truncated else Kind.FULL


def bounded_top_k(top_k: int, vocab_size: int) -> int:
    """``top_k`` as a number of tokens: the vocabulary where it is off."""
    return min(top_k, vocab_size) if top_k > 0 else vocab_size


@dataclass(frozen=True, slots=True)
class RowParameters:
    """Tensors ``[rows]``; what is off has the value that changes nothing. See :mod:`deepinfer.kernels.sampling`."""

    kind: Tensor
    """int32, see :data:`KIND_NUMBERS`."""
    temperature: Tensor
    """float32, 1 in greedy rows."""
    min_log_p: Tensor
    """float32: logarithm of min_p, -inf for off."""
    top_p: Tensor
    """float64, 1 for off."""
    top_k: Tensor
    """int32, the vocabulary for off."""
    seeds: Tensor
    """int64."""
    truncates: bool
    """Whether any row is truncated."""

    @classmethod
    def of(cls, states: Sequence[SamplingState], vocab_size: int, device: torch.device) -> RowParameters:
        """The parameters of ``states``, one row each, in one transfer."""
        params = [state.params for state in states]
        kinds = [kind_of(state, vocab_size) for state in states]
        columns: dict[str, np.ndarray] = {
            "top_p": np.asarray([each.top_p for each in params], np.float64),
            "seeds": np.asarray([state.seed_int64 for state in states], np.int64),
            "kind": np.asarray([KIND_NUMBERS[kind] for kind in kinds], np.int32),
            "temperature": np.asarray([1.0 if each.is_greedy else each.temperature for each in params], np.float32),
            "min_log_p": np.asarray([math.log(each.min_p) if each.min_p else -math.inf for each in params], np.float32),
            "top_k": np.asarray([bounded_top_k(each.top_k, vocab_size) for each in params], np.int32),
        }
        # Each column is aligned to 16 bytes: Triton compiles kernels anew for other alignments.
        room = 16 * -(-8 * len(states) // 16)
        packed = np.zeros((len(columns), room), np.uint8)
        for place, column in zip(packed, columns.values(), strict=True):
            place[: column.nbytes] = column.view(np.uint8)
        whole = to_device(packed, device)
        tensors = {
            name: place[: column.nbytes].view(torch.from_numpy(column).dtype)
            for place, (name, column) in zip(whole, columns.items(), strict=True)
        }
        return cls(**tensors, truncates=Kind.TRUNCATED in kinds)

    @classmethod
    def neutral(cls, rows: int, vocab_size: int, device: torch.device) -> RowParameters:
        """Greedy rows, to be overwritten by :meth:`copy_`. ``truncates`` is true: any row may become truncated."""

        def full(value: float, dtype: torch.dtype) -> Tensor:
            return torch.full((rows,), value, dtype=dtype, device=device)

        return cls(
            kind=full(KIND_NUMBERS[Kind.GREEDY], torch.int32),
            temperature=full(1.0, torch.float32),
            min_log_p=full(-math.inf, torch.float32),
            top_p=full(1.0, torch.float64),
            top_k=full(vocab_size, torch.int32),
            seeds=full(0, torch.int64),
            truncates=True,
        )

    def copy_(self, other: RowParameters) -> None:
        """Take over the rows of ``other``, which may be fewer, in place; rows behind them become greedy."""
        count = len(other.kind)
        for name in self.tensor_names():
            getattr(self, name)[:count].copy_(getattr(other, name))
        self.kind[count:].fill_(KIND_NUMBERS[Kind.GREEDY])

    def first(self, rows: int) -> RowParameters:
        """Views of the first rows."""
        views = {name: getattr(self, name)[:rows] for name in self.tensor_names()}
        return RowParameters(**views, truncates=self.truncates)

    @classmethod
    def tensor_names(cls) -> list[str]:
        """The fields that are tensors."""
        return [field.name for field in fields(cls) if field.name != "truncates"]
