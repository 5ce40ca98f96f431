"""Attention over the sliding window and the selected compressed entries, with a sink (spec 4.8)."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.ops.records import RecordStore
from deepinfer.ops.registry import op
from deepinfer.ops.step_views import RingView, StreamView

_SLAB_ELEMENTS = 4 << 20  # float64 key values per slab: 32 MB


@op
def sparse_attention(
    query: Tensor,
    step_keys: Tensor,
    ring: RecordStore,
    window: RingView,
    sink: Tensor,
    selection: tuple[Tensor, RecordStore, StreamView] | None,
) -> Tensor:
    """One softmax per head over both key groups; keys are also the values.

    Args:
        query: ``[rows, heads, head_dim]``, rotated.
        step_keys: ``[rows, record]``, encoded window keys of this step's rows.
        ring: window keys of earlier steps. window: which keys each row sees.
        sink: ``[heads]`` float64, joins the denominator only, unscaled.
        selection: selected entries ``[rows, k]`` (-1 = none), their store and stream view; None for window-only layers.
    Returns:
        ``[rows, heads, head_dim]``, dtype of ``query``, still rotated. Probabilities are not rounded.
    """
    rows, _, head_dim = query.shape
    pool = torch.cat((ring.format.decode(step_keys), ring.read(window.previous)))
    width = window.index.shape[1] + (selection[0].shape[1] if selection else 0)
    step = max(1, _SLAB_ELEMENTS // (width * head_dim))
    parts = []
    for begin in range(0, rows, step):
        part = slice(begin, min(begin + step, rows))
        keys, seen = pool[window.index[part].clamp_min(0)], window.index[part] >= 0
        if selection is not None:
            selected, store, stream = selection
            chosen = selected[part]
            keys = torch.cat((keys, store.read(stream.entry_slots(chosen, part))), dim=1)
            seen = torch.cat((seen, chosen >= 0), dim=1)
        parts.append(_attend(query[part], keys.double(), seen, sink))
    return torch.cat(parts)


def _attend(query: Tensor, keys: Tensor, seen: Tensor, sink: Tensor) -> Tensor:
    """``query`` ``[n, heads, dim]``, ``keys`` ``[n, k, dim]`` float64, ``seen`` ``[n, k]`` -> ``[n, heads, dim]``."""
    hidden = ~seen
    keys = keys.masked_fill_(hidden.unsqueeze(-1), 0)  # an unwritten record may hold NaN, and 0 * NaN is NaN
    logits = torch.bmm(query.double(), keys.transpose(1, 2)) * query.shape[-1] ** -0.5
    logits.masked_fill_(hidden.unsqueeze(1), -torch.inf)
    largest = torch.maximum(logits.amax(-1), sink).unsqueeze(-1)
    weights = torch.exp_(logits - largest)
    total = weights.sum(-1, keepdim=True) + torch.exp(sink.unsqueeze(-1) - largest)
    return (torch.bmm(weights, keys) / total).to(query.dtype)
