"""Read access to the weights by checkpoint name, in the working dtype."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from deepinfer.errors import CheckpointError


@runtime_checkable
class RowTable(Protocol):
    """A table too large to hold as one float tensor: rows are dequantised when they are asked for."""

    @property
    def shape(self) -> tuple[int, ...]:
        """``(rows, width)``."""

    def gather(self, rows: Tensor) -> Tensor:
        """Rows ``[n]`` int64 -> ``[n, width]`` float32."""


WeightMap: TypeAlias = Mapping[str, Tensor | RowTable]


class Parameters:
    """The weights whose names start with a prefix. ``parameters["attn."]``-style scoping keeps names short.

    Casting to the working dtype happens on access and is differentiable, so a trainer may pass its own parameters.
    """

    def __init__(self, weights: WeightMap, dtype: torch.dtype, prefix: str = "") -> None:
        self._weights = weights
        self._prefix = prefix
        self.dtype = dtype

    def scope(self, name: str) -> Parameters:
        """The weights under ``name`` and a dot."""
        return Parameters(self._weights, self.dtype, f"{self._prefix}{name}.")

    def __contains__(self, name: str) -> bool:
        return self._prefix + name in self._weights

    def _find(self, name: str) -> Tensor | RowTable:
        full = self._prefix + name
        try:
            return self._weights[full]
        except KeyError as error:
            raise CheckpointError(
                f"tensor {full} is missing", why="the configuration asks for it", fix="check names and configuration"
            ) from error

    def __getitem__(self, name: str) -> Tensor:
        weight = self._find(name)
        assert isinstance(weight, Tensor), f"{self._prefix}{name} is a row table: use rows()"
        return weight.to(self.dtype)

    def rows(self, name: str, indices: Tensor) -> Tensor:
        """Rows of a table: indices ``[...]`` int64 -> ``[..., width]``. Reads only what is asked for."""
        table = self._find(name)
        if isinstance(table, Tensor):
            return table[indices].to(self.dtype)
        return table.gather(indices.flatten()).to(self.dtype).unflatten(0, indices.shape)
