"""Results of a step on their way to the host, which goes on meanwhile."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.messages import Chunk
from deepinfer.sampling.transfer import pinned_copy
from deepinfer.speculative.verification import Verified


@dataclass(frozen=True, slots=True)
class UnreadStep:
    """What a step emitted, on its way to the host."""

    on_device: Verified
    on_host: Verified
    """Once ``arrived`` says so."""
    arrived: torch.cuda.Event | None
    """None where the host has it already."""

    @classmethod
    def of(cls, verified: Verified) -> UnreadStep:
        """Start the copy to the host."""
        if verified.token_ids.device.type != "cuda":
            return cls(verified, verified.cpu(), None)
        on_host, arrived = verified.to_host(), torch.cuda.Event()
        arrived.record()
        return cls(verified, on_host, arrived)

    def wait(self) -> Verified:
        """The result on the host. What was launched behind it may still run."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.on_host


@dataclass(frozen=True, slots=True)
class UnreadTokens:
    """What a chained step sampled, on its way to the host."""

    chunks: tuple[Chunk, ...]
    generations: tuple[int, ...]
    step: UnreadStep


@dataclass(frozen=True, slots=True)
class UnreadDrafts:
    """Drafts on their way to the host, which has them once ``arrived`` says so."""

    token_ids: Tensor
    """``[sequences, num_drafts]`` int64."""
    confidence: Tensor
    """``[sequences, num_drafts]`` float32."""
    arrived: torch.cuda.Event | None
    """None where the host has them already."""

    @classmethod
    def of(cls, token_ids: Tensor, confidence: Tensor) -> UnreadDrafts:
        """Start the copy to the host."""
        if token_ids.device.type != "cuda":
            return cls(token_ids, confidence, None)
        on_host, arrived = (pinned_copy(token_ids), pinned_copy(confidence)), torch.cuda.Event()
        arrived.record()
        return cls(*on_host, arrived)

    def wait(self) -> tuple[list[list[int]], list[list[float]]]:
        """Token ids and confidences."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.token_ids.tolist(), self.confidence.tolist()
