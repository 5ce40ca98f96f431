"""Newest tokens by state slot in the device's memory, so that a step can be launched before the host has seen them."""

from __future__ import annotations

import torch
from torch import Tensor

FROM_DEVICE = -2
"""In a table of n-gram ids: this row's ids are known to the device only."""


class DeviceTokens:
    """Written by the sampler of a step, read by the forward of the next.

    Args:
        num_slots: state slots. ngram_size: ids that the n-gram hash sees, the newest included; 0 keeps none.
    """

    def __init__(self, num_slots: int, ngram_size: int, device: torch.device) -> None:
        self.newest = torch.zeros(num_slots, dtype=torch.int32, device=device)
        self.ngrams = torch.full((num_slots, max(ngram_size, 1)), -1, dtype=torch.int32, device=device)
        """Newest first; -1 before the start of a sequence."""

    def fill_ngrams(self, ngram_ids: Tensor, slots: Tensor) -> Tensor:
        """``ngram_ids`` ``[rows, n]`` int32 with the slot's own where a row begins with :data:`FROM_DEVICE`."""
        return torch.where(ngram_ids[:, :1] == FROM_DEVICE, self.ngrams[slots], ngram_ids)

    def advance(self, slots: Tensor, token_ids: Tensor, ngram_ids: Tensor | None) -> None:
        """Record what was sampled.

        Args:
            slots: ``[samples]`` int64, distinct. token_ids: ``[samples]`` int64.
            ngram_ids: ``[samples, n]`` of the rows that were sampled from, filled in.
        """
        newest = token_ids.to(torch.int32)
        self.newest.index_copy_(0, slots, newest)
        if ngram_ids is not None:
            self.ngrams.index_copy_(0, slots, torch.cat((newest[:, None], ngram_ids[:, :-1]), dim=1))
