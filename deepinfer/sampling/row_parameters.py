"""The parameters of a step's rows as plain arrays, one entry per row: what a sampler on an accelerator reads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from deepinfer.sampling.batch import Kind, kind_of
from deepinfer.sampling.state import SamplingState

KIND_NUMBERS = {Kind.GREEDY: 0, Kind.FULL: 1, Kind.TRUNCATED: 2}


@dataclass(frozen=True, slots=True)
class RowParameters:
    """Arrays of one entry per row; what is off has the value that changes nothing."""

    kind: np.ndarray
    """int32, see :data:`KIND_NUMBERS`."""
    temperature: np.ndarray
    """float32; 1 in greedy rows."""
    min_log_p: np.ndarray
    """float32: logarithm of min_p, -inf for off."""
    top_p: np.ndarray
    """float64, 1 for off."""
    top_k: np.ndarray
    """int32, the vocabulary for off."""
    seeds: np.ndarray
    """int64."""

    @classmethod
    def of(cls, states: Sequence[SamplingState], vocab_size: int) -> RowParameters:
        """The parameters of ``states``, one row each."""
        params = [state.params for state in states]
        kinds = [kind_of(state, vocab_size) for state in states]
        return cls(
            kind=np.asarray([KIND_NUMBERS[kind] for kind in kinds], dtype=np.int32),
            temperature=np.asarray([1.0 if each.is_greedy else each.temperature for each in params], dtype=np.float32),
            min_log_p=np.asarray([math.log(p.min_p) if p.min_p else -math.inf for p in params], dtype=np.float32),
            top_p=np.asarray([each.top_p for each in params], dtype=np.float64),
            top_k=np.asarray(
                [min(each.top_k, vocab_size) if each.top_k > 0 else vocab_size for each in params], dtype=np.int32
            ),
            seeds=np.asarray([state.seed_int64 for state in states], dtype=np.int64),
        )

    @property
    def truncates(self) -> bool:
        """Whether any row has top-p or top-k."""
        return bool((self.kind == KIND_NUMBERS[Kind.TRUNCATED]).any())
