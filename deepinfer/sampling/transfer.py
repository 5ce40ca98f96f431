"""Host arrays to the device, and results back, without making the host wait."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
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


def copy_into(place: Tensor, array: np.ndarray) -> None:
    """:func:`to_device` into a contiguous tensor: one copy, where others take the device two."""
    assert place.is_contiguous(), place.stride()
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    place.copy_(tensor.pin_memory() if place.is_cuda else tensor, non_blocking=True)


def kept_on_device(array: np.ndarray, device: torch.device) -> Tensor:
    """As :func:`to_device`, for small arrays that many steps have alike: the tensor may be an earlier one, so do not
    change it. A copy costs a GPU as much time between two kernels as a small kernel does. Not while a graph is
    captured: the tensor would be the graph's.
    """
    if device.type != "cuda":
        return to_device(array, device)
    index = torch.cuda.current_device() if device.index is None else device.index
    stream: int = torch._C._cuda_getCurrentRawStream(index)  # that the copy is ordered by
    own = torch.device("cuda", index)
    return _kept(np.ascontiguousarray(array).tobytes(), array.dtype.str, array.shape, own, stream)


@lru_cache(maxsize=256)
def _kept(data: bytes, dtype: str, shape: tuple[int, ...], device: torch.device, stream: int) -> Tensor:
    del stream
    return to_device(np.frombuffer(data, dtype).reshape(shape).copy(), device)


_NUMPY = {torch.int64: np.int64, torch.int32: np.int32, torch.float32: np.float32, torch.bool: np.bool_}


def pinned_copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """:func:`pinned_copy` of each; in one copy, if they are contiguous parts of one storage."""
    storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    if len(storages) != 1 or not all(tensor.is_contiguous() and tensor.dtype in _NUMPY for tensor in tensors):
        return [pinned_copy(tensor) for tensor in tensors]
    whole = torch.empty(0, dtype=torch.uint8, device=tensors[0].device).set_(tensors[0].untyped_storage())
    on_host = pinned_copy(whole).numpy()  # whose views cost less than a tensor's; they keep the memory, too
    begins = [tensor.storage_offset() * tensor.itemsize for tensor in tensors]
    return [
        torch.from_numpy(on_host[begin : begin + tensor.nbytes].view(_NUMPY[tensor.dtype]).reshape(tensor.shape))
        for begin, tensor in zip(begins, tensors, strict=True)
    ]


def pinned_copy(tensor: Tensor) -> Tensor:
    """A copy of ``tensor`` in host memory that is complete once the current stream has come this far."""
    if tensor.device.type == "cpu":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


@cache
def has_kernels(device: torch.device) -> bool:
    """Whether the sampler's kernels can run on ``device``."""
    return device.type == "cuda" and find_spec("triton") is not None
