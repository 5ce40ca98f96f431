"""Weights in the checkpoint's own formats, on the device: FP8 with tile scales, FP4 with row scales, BF16, FP32."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from deepinfer.layers.weights import TensorSource


class Fp8Weight(NamedTuple):
    """An FP8 matrix as it is stored."""

    codes: Tensor
    """uint8 ``[out, in]``, e4m3."""
    scales: Tensor
    """uint8 ``[out / 32, in / 32]``, ue8m0."""


class PackedSource:
    """Tensors of a checkpoint by name, as they are stored, on the device.

    Args:
        source: checkpoint, real or dummy.
        prefix: put in front of every name.
        invariant: for the layers made of these weights: a row's result must not depend on the rest of the batch.
        is_fast: they may round coarser than the model where that pays.
    """

    def __init__(
        self,
        source: TensorSource,
        device: torch.device,
        prefix: str = "",
        *,
        invariant: bool = False,
        is_fast: bool = False,
    ) -> None:
        self.source, self.device, self.prefix = source, device, prefix
        self.invariant, self.is_fast = invariant, is_fast

    def child(self, prefix: str) -> PackedSource:
        """The same source with ``prefix.`` in front of every name."""
        name = f"{self.prefix}{prefix}."
        return PackedSource(self.source, self.device, name, invariant=self.invariant, is_fast=self.is_fast)

    def fp8(self, *names: str) -> Fp8Weight:
        """FP8 matrices that share an input, stacked by output row (each has a multiple of 32 of them)."""
        stored = [self.source.tensor(self.prefix + name) for name in names]
        codes = torch.cat([each.data.view(torch.uint8).to(self.device) for each in stored])
        scales = torch.cat([each.scale.to(self.device) for each in stored])
        return Fp8Weight(codes, scales)

    def bf16(self, *names: str) -> Tensor:
        """BF16 matrices stacked by output row, or one vector. A tensor that a file may hold as F32 keeps its values."""
        return torch.cat([self._data(name) for name in names]).to(torch.bfloat16)

    def fp32(self, name: str) -> Tensor:
        """A vector or matrix of the file in float32 (exact for BF16 and F32)."""
        return self._data(name).float()

    def _data(self, name: str) -> Tensor:
        stored = self.source.tensor(self.prefix + name)
        assert stored.scale is None, f"{name} is quantised"
        data: Tensor = stored.data.to(self.device)
        return data
