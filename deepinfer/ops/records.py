"""Cache records: how one vector is packed into bytes, and stores of such records (spec 5.2).

A store is a flat array of records; who owns which record is decided elsewhere. Reading never checks validity: callers
mask what they must not see *before* the values are used.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.ops import number_formats as nf


@dataclass(frozen=True)
class RecordFormat(ABC):
    """Packing of vectors ``[..., width]`` into records ``[..., record_elements]`` of :attr:`dtype`."""

    width: int

    @property
    def dtype(self) -> torch.dtype:
        return torch.uint8

    @property
    @abstractmethod
    def record_elements(self) -> int:
        """Elements of :attr:`dtype` per record (bytes for the packed formats)."""

    @abstractmethod
    def encode(self, x: Tensor) -> Tensor:
        """Quantise ``[..., width]`` into records."""

    @abstractmethod
    def decode(self, records: Tensor) -> Tensor:
        """Values ``[..., width]`` as float32."""


class Fp8Record(RecordFormat):
    """``width`` e4m3 codes, then one ue8m0 byte per 32: window keys, and main KV when FP4 is switched off."""

    @property
    def record_elements(self) -> int:
        return self.width + self.width // 32

    def encode(self, x: Tensor) -> Tensor:
        return torch.cat(nf.q8(x), dim=-1)

    def decode(self, records: Tensor) -> Tensor:
        return nf.q8_decode(records[..., : self.width].contiguous(), records[..., self.width :])


class Fp4Record(RecordFormat):
    """``width / 2`` bytes of e2m1 codes, then one e4m3 scale per 16: main compressed KV."""

    @property
    def record_elements(self) -> int:
        return self.width // 2 + self.width // 16

    def encode(self, x: Tensor) -> Tensor:
        return torch.cat(nf.q4e(x), dim=-1)

    def decode(self, records: Tensor) -> Tensor:
        half = self.width // 2
        return nf.q4e_decode(records[..., :half], records[..., half:].contiguous())


class IndexKeyRecord(RecordFormat):
    """``width / 2`` bytes of e2m1 codes, then one ue8m0 byte per 32: index keys."""

    @property
    def record_elements(self) -> int:
        return self.width // 2 + self.width // 32

    def encode(self, x: Tensor) -> Tensor:
        return torch.cat(nf.q4u(x), dim=-1)

    def decode(self, records: Tensor) -> Tensor:
        half = self.width // 2
        return nf.q4u_decode(records[..., :half], records[..., half:])


class Float32Record(RecordFormat):
    """The values themselves: every cache in ``float32`` numerics."""

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    @property
    def record_elements(self) -> int:
        return self.width

    def encode(self, x: Tensor) -> Tensor:
        return x.to(torch.float32)

    def decode(self, records: Tensor) -> Tensor:
        return records


@dataclass(frozen=True)
class RecordStore:
    """A flat array of records: ``data`` is ``[num_records, record_elements]``."""

    format: RecordFormat
    data: Tensor

    @classmethod
    def allocate(cls, record_format: RecordFormat, num_records: int, device: torch.device) -> RecordStore:
        """Zero-filled store. Zeroes are never relied upon: unwritten records are never read."""
        shape = (num_records, record_format.record_elements)
        return cls(record_format, torch.zeros(shape, dtype=record_format.dtype, device=device))

    def read(self, slots: Tensor) -> Tensor:
        """Values ``[..., width]`` (float32) at record numbers ``[...]`` (int64, all in range)."""
        flat = self.format.decode(self.data.index_select(0, slots.reshape(-1)))
        return flat.view(*slots.shape, self.format.width)

    def write(self, slots: Tensor, records: Tensor) -> None:
        """Store encoded records ``[n, record_elements]`` at distinct record numbers ``[n]``."""
        self.data.index_copy_(0, slots, records)

    @property
    def num_bytes(self) -> int:
        return self.data.numel() * self.data.element_size()
