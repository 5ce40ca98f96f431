"""The sampler's choice on a GPU: the same tokens in two or three launches (see :mod:`deepinfer.kernels.sampling`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from deepinfer.kernels.sampling.gumbel import pack_gumbel_table
from deepinfer.kernels.sampling.sampler import SamplingRows, SamplingWorkspace, sample
from deepinfer.sampling.batch import SamplingBatch
from deepinfer.sampling.edits import GrammarMask
from deepinfer.sampling.gumbel_table import gumbel_table
from deepinfer.sampling.processors import process
from deepinfer.sampling.row_parameters import RowParameters
from deepinfer.sampling.transfer import to_device


class DeviceChoice:
    """Scratch memory of the kernels, grown to the largest step that was seen. For one stream of launches.

    Args:
        vocab_size: width of the logits.
        banned_ids: tokens that are never generated.
        device: of the logits.
    """

    def __init__(self, vocab_size: int, banned_ids: Sequence[int], device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._table = pack_gumbel_table(*gumbel_table(device))
        self._bans_any = len(banned_ids) > 0
        self._allowed = to_device(_mask_without(banned_ids, vocab_size)[None], device)  # [1, words]
        self._workspace: SamplingWorkspace | None = None
        self._first_mask = torch.empty(0, dtype=torch.int32, device=device)

    def sample(self, logits: Tensor, batch: SamplingBatch) -> tuple[Tensor, Tensor]:
        """Token ids int64 ``[rows]`` (0 in bad rows) and which rows are bad; teacher forcing is left to the caller.

        Args:
            logits: float32 ``[rows, vocab]``, contiguous, not changed.
        """
        parameters = batch.constants.parameters
        assert parameters is not None, "a batch of a GPU has the parameters of its rows"
        # Masks are applied by the kernels; the rest changes single logits.
        processed = process(logits, batch if batch.grammar is None else replace(batch, grammar=None))
        token_ids, is_bad = self.draw(processed, parameters, batch.positions, batch.grammar)
        if processed is not logits:  # what an edit hid counts too
            is_bad |= ~logits.amax(-1).isfinite()
            token_ids.masked_fill_(is_bad, 0)
        return token_ids, is_bad

    def reserve(self, rows: int) -> None:
        """Make the scratch memory large enough. A graph keeps its address, so it must not have to grow later."""
        if self._workspace is None or self._workspace.max_rows < rows:
            max_rows = max(64, rows)
            self._workspace = SamplingWorkspace(max_rows, self._vocab_size, self._table)
            self._first_mask = torch.zeros(max_rows, dtype=torch.int32, device=self._device)

    def draw(
        self, logits: Tensor, parameters: RowParameters, positions: Tensor, grammar: GrammarMask | None = None
    ) -> tuple[Tensor, Tensor]:
        """As :meth:`sample`, of logits that need no edits. Launches only, where there is room for them already.

        Args:
            logits: float32 ``[rows, vocab]``, contiguous, not changed.
            positions: int64 ``[rows]``: absolute position that each token will have.
        """
        rows = logits.shape[0]
        if self._workspace is None or self._workspace.max_rows < rows:
            self.reserve(2 * rows)
        assert self._workspace is not None
        masks, mask_rows = self._masks(rows, grammar)
        return sample(
            logits,
            SamplingRows(
                kind=parameters.kind,
                temperature=parameters.temperature,
                min_log_p=parameters.min_log_p,
                top_p=parameters.top_p,
                top_k=parameters.top_k,
                seeds=parameters.seeds,
                positions=positions,
                masks=masks,
                mask_rows=mask_rows,
            ),
            self._workspace,
            truncates=True,  # False would save a launch, and be one kernel more to compile
        )

    def _masks(self, rows: int, grammar: GrammarMask | None) -> tuple[Tensor | None, Tensor | None]:
        """All masks of a step, and which one each row has."""
        if grammar is None:
            return (self._allowed, self._first_mask[:rows]) if self._bans_any else (None, None)
        masks = torch.cat((self._allowed, grammar.bits & self._allowed))
        mask_rows = torch.zeros(rows, dtype=torch.int32, device=self._device)
        numbers = torch.arange(1, len(masks), dtype=torch.int32, device=self._device)
        return masks, mask_rows.index_copy_(0, grammar.rows, numbers)


def _mask_without(banned_ids: Sequence[int], vocab_size: int) -> np.ndarray:
    """int32 words with a bit for every token that is not banned."""
    bits = np.ones(-(-vocab_size // 32) * 32, dtype=np.uint8)
    bits[list(banned_ids)] = 0
    return np.packbits(bits, bitorder="little").view(np.int32)
