"""Acceptance of drafts on the device equals the verifier's, in ragged batches with bad rows."""

from __future__ import annotations

import pytest
import torch

from deepinfer.kernels.sampling.verification import NO_TOKEN, AcceptedPrefix, accept_prefix
from deepinfer.sampling.sampler import SamplerOutput
from deepinfer.speculative.verification import NO_TOKEN as REFERENCE_NO_TOKEN
from deepinfer.speculative.verification import RowLayout, accepted_prefix


def reference(sampled, is_bad, drafts, num_rows):
    layout = RowLayout.of(num_rows, len(sampled))
    rows = SamplerOutput(sampled, is_bad, None, None, None, None, ())
    is_accepted = sampled == layout.drafts_of_rows(drafts)
    return accepted_prefix(layout, drafts.shape[1], rows, is_accepted, is_accepted.to(torch.float32))


@pytest.mark.parametrize(("requests", "slots"), [(1, 0), (1, 5), (7, 5), (33, 3), (5, 8)])
def test_accepted_prefixes_equal_the_reference(device, requests, slots):
    generator = torch.Generator().manual_seed(requests + slots)
    num_rows = torch.randint(1, slots + 2, (requests,), generator=generator)
    total = int(num_rows.sum())
    sampled = torch.randint(0, 3, (total,), generator=generator)  # few values, so that prefixes of all lengths occur
    is_bad = torch.rand(total, generator=generator) < 0.1
    sampled[is_bad] = 0
    drafts = torch.randint(0, 3, (requests, slots), generator=generator)
    if slots:
        layout = RowLayout.of(num_rows, total)
        drafts[0] = torch.nn.functional.pad(sampled[: int(num_rows[0])], (0, slots))[:slots]  # all of them stand
        assert int(layout.first_row[0]) == 0
    expected = reference(sampled, is_bad, drafts, num_rows)
    inputs = [tensor.to(device) for tensor in (sampled, is_bad, drafts, num_rows)]
    found = accept_prefix(*inputs)
    for name in ("token_ids", "num_accepted", "is_bad", "first_row"):
        assert torch.equal(getattr(found, name).cpu(), getattr(expected, name)), name
    torch.testing.assert_close(found.acceptance.cpu(), expected.acceptance, rtol=0, atol=0, equal_nan=True)


def test_padding_requests_emit_nothing(device):
    out = AcceptedPrefix.empty(3, 2, device)
    sampled = torch.tensor([4, 5, 6], device=device)
    found = accept_prefix(
        sampled,
        torch.zeros(3, dtype=torch.bool, device=device),
        torch.tensor([[4, 9], [9, 9], [9, 9]], device=device),
        torch.tensor([3, 0, 0], dtype=torch.int32, device=device),
        out,
    )
    assert found is out
    assert found.token_ids.tolist() == [[4, 5, -1], [-1, -1, -1], [-1, -1, -1]]
    assert found.num_accepted.tolist() == [1, 0, 0]
    assert found.is_bad.tolist() == [False] * 3


def test_the_filler_is_that_of_the_engine():
    assert NO_TOKEN == REFERENCE_NO_TOKEN
