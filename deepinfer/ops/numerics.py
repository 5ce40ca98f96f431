"""The two numerics modes as the layers see them (design contract 4)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepinfer.ops.records import Float32Record, Fp4Record, Fp8Record, IndexKeyRecord, RecordFormat


@dataclass(frozen=True, slots=True)
class Numerics:
    """``faithful`` rounds where the model rounds; ``float32`` rounds nowhere and keeps caches unquantised.

    Intermediate results that the model keeps in fp32 (mixes, scores, probabilities, sums) are held by the reference
    operators in float64: wide enough that the order of a reduction can't be seen in the rounded result.
    """

    mode: str
    activation_dtype: torch.dtype
    quantize: bool

    @classmethod
    def from_mode(cls, mode: str) -> Numerics:
        """``"faithful"``, ``"fast"`` (the same formats; some products round coarser) or ``"float32"``."""
        if mode == "float32":
            return cls(mode, torch.float32, False)
        assert mode in ("faithful", "fast"), mode
        return cls(mode, torch.bfloat16, True)

    def window_format(self, head_dim: int) -> RecordFormat:
        return Fp8Record(head_dim) if self.quantize else Float32Record(head_dim)

    def entry_format(self, head_dim: int, use_fp4: bool) -> RecordFormat:
        if not self.quantize:
            return Float32Record(head_dim)
        return Fp4Record(head_dim) if use_fp4 else Fp8Record(head_dim)

    def index_key_format(self, index_head_dim: int) -> RecordFormat:
        return IndexKeyRecord(index_head_dim) if self.quantize else Float32Record(index_head_dim)
