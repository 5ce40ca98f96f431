"""Which drafts a fixed number of rows verifies: the most likely ones (engine spec 4.5).

Drafts of all requests are ranked by survival, ties by (request, slot). Survival never rises along a request, so what is
chosen of a request is a prefix of its drafts. Whether draft k is chosen depends on survivals of drafts up to k, and
these on the values of drafts before k only: choosing never looks at the value of what is chosen, which keeps rejection
sampling exact. The host's and the device's version give the same rows for the same survivals.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_UNAVAILABLE = -1.0  # below every survival: such a slot is ranked behind all that exist


def survivals_of(confidences: Tensor) -> Tensor:
    """Probability that each draft and all before it stand.

    Args:
        confidences: float ``[requests, slots]``: that a draft stands, given the ones before it. NaN counts as 0.
    Returns:
        float32, same shape, in [0, 1], not rising along a request.
    """
    return confidences.to(torch.float32).nan_to_num(0.0, 1.0, 0.0).clamp(0.0, 1.0).cumprod(-1)


def silence_finished(
    confidences: Tensor, token_ids: Tensor, stop_ids: Tensor, draft_ids: Tensor | None = None
) -> Tensor:
    """Confidences without those that cannot matter.

    Zero are: all of a request that has just emitted its stop id, so that it gets a single row in the step that still
    runs for it; and those behind a draft that is the stop id, since nothing follows the end.

    Args:
        confidences: ``[requests, slots]``.
        token_ids: int64 ``[requests, n]``: tokens emitted by the step; padding is negative.
        stop_ids: int64 ``[requests]``: the id that ends the request, -1 for none.
        draft_ids: int64 ``[requests, slots]``, or None.
    """
    ends = (token_ids == stop_ids[:, None]) & (token_ids >= 0)
    confidences = confidences.masked_fill(ends.any(-1, keepdim=True), 0.0)
    if draft_ids is None:
        return confidences
    is_stop = ((draft_ids == stop_ids[:, None]) & (draft_ids >= 0)).to(torch.int64)
    return confidences.masked_fill(is_stop.cumsum(-1) > is_stop, 0.0)


def allocate(survivals: Tensor, total_rows: int, max_drafts: Tensor | None = None) -> Tensor:
    """Rows of each request, on the device and without synchronisation.

    Args:
        survivals: float32 ``[requests, slots]``, see :func:`survivals_of`. Zeros for a request without rates.
        total_rows: between ``requests`` and ``requests`` + available slots.
        max_drafts: int64 ``[requests]``: drafts that a request has or may use; None for all slots.
    Returns:
        int64 ``[requests]``, each at least 1; they add up to ``total_rows``.
    """
    num_requests, num_slots = survivals.shape
    assert num_requests <= total_rows <= num_requests * (num_slots + 1), f"{total_rows=} for {tuple(survivals.shape)}"
    if max_drafts is not None:
        slots = torch.arange(num_slots, device=survivals.device)
        survivals = survivals.masked_fill(slots >= max_drafts[:, None], _UNAVAILABLE)
    order = survivals.flatten().argsort(descending=True, stable=True)
    chosen = order[: total_rows - num_requests].div(max(num_slots, 1), rounding_mode="floor")
    rows = torch.ones(num_requests, dtype=torch.int64, device=survivals.device)
    return rows.scatter_add_(0, chosen, torch.ones_like(chosen))


def allocate_on_host(survivals: Sequence[Sequence[float]], total_rows: int) -> list[int]:
    """:func:`allocate` without tensors. Requests may have different numbers of drafts.

    Args:
        survivals: per request, not rising.
        total_rows: between the number of requests and that plus all drafts.
    """
    num_requests = len(survivals)
    available = sum(map(len, survivals))
    assert num_requests <= total_rows <= num_requests + available, f"{total_rows=}, {num_requests=}, {available=}"
    ranked = sorted((-value, r, k) for r, request in enumerate(survivals) for k, value in enumerate(request))
    rows = [1] * num_requests
    for _, request, _ in ranked[: total_rows - num_requests]:
        rows[request] += 1
    return rows
