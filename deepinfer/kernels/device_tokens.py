"""Steps whose rows follow from tokens that only the device knows: completing their table, and what they leave behind.

Meaning: the references of :mod:`deepinfer.worker.device_tokens`; all results are equal to them, bit for bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.step_tables import END, ENTRY_FLOOR, FLOOR, POSITION, SEQUENCE, SLOT, START

TOKEN = tl.constexpr(0)
_ROWS = 64


@triton.jit(do_not_specialize=["num_rows", "table_stride", "out_stride"])
def _complete_kernel(
    table, ngrams, newest, next_position, drafts, slot_ngrams, out, out_ngrams, num_rows, table_stride, out_stride,
    DRAFTS: tl.constexpr, NGRAM: tl.constexpr, NGRAM_P2: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < num_rows
    token = tl.load(table + TOKEN * table_stride + row, inside, other=0)
    position = tl.load(table + POSITION * table_stride + row, inside, other=-1)
    slot = tl.load(table + SLOT * table_stride + row, inside, other=0)
    start = tl.load(table + START * table_stride + row, inside, other=0)
    end = tl.load(table + END * table_stride + row, inside, other=0)
    is_open = (token < 0) & (position >= 0)
    offset = position - start
    shift = tl.load(next_position + slot, is_open, other=0) - start
    shift = tl.where(is_open, shift, 0)
    own_drafts = drafts + slot.to(tl.int64) * DRAFTS
    is_draft = is_open & (offset > 0) & (offset <= DRAFTS)
    draft = tl.load(own_drafts + offset - 1, is_draft, other=0).to(tl.int32)
    first = tl.load(newest + slot, is_open & (offset == 0), other=0)
    token = tl.where(is_open, tl.where(offset == 0, first, draft), token)
    tl.store(out + TOKEN * out_stride + row, tl.maximum(token, 0), inside)
    tl.store(out + POSITION * out_stride + row, position + shift, inside)
    tl.store(out + SLOT * out_stride + row, slot, inside)
    floor = tl.load(table + FLOOR * table_stride + row, inside, other=0)
    tl.store(out + FLOOR * out_stride + row, floor, inside)
    tl.store(out + START * out_stride + row, start + shift, inside)
    tl.store(out + END * out_stride + row, end + shift, inside)
    entry_floor = tl.load(table + ENTRY_FLOOR * table_stride + row, inside, other=0)
    tl.store(out + ENTRY_FLOOR * out_stride + row, entry_floor, inside)
    sequence = tl.load(table + SEQUENCE * table_stride + row, inside, other=0)
    tl.store(out + SEQUENCE * out_stride + row, sequence, inside)
    if NGRAM:
        back = tl.arange(0, NGRAM_P2)[None, :]
        place = row.to(tl.int64)[:, None] * NGRAM + back
        exists = inside[:, None] & (back < NGRAM)
        known = tl.load(ngrams + place, exists, other=-1)
        ahead = offset[:, None] - 1 - back  # number of the draft that stands so many places back
        by_draft = is_open[:, None] & exists & (ahead >= 0) & (ahead < DRAFTS)
        by_slot = is_open[:, None] & exists & (ahead < 0)
        drafted = tl.load(own_drafts[:, None] + ahead, by_draft, other=-1).to(tl.int32)
        before = tl.load(slot_ngrams + slot.to(tl.int64)[:, None] * NGRAM - ahead - 1, by_slot, other=-1)
        found = tl.where(ahead >= 0, drafted, before)
        known = tl.where((position >= 0)[:, None], known, -1)
        tl.store(out_ngrams + place, tl.where(is_open[:, None], found, known), exists)


def complete(
    table: Tensor,
    ngrams: Tensor | None,
    newest: Tensor,
    next_position: Tensor,
    drafts: Tensor,
    slot_ngrams: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """See ``DeviceTokens.complete``; the last four are its memory by slot, contiguous."""
    rows = table.shape[1]
    assert rows == 1 or table.stride(1) == 1, f"{table.stride()=}"
    size = 0 if ngrams is None else ngrams.shape[1]
    assert ngrams is None or ngrams.is_contiguous(), f"{ngrams.stride()=}"
    assert size in (0, slot_ngrams.shape[1]), f"{size=} for {slot_ngrams.shape=}"
    out = table.new_empty(table.shape[0], rows)
    found = None if ngrams is None else torch.empty_like(ngrams)
    _complete_kernel[(triton.cdiv(rows, _ROWS),)](
        table, table if ngrams is None else ngrams, newest, next_position, drafts, slot_ngrams,
        out, out if found is None else found, rows, table.stride(0), out.stride(0),
        DRAFTS=drafts.shape[1], NGRAM=size, NGRAM_P2=triton.next_power_of_2(max(size, 1)), ROWS=_ROWS, num_warps=2,
    )  # fmt: skip
    return out, found


@triton.jit(do_not_specialize=["table_stride"])
def _sampled_kernel(
    table, rows, counts, positions, firsts, drafts, table_stride,
    DRAFTS: tl.constexpr, SLOTS_P2: tl.constexpr, MOST_P2: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    each = tl.arange(0, MOST_P2)
    count = tl.load(counts + request)
    before = tl.load(counts + each, each < request, other=0)
    first = tl.sum(before, axis=0)
    slot = tl.arange(0, SLOTS_P2)
    has_row = slot < count
    row = tl.load(rows + first + slot, has_row, other=0)
    position = tl.load(table + POSITION * table_stride + row, has_row, other=0)
    token = tl.load(table + TOKEN * table_stride + row, has_row, other=-1)
    tl.store(positions + first + slot, position.to(tl.int64) + 1, has_row)
    tl.store(firsts + request, tl.sum(tl.where(slot == 0, position, 0), axis=0))
    tl.store(drafts + request * DRAFTS + slot - 1, token.to(tl.int64), (slot >= 1) & (slot <= DRAFTS))


def sampled_rows(
    table: Tensor, rows: Tensor, counts: Tensor, num_drafts: int, most_requests: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``DeviceTokens.sampled``. ``most_requests``: of any step, so that one compiled kernel serves all."""
    assert table.shape[1] == 1 or table.stride(1) == 1, f"{table.stride()=}"
    assert rows.dtype == counts.dtype == torch.int64, f"{rows.dtype=}, {counts.dtype=}"
    requests = len(counts)
    assert requests <= most_requests, f"{requests} requests, {most_requests=}"
    positions = torch.empty_like(rows)
    firsts = table.new_empty(requests)
    drafts = rows.new_empty(requests, num_drafts)
    _sampled_kernel[(requests,)](
        table, rows, counts, positions, firsts, drafts, table.stride(0),
        DRAFTS=num_drafts, SLOTS_P2=triton.next_power_of_2(num_drafts + 1),
        MOST_P2=triton.next_power_of_2(most_requests), num_warps=1,
    )  # fmt: skip
    return positions, firsts, drafts


@triton.jit
def _advance_kernel(
    slots, tokens, accepted, firsts, first_rows, rows, ngrams, newest, next_position, slot_ngrams,
    WIDTH: tl.constexpr, NGRAM: tl.constexpr, NGRAM_P2: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    slot = tl.load(slots + request)
    count = tl.load(accepted + request)
    token = tl.maximum(tl.load(tokens + request * WIDTH + count), 0).to(tl.int32)
    tl.store(newest + slot, token)
    tl.store(next_position + slot, tl.load(firsts + request) + count.to(tl.int32) + 1)
    if NGRAM:
        row = tl.load(rows + tl.load(first_rows + request) + count)  # the row that the token was sampled from
        back = tl.arange(0, NGRAM_P2)
        exists = back < NGRAM
        older = tl.load(ngrams + row * NGRAM + back - 1, exists & (back >= 1), other=-1)
        tl.store(slot_ngrams + slot * NGRAM + back, tl.where(back == 0, token, older), exists)


def advance(
    slots: Tensor,
    token_ids: Tensor,
    num_accepted: Tensor,
    firsts: Tensor,
    first_rows: Tensor,
    rows: Tensor,
    ngrams: Tensor | None,
    newest: Tensor,
    next_position: Tensor,
    slot_ngrams: Tensor,
) -> None:
    """See ``DeviceTokens.advance``; the last three are its memory by slot."""
    assert token_ids.is_contiguous(), f"{token_ids.stride()=}"
    assert ngrams is None or ngrams.is_contiguous(), f"{ngrams.stride()=}"
    size = 0 if ngrams is None else ngrams.shape[1]
    assert size in (0, slot_ngrams.shape[1]), f"{size=} for {slot_ngrams.shape=}"
    _advance_kernel[(len(slots),)](
        slots, token_ids, num_accepted, firsts, first_rows, rows, slots if ngrams is None else ngrams,
        newest, next_position, slot_ngrams,
        WIDTH=token_ids.shape[1], NGRAM=size, NGRAM_P2=triton.next_power_of_2(max(size, 1)), num_warps=1,
    )  # fmt: skip
