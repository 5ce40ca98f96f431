"""Where layers get their weights: a view of a checkpoint under a name prefix."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor


class TensorSource(Protocol):
    """What a checkpoint (or a dummy one) offers to the layers."""

    def tensor(self, name: str) -> Any: ...

    def engram_table(self, layer_id: int) -> Any: ...


class WeightSource:
    """Tensors of a checkpoint by name, dequantised for the reference operators.

    The reference operators multiply exact values in float64, so weights are expanded once, here; the values are those
    of the file to the last bit.
    """

    def __init__(self, source: TensorSource, device: torch.device, prefix: str = "") -> None:
        self._source = source
        self._device = device
        self._prefix = prefix

    def child(self, prefix: str) -> WeightSource:
        """The same source with ``prefix.`` in front of every name."""
        return WeightSource(self._source, self._device, f"{self._prefix}{prefix}.")

    def wide(self, name: str) -> Tensor:
        """Any dense tensor as float64."""
        return self._source.tensor(self._prefix + name).dequantize(torch.float64).to(self._device)

    def stacked(self, *names: str) -> Tensor:
        """Weights that share an input, concatenated by output row: one product instead of several."""
        return torch.cat([self.wide(name) for name in names])

    def stored(self, name: str) -> Tensor:
        """A BF16 or F32 tensor as it is in the file."""
        return self._source.tensor(self._prefix + name).data.to(self._device)

    def engram_table(self, layer_id: int) -> Any:
        """The n-gram table of a layer: memory-mapped, gathered by row, never expanded whole."""
        return self._source.engram_table(layer_id)
