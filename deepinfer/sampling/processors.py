"""Before the temperature, in order: allow list, bans, biases, early bans, penalties, grammar.

Every function changes its rows in place. A row that uses no feature keeps its bits, whoever its neighbours are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.sampling.batch import SamplingBatch
from deepinfer.sampling.edits import EarlyBans, GrammarMask, PenaltyEntries, TokenEdits


def process(logits: Tensor, batch: SamplingBatch, banned_ids: Tensor | None = None) -> Tensor:
    """Apply all masks, biases and penalties of the batch (engine spec 5.1, steps 1 to 3 and our additions).

    Args:
        logits: float32 ``[rows, vocab]``; not changed.
        banned_ids: int64, tokens that the engine never generates.
    Returns:
        ``logits`` itself if there is nothing to do, else a new tensor.
    """
    edits = batch.constants.edits
    has_work = not edits.is_empty or batch.early or batch.penalties or batch.grammar or banned_ids is not None
    if not has_work:
        return logits
    processed = logits.clone()
    keep_allowed(processed, edits)
    if banned_ids is not None:
        processed.index_fill_(1, banned_ids, -torch.inf)
    add_bias(processed, edits)
    if batch.early is not None:
        ban_early(processed, batch.early, batch.positions)
    if batch.penalties is not None:
        penalise(processed, batch.penalties)
    if batch.grammar is not None:
        mask_grammar(processed, batch.grammar)
    return processed


def keep_allowed(logits: Tensor, edits: TokenEdits) -> None:
    """Set every token outside a row's allow list to -inf."""
    if edits.allowed is None or edits.allowed_only_rows is None:
        return
    kept = logits[edits.allowed]
    logits.index_fill_(0, edits.allowed_only_rows, -torch.inf)
    logits.index_put_(edits.allowed, kept)


def add_bias(logits: Tensor, edits: TokenEdits) -> None:
    """Add ``logit_bias``; a token at -inf stays there."""
    if edits.biased is not None and edits.bias is not None:
        logits.index_put_(edits.biased, logits[edits.biased] + edits.bias)


def ban_early(logits: Tensor, bans: EarlyBans, positions: Tensor) -> None:
    """Set tokens to -inf in rows whose position lies before the end of the ban."""
    where = (bans.rows, bans.tokens)
    is_early = positions[bans.rows] < bans.until
    logits.index_put_(where, logits[where].masked_fill(is_early, -torch.inf))


def penalise(logits: Tensor, entries: PenaltyEntries) -> None:
    """Repetition, then frequency and presence penalties, with the definitions that vLLM's users know.

    Repetition divides positive and multiplies other logits of tokens in prompt or output. Frequency subtracts per
    occurrence in the output, presence once for a token in the output.
    """
    where = (entries.rows, entries.tokens)
    values = logits[where]
    values = torch.where(values > 0, values / entries.repetition, values * entries.repetition)
    values -= entries.frequency * entries.counts
    values -= entries.presence * (entries.counts > 0)
    logits.index_put_(where, values)


def mask_grammar(logits: Tensor, mask: GrammarMask) -> None:
    """Set every token that the grammar does not allow to -inf."""
    shifts = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = ((mask.bits[:, :, None] >> shifts) & 1).flatten(1)[:, : logits.shape[1]]
    rows = logits.index_select(0, mask.rows).masked_fill_(allowed == 0, -torch.inf)
    logits.index_copy_(0, mask.rows, rows)
