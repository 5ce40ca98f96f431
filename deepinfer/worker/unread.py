"""Results of a step on their way to the host, which goes on meanwhile."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from deepinfer.messages import Chunk
from deepinfer.sampling.transfer import pinned_copy
from deepinfer.speculative.verification import Verified
from deepinfer.worker.step_results import StepTimes


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
        on_host, arrived = verified.to_host(), torch.cuda.Event(enable_timing=True)
        arrived.record()
        return cls(verified, on_host, arrived)

    def wait(self) -> Verified:
        """The result on the host. What was launched behind it may still run."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.on_host


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
            return cls(token_ids.clone(), confidence.clone(), None)  # the next draft may write over them
        on_host, arrived = (pinned_copy(token_ids), pinned_copy(confidence)), torch.cuda.Event(enable_timing=True)
        arrived.record()
        return cls(*on_host, arrived)

    def wait(self) -> tuple[Tensor, Tensor]:
        """Token ids and confidences, on the host."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.token_ids, self.confidence


@dataclass(frozen=True, slots=True)
class UnreadTokens:
    """What a chained step sampled and drafted, on its way to the host."""

    chunks: tuple[Chunk, ...]
    generations: np.ndarray
    """Of their state slots."""
    step: UnreadStep
    drafts: UnreadDrafts | None
    """None if it does not draft."""
    after: torch.cuda.Event | None
    """When the device was done with the step before this one, if that was chained, too."""
    rows_ms: float
    draft_ms: float
    """What the host took to launch forward and sampler, and the draft; or to run them, where it is the device."""

    @property
    def end(self) -> torch.cuda.Event | None:
        """When the device is done with the step."""
        return self.step.arrived if self.drafts is None else self.drafts.arrived

    def times(self) -> StepTimes | None:
        """How long the step took, once everything has arrived; None if it was not chained to the one before it."""
        if self.step.arrived is None:
            return StepTimes(self.rows_ms, self.draft_ms, hides_host=False)
        if self.after is None:
            return None
        assert self.end is not None
        rows_ms = self.after.elapsed_time(self.step.arrived)
        return StepTimes(rows_ms, self.step.arrived.elapsed_time(self.end), hides_host=True)
