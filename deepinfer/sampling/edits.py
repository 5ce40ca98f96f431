"""Single entries of the logits that a request changes, gathered over the rows of a batch as flat lists.

All lists hold (row, token) pairs without duplicates, so that writing them is deterministic on any device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from deepinfer.sampling.state import SamplingState
from deepinfer.sampling.transfer import to_device


@dataclass(frozen=True, slots=True)
class TokenEdits:
    """Allowed ids and biases; they depend on the membership of the batch only. None where no row has any."""

    allowed_only_rows: Tensor | None
    """int64: rows with an allow list."""
    allowed: tuple[Tensor, Tensor] | None
    """Rows and tokens that stay, int64 ``[pairs]`` each."""
    biased: tuple[Tensor, Tensor] | None
    """Rows and tokens, int64 ``[pairs]`` each."""
    bias: Tensor | None
    """float32 ``[pairs]``."""

    @classmethod
    def of(cls, states: Sequence[SamplingState], device: torch.device) -> TokenEdits:
        allow_rows, allow_pairs, bias_pairs, biases = [], [], [], []
        for row, state in enumerate(states):
            allowed = state.params.allowed_token_ids
            if allowed is not None:
                allow_rows.append(row)
                allow_pairs += [(row, token) for token in sorted(set(allowed))]
            for token, bias in (state.params.logit_bias or {}).items():
                bias_pairs.append((row, token))
                biases.append(bias)
        return cls(
            allowed_only_rows=to_device(np.asarray(allow_rows, dtype=np.int64), device) if allow_rows else None,
            allowed=_pair_tensors(allow_pairs, device),
            biased=_pair_tensors(bias_pairs, device),
            bias=to_device(np.asarray(biases, dtype=np.float32), device) if biases else None,
        )

    @property
    def is_empty(self) -> bool:
        return self.allowed is None and self.biased is None


@dataclass(frozen=True, slots=True)
class EarlyBans:
    """Tokens that cannot be sampled before a position (EOS and stop ids at the start of an output)."""

    rows: Tensor
    tokens: Tensor
    until: Tensor
    """int64 ``[pairs]``: first position at which the token is free. Compared on the device, whose positions are the
    exact ones."""


@dataclass(frozen=True, slots=True)
class PenaltyEntries:
    """Tokens seen before, with the penalties of their rows; ``[pairs]`` each."""

    rows: Tensor
    tokens: Tensor
    counts: Tensor
    """float32: occurrences in the output; 0 for tokens of the prompt alone."""
    repetition: Tensor
    """float32, as are the next two."""
    frequency: Tensor
    presence: Tensor


@dataclass(frozen=True, slots=True)
class GrammarMask:
    """Tokens that a grammar allows, as bits."""

    rows: Tensor
    """int64 ``[constrained]``, distinct rows of the batch."""
    bits: Tensor
    """int32 ``[constrained, ceil(vocab / 32)]``; bit ``i % 32`` of word ``i // 32`` is 1 where token i is allowed."""


def early_bans(
    states: Sequence[SamplingState], positions: Sequence[int], rows: Sequence[int], device: torch.device
) -> EarlyBans | None:
    """The bans that can still hold, of ``rows``; None when all outputs are past them."""
    pairs, until = [], []
    for row in rows:
        state = states[row]
        if positions[row] < state.early_until:
            for token, position in state.early_bans:
                pairs.append((row, token))
                until.append(position)
    tensors = _pair_tensors(pairs, device)
    if tensors is None:
        return None
    return EarlyBans(*tensors, to_device(np.asarray(until, dtype=np.int64), device))


def penalty_entries(
    states: Sequence[SamplingState],
    pending: Sequence[Sequence[int]] | None,
    rows: Sequence[int],
    device: torch.device,
) -> PenaltyEntries | None:
    """The tokens to penalise in ``rows``; None if there are none."""
    parts = []
    for row in rows:
        counts = states[row].counts
        assert counts is not None, f"{row=} has no counts"
        parts.append(counts.snapshot(() if pending is None else pending[row]))
    lengths = [len(ids) for ids, _counts in parts]
    if not sum(lengths):
        return None
    params = [states[row].params for row in rows]

    def spread(values: list[float]) -> Tensor:
        return to_device(np.repeat(np.asarray(values, dtype=np.float32), lengths), device)

    return PenaltyEntries(
        rows=to_device(np.repeat(np.asarray(rows, dtype=np.int64), lengths), device),
        tokens=to_device(np.concatenate([ids for ids, _counts in parts]), device),
        counts=to_device(np.concatenate([counts for _ids, counts in parts]).astype(np.float32), device),
        repetition=spread([each.repetition_penalty for each in params]),
        frequency=spread([each.frequency_penalty for each in params]),
        presence=spread([each.presence_penalty for each in params]),
    )


def _pair_tensors(pairs: list[tuple[int, int]], device: torch.device) -> tuple[Tensor, Tensor] | None:
    if not pairs:
        return None
    rows, tokens = np.asarray(pairs, dtype=np.int64).T.copy()
    return to_device(rows, device), to_device(tokens, device)
