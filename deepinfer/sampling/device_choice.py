"""The sampler's choice on a GPU: the same tokens in two or three launches (see :mod:`deepinfer.kernels.sampling`)."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.kernels import sampling as kernels
from deepinfer.kernels.gumbel import pack_gumbel_table
from deepinfer.kernels.sampling import SamplingRows, SamplingWorkspace
from deepinfer.sampling.batch import Kind, SamplingBatch
from deepinfer.sampling.gumbel_table import gumbel_table

_KINDS = {Kind.GREEDY: kernels.GREEDY, Kind.FULL: kernels.FULL, Kind.TRUNCATED: kernels.TRUNCATED}
assert list(_KINDS.values()) == [0, 1, 2], "RowParameters numbers the kinds in the order of the enumeration"


class DeviceChoice:
    """Scratch memory of the kernels, grown to the largest step that was seen. For one stream of launches.

    Args:
        vocab_size: width of the logits.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._table = pack_gumbel_table(*gumbel_table(device))
        self._workspace: SamplingWorkspace | None = None

    def sample(self, logits: Tensor, batch: SamplingBatch) -> tuple[Tensor, Tensor]:
        """Token ids int64 ``[rows]`` and which rows are bad.

        Args:
            logits: float32 ``[rows, vocab]``, processed.
        """
        rows, parameters = logits.shape[0], batch.constants.parameters
        assert parameters is not None
        if self._workspace is None or self._workspace.max_rows < rows:
            self._workspace = SamplingWorkspace(max(64, 2 * rows), self._vocab_size, self._table)
        return kernels.sample(
            logits,
            SamplingRows(
                kind=parameters.kind,
                temperature=parameters.temperature,
                min_log_p=parameters.min_log_p,
                top_p=parameters.top_p,
                top_k=parameters.top_k,
                seeds=parameters.seeds,
                positions=batch.positions,
            ),
            self._workspace,
            truncates=parameters.truncates,
        )
