"""Host arrays to the device, and results back, without making the host wait."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import numpy as np
import torch
from torch import Tensor


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """A tensor with the contents of ``array``; on a CPU it shares the memory, elsewhere the copy is asynchronous."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    if device.type == "cuda":
        tensor = tensor.pin_memory()  # a copy from pageable memory would block
    return tensor.to(device, non_blocking=True)


def pinned_copy(tensor: Tensor) -> Tensor:
    """A copy of ``tensor`` in host memory that is complete once the current stream has come this far."""
    if tensor.device.type == "cpu":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


@cache
def has_kernels(device: torch.device) -> bool:
    """Whether the sampler's kernels can run on ``device``."""
    return device.type == "cuda" and find_spec("triton") is not None
