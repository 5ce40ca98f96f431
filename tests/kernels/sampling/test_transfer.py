"""Copies between host and device."""

from __future__ import annotations

import numpy as np
import torch

from deepinfer.kernels.sampling.verification import AcceptedPrefix
from deepinfer.sampling import transfer
from deepinfer.sampling.transfer import kept_on_device, pinned_copies


def test_parts_of_one_storage_travel_together(device):
    for requests, slots in ((1, 0), (3, 5), (33, 5), (4, 1)):
        made = AcceptedPrefix.empty(requests, slots, device)
        parts = [made.token_ids, made.num_accepted, made.is_bad, made.first_row]
        assert len({part.untyped_storage().data_ptr() for part in parts}) == 1
        assert all(part.data_ptr() % 16 == parts[0].data_ptr() % 16 for part in parts)
        for number, part in enumerate(parts):
            part.fill_(number)
        assert [part.unique().tolist() for part in parts] == [[0], [1], [True], [3]]  # none lies over another
        copies = pinned_copies(parts)
        if device.type == "cuda":
            torch.cuda.synchronize()
        for found, part in zip(copies, parts, strict=True):
            assert (found.device.type, found.dtype) == ("cpu", part.dtype)
            assert torch.equal(found, part.cpu())


def test_parts_of_several_storages_and_views_that_skip_are_copied_too():
    whole = torch.arange(12).view(3, 4)
    for parts in ([whole[:, 1:3], whole[0]], [torch.ones(2), torch.zeros(3, 1)]):
        for found, part in zip(pinned_copies(parts), parts, strict=True):
            assert torch.equal(found, part)


def test_kept_arrays_have_the_contents_of_the_host(device):
    for _ in range(2):
        for array in (np.arange(3), np.arange(3, dtype=np.int32), np.zeros((0, 2)), np.arange(6).reshape(2, 3)[:, ::2]):
            found = kept_on_device(array, device)
            assert found.shape == array.shape
            assert np.array_equal(found.cpu().numpy(), array)
            assert found.cpu().numpy().dtype == array.dtype


def test_equal_arrays_are_one_tensor():
    def kept(array: np.ndarray, stream: int = 0) -> torch.Tensor:
        return transfer._kept(array.tobytes(), array.dtype.str, array.shape, torch.device("cpu"), stream)

    first = kept(np.arange(4))
    assert kept(np.arange(4)) is first
    others = (np.arange(4, dtype=np.int32), np.arange(4).reshape(2, 2), np.arange(1, 5))
    assert all(kept(other) is not first for other in others)
    assert kept(np.arange(4), 1) is not first
    assert first.tolist() == [0, 1, 2, 3]
