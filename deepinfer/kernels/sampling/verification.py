"""Verification by coupling on the device, in one launch behind the sampler (greedy and Gumbel alike).

Reference: :class:`deepinfer.speculative.gumbel_verifier.GumbelVerifier`, with
:func:`deepinfer.speculative.verification.accepted_prefix`. All results are equal to it, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

NO_TOKEN = -1
"""Fills the emitted tokens of a request behind its last one."""

_NO_TOKEN = tl.constexpr(NO_TOKEN)


@dataclass(frozen=True, slots=True)
class AcceptedPrefix:
    """What a step emits; the fields are those of :class:`deepinfer.speculative.verification.Verified`."""

    token_ids: Tensor
    """int64 ``[requests, slots + 1]``: accepted drafts and one more token, then :data:`NO_TOKEN`."""
    num_accepted: Tensor
    """int64 ``[requests]``."""
    is_bad: Tensor
    """bool ``[requests]``: an emitted token comes from a bad row."""
    acceptance: Tensor
    """float32 ``[requests, slots]``: 1 where the draft is the sampled token, else 0; NaN where none was verified."""
    first_row: Tensor
    """int64 ``[requests]``."""

    @classmethod
    def empty(cls, requests: int, slots: int, device: torch.device) -> AcceptedPrefix:
        """Uninitialised results. What the host reads of them lies in one piece of memory, in parts that are aligned to
        16 bytes whatever their number: Triton compiles kernels anew for other alignments.
        """
        num_even = requests + requests % 2
        words = torch.empty(num_even * (slots + 4), dtype=torch.int64, device=device)
        token_ids, num_accepted, first_row, bad = words.split([num_even * (slots + 1), num_even, num_even, num_even])
        return cls(
            token_ids[: requests * (slots + 1)].view(requests, slots + 1),
            num_accepted[:requests],
            bad.view(torch.bool)[:requests],
            torch.empty(requests, slots, dtype=torch.float32, device=device),
            first_row[:requests],
        )


@triton.jit(do_not_specialize=["requests"])
def _accept_kernel(
    sampled_ptr,
    bad_ptr,
    draft_ptr,
    num_rows_ptr,
    token_ptr,
    accepted_ptr,
    out_bad_ptr,
    acceptance_ptr,
    first_row_ptr,
    requests,
    slots,
    REQUESTS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    request = tl.program_id(0)
    each = tl.arange(0, REQUESTS)
    counts = tl.load(num_rows_ptr + each, mask=each < requests, other=0)
    first_row = tl.sum(tl.where(each < request, counts, 0).to(tl.int64), axis=0)
    num_rows = tl.load(num_rows_ptr + request).to(tl.int32)
    slot = tl.arange(0, SLOTS)
    has_row, has_draft = slot < num_rows, slot < num_rows - 1
    sampled = tl.load(sampled_ptr + first_row + slot, mask=has_row, other=_NO_TOKEN)
    is_bad = tl.load(bad_ptr + first_row + slot, mask=has_row, other=0) != 0
    draft = tl.load(draft_ptr + request.to(tl.int64) * slots + slot, mask=has_draft, other=_NO_TOKEN)
    is_same = has_draft & (sampled == draft)
    # The first row that does not pass its draft on ends the prefix.
    num_accepted = tl.min(tl.where(is_same & (is_bad == 0), SLOTS, slot), axis=0)
    is_emitted = has_row & (slot <= num_accepted)
    inside = slot <= slots
    tokens = tl.where(is_emitted, sampled, _NO_TOKEN)
    tl.store(token_ptr + request.to(tl.int64) * (slots + 1) + slot, tokens, mask=inside)
    acceptance = tl.where(has_draft, is_same.to(tl.float32), float("nan"))
    tl.store(acceptance_ptr + request.to(tl.int64) * slots + slot, acceptance, mask=slot < slots)
    tl.store(accepted_ptr + request, num_accepted.to(tl.int64))
    tl.store(out_bad_ptr + request, tl.max((is_emitted & is_bad).to(tl.int32), axis=0) != 0)
    tl.store(first_row_ptr + request, first_row)


def accept_prefix(
    sampled: Tensor, is_bad: Tensor, drafts: Tensor, num_rows: Tensor, out: AcceptedPrefix | None = None
) -> AcceptedPrefix:
    """Compare the drafts of a step with what the target sampled, and cut every request behind its first difference.

    Args:
        sampled: int64 ``[rows]``, and is_bad: bool ``[rows]``: result of the sampler, one row per draft and one more,
            requests one behind the other.
        drafts: int64 ``[requests, slots]``, contiguous; a request uses its first ``num_rows - 1``.
        num_rows: int32 or int64 ``[requests]``, at most ``slots + 1``; 0 in padding requests, which emit nothing.
        out: results of these shapes.
    Returns:
        ``out``, or new tensors.
    """
    requests, slots = drafts.shape
    assert drafts.is_contiguous(), f"{drafts.stride()=}"
    assert num_rows.shape == (requests,), f"{num_rows.shape=} for {drafts.shape=}"
    assert sampled.dtype == drafts.dtype == torch.int64, f"{sampled.dtype=} {drafts.dtype=}"
    if out is None:
        out = AcceptedPrefix.empty(requests, slots, drafts.device)
    if requests:
        _accept_kernel[(requests,)](
            sampled,
            is_bad,
            drafts,
            num_rows,
            out.token_ids,
            out.num_accepted,
            out.is_bad,
            out.acceptance,
            out.first_row,
            requests,
            slots,
            REQUESTS=triton.next_power_of_2(requests),
            SLOTS=triton.next_power_of_2(slots + 1),
            num_warps=1,
        )
    return out
