"""The indexer: scores of compressed entries, top-k selection and candidate blocks (spec 4.7).

Ties always go to the lowest index. Selection works on integers that order like (score, -index), so that no two
candidates are equal and any top-k routine gives the same answer.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from deepinfer.ops.records import RecordStore
from deepinfer.ops.registry import op
from deepinfer.ops.step_views import StreamView

_SLAB_ELEMENTS = 4 << 20  # float64 values per intermediate of one slab: 32 MB
_HIDDEN = torch.iinfo(torch.int64).min
_BF16_MAX = torch.finfo(torch.bfloat16).max


def _scores(query: Tensor, head_weights: Tensor, keys: Tensor, round_scores: bool) -> Tensor:
    """``sum_h g_h * relu(q_h . k_j)`` (spec 4.7): the factor 1/64 orders nothing and is left out.

    Args:
        query: ``[..., rows, heads, dim]``; head_weights: ``[..., rows, heads]``; keys: ``[..., n, dim]``.
    Returns:
        ``[..., rows, n]`` float32.
    """
    rows, heads, dim = query.shape[-3:]
    flat = query.double().reshape(*query.shape[:-3], rows * heads, dim)
    products = (flat @ keys.double().transpose(-1, -2)).relu_()
    products = products.view(*query.shape[:-3], rows, heads, -1)
    scores = (head_weights.double().unsqueeze(-2) @ products).squeeze(-2)
    return (scores.to(torch.bfloat16) if round_scores else scores).float()


def _order_keys(scores: Tensor, visible: Tensor) -> Tensor:
    """Distinct int64 keys that order like (score, lower index first); hidden entries sort below everything."""
    bits = (scores + 0.0).view(torch.int32)  # adding zero turns -0 into +0
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64)
    index = torch.arange(scores.shape[-1], device=scores.device)
    return ((ordered << 32) - index).masked_fill_(~visible, _HIDDEN)


def top_entries(scores: Tensor, visible: Tensor, count: int) -> Tensor:
    """Indices of the ``count`` largest visible scores per row, ascending, padded with -1 at the end.

    Args:
        scores: ``[rows, n]`` float32 without NaN where visible.
        visible: ``[rows, n]`` bool.
        count: indices per row at most.
    Returns:
        ``[rows, min(count, n)]`` int64.
    """
    n = scores.shape[-1]
    if n == 0:
        return scores.new_empty((scores.shape[0], 0), dtype=torch.int64)
    best = torch.topk(_order_keys(scores, visible), min(count, n), sorted=False)
    picked = torch.where(best.values == _HIDDEN, n, best.indices).sort(dim=-1).values
    return torch.where(picked == n, -1, picked)


def top_blocks(scores: Tensor, num_visible: Tensor, block_size: int, count: int) -> Tensor:
    """Candidate blocks of each row: the best by their largest visible score, the last visible one always kept.

    Args:
        scores: ``[rows, n]``; num_visible: ``[rows]``; block_size: entries per block; count: blocks to keep.
    Returns:
        ``[rows, min(count, blocks)]`` int64 ascending, padded with -1.
    """
    rows, n = scores.shape
    num_blocks = -(-n // block_size)
    index = torch.arange(num_blocks * block_size, device=scores.device)
    padded = torch.nn.functional.pad(scores, (0, num_blocks * block_size - n))
    hidden = index >= num_visible.unsqueeze(-1)
    best = padded.masked_fill(hidden, -torch.inf).view(rows, num_blocks, block_size).amax(-1).clamp_max(_BF16_MAX)
    block = torch.arange(num_blocks, device=scores.device)
    last = (num_visible.unsqueeze(-1) - 1) // block_size
    best = torch.where((block == last) & (num_visible.unsqueeze(-1) > 0), torch.inf, best)
    return top_entries(best, block <= last, count)


@op
def index_full(
    query: Tensor,
    head_weights: Tensor,
    keys: RecordStore,
    stream: StreamView,
    count: int,
    round_scores: bool,
    candidates: tuple[int, int] | None,
) -> tuple[Tensor, Tensor | None]:
    """Select among all visible entries; optionally also choose candidate blocks from the same scores.

    Args:
        query: ``[rows, heads, dim]``, already quantised. head_weights: ``[rows, heads]``.
        keys: the index-key store of the stream. stream: visibility and placement.
        count: ``index_topk``. round_scores: round scores to bf16 before selecting.
        candidates: (block size, number of blocks), or None where no candidate blocks are wanted.
    Returns:
        selected entries ``[rows, k]`` ascending, padded with -1; blocks likewise, or None when not wanted or when every
        visible entry lies in a kept block (so that restricting to them would change nothing).
    """
    rows = query.shape[0]
    width = min(count, stream.max_visible)
    selected = query.new_full((rows, width), -1, dtype=torch.int64)
    wants_blocks = candidates is not None and stream.max_visible > candidates[0] * candidates[1]
    blocks = query.new_full((rows, candidates[1]), -1, dtype=torch.int64) if candidates and wants_blocks else None
    for part, key_rows in _scored_parts(stream, query.shape[1], keys):
        scores = _scores(query[part], head_weights[part], key_rows, round_scores).flatten(0, -2)
        visible_count = stream.num_visible[part].flatten()
        visible = torch.arange(scores.shape[-1], device=scores.device) < visible_count.unsqueeze(-1)
        picked = top_entries(scores, visible, count)
        rows_of_part = part.flatten() if isinstance(part, Tensor) else part
        selected[rows_of_part, : picked.shape[1]] = picked
        if blocks is not None and candidates is not None:
            kept = top_blocks(scores, visible_count, *candidates)
            blocks[rows_of_part, : kept.shape[1]] = kept
    return selected, blocks


def _scored_parts(stream: StreamView, heads: int, keys: RecordStore) -> Iterator[tuple[Tensor | slice, Tensor]]:
    """Cut the batch so that intermediates stay small: yields (rows, index keys ``[..., n, dim]``).

    Chunks of several rows are scored sequence by sequence against keys that are read once; single rows (decoding) are
    scored together, in groups of similar length, as one batched product.
    """
    singles: list[tuple[int, int, int]] = []  # visible entries, row, sequence
    for sequence, span in enumerate(stream.spans):
        visible = (span.last_position + 1) // stream.ratio
        if visible == 0:
            continue
        if span.row_end - span.row_begin == 1:
            singles.append((visible, span.row_begin, sequence))
            continue
        values = keys.read(_slots_of(stream, [sequence], visible)[0])
        step = max(1, _SLAB_ELEMENTS // (heads * visible))
        for begin in range(span.row_begin, span.row_end, step):
            yield slice(begin, min(begin + step, span.row_end)), values
    singles.sort()
    while singles:
        longest = singles[-1][0]
        fits = max(1, _SLAB_ELEMENTS // (heads * longest))
        group, singles = singles[-fits:], singles[:-fits]
        rows = torch.tensor([[row] for _, row, _ in group], device=stream.sequence.device)  # [group, 1]
        yield rows, keys.read(_slots_of(stream, [sequence for _, _, sequence in group], longest))


def _slots_of(stream: StreamView, sequences: list[int], count: int) -> Tensor:
    """Flat slots ``[sequences, count]`` of the first ``count`` entries; past a table's end they point to block 0."""
    per_block = stream.entries_per_block
    tables = stream.block_tables[sequences, : -(-count // per_block)]
    inside = torch.arange(per_block, device=tables.device)
    return (tables.unsqueeze(-1) * per_block + inside).flatten(1)[:, :count]


@op
def index_candidates(
    query: Tensor,
    head_weights: Tensor,
    keys: RecordStore,
    stream: StreamView,
    blocks: Tensor,
    block_size: int,
    count: int,
    round_scores: bool,
) -> Tensor:
    """Select among the visible entries of each row's candidate blocks.

    Args:
        blocks: ``[rows, candidate blocks]`` ascending, padded with -1. Others as in :func:`index_full`.
    Returns:
        selected entries ``[rows, k]`` ascending, padded with -1.
    """
    rows = query.shape[0]
    capacity = blocks.shape[1] * block_size
    step = max(1, _SLAB_ELEMENTS // (capacity * max(query.shape[1], query.shape[2])))
    inside = torch.arange(block_size, device=blocks.device)
    parts = []
    for begin in range(0, rows, step):
        part = slice(begin, min(begin + step, rows))
        entries = (blocks[part].unsqueeze(-1) * block_size + inside).flatten(1)  # [n, capacity]
        allowed = (blocks[part].repeat_interleave(block_size, dim=1) >= 0) & (
            entries < stream.num_visible[part].unsqueeze(-1)
        )
        # Masked before anything is read: an unwritten record may hold anything.
        entries = torch.where(allowed, entries, 0)
        values = keys.read(stream.entry_slots(entries, part))
        scores = _scores(query[part].unsqueeze(1), head_weights[part].unsqueeze(1), values, round_scores).squeeze(1)
        place = top_entries(scores, allowed, count)
        parts.append(torch.where(place < 0, -1, entries.gather(1, place.clamp_min(0))))
    return torch.cat(parts)
