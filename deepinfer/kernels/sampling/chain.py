"""The sampler's third launch: which contender of a row with top-p or top-k is the first that these keep."""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer.kernels.sampling.gumbel import GOLDEN, mix64, row_key
from deepinfer.kernels.sampling.stages import (
    LOWEST,
    arrive,
    id_of,
    key_of,
    load_logits,
    mask_of,
    masses_of,
    race_of_block,
    row_maximum,
    scores_of,
    value_of,
)

_HIGHEST = tl.constexpr(2**63 - 1)


@triton.jit
def _order_key_of(logits_row_ptr, token, row_max, temperature, min_log_p):
    scores = scores_of(tl.load(logits_row_ptr + token), row_max, temperature, min_log_p)
    return key_of(scores, token)


@triton.jit
def _next_link(
    logits_row_ptr,
    table_ptr,
    mask_ptr,
    key,
    link,
    row_max,
    temperature,
    min_log_p,
    vocab,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Order key of the winner among the tokens before ``link``, by reading the whole row."""
    offsets = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], LOWEST, tl.int64)
    for block in range(tl.cdiv(vocab, BLOCK)):
        ids = block * BLOCK + offsets
        x = load_logits(logits_row_ptr, ids, vocab, mask_ptr, MASKED)
        scores = scores_of(x, row_max, temperature, min_log_p)
        allowed = (key_of(scores, ids) > link) & (scores > float("-inf"))
        if tl.max(allowed.to(tl.int32), axis=0) > 0:
            bits = mix64(key + (ids + 1).to(tl.uint64) * GOLDEN)
            best = tl.maximum(best, race_of_block(bits, scores, ids, allowed, table_ptr))
    return _order_key_of(logits_row_ptr, id_of(tl.max(best, axis=0)), row_max, temperature, min_log_p)


@triton.jit
def _before_link(
    logits_row_ptr,
    mask_ptr,
    link,
    row_max,
    temperature,
    min_log_p,
    vocab,
    needs_mass,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Mass and number of the tokens before ``link``, by reading the whole row."""
    offsets = tl.arange(0, BLOCK)
    mass = tl.zeros([BLOCK], tl.int64)
    count = tl.zeros([BLOCK], tl.int32)
    for block in range(tl.cdiv(vocab, BLOCK)):
        ids = block * BLOCK + offsets
        x = load_logits(logits_row_ptr, ids, vocab, mask_ptr, MASKED)
        scores = scores_of(x, row_max, temperature, min_log_p)
        is_before = key_of(scores, ids) > link
        count += is_before.to(tl.int32)
        if needs_mass:
            mass += tl.where(is_before, masses_of(scores), 0)
    return tl.sum(mass, axis=0), tl.sum(count, axis=0)


@triton.jit(do_not_specialize=["blocks_per_split", "splits"])
def chain_kernel(
    logits_ptr,
    kind_ptr,
    temperature_ptr,
    min_log_p_ptr,
    top_p_ptr,
    top_k_ptr,
    seed_ptr,
    position_ptr,
    table_ptr,
    mask_ptr,
    mask_row_ptr,
    maxima_ptr,
    best_ptr,
    mass_ptr,
    order_ptr,
    race_ptr,
    list_size_ptr,
    before_ptr,
    arrival_ptr,
    token_ptr,
    bad_ptr,
    stride,
    vocab,
    num_blocks,
    blocks_per_split,
    splits,
    MASKED: tl.constexpr,
    PURPOSE: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOW_BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    LIST: tl.constexpr,
):
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    is_bad = tl.load(bad_ptr + row) != 0
    if (tl.load(kind_ptr + row) == 2) & (is_bad == 0):
        row_ptr = logits_ptr + row * stride
        mask_ptr = mask_of(mask_ptr, mask_row_ptr, row, vocab, MASKED)
        row_max = value_of((row_maximum(maxima_ptr, row, num_blocks, splits, SPLITS) >> 32).to(tl.int32))
        temperature, min_log_p = tl.load(temperature_ptr + row), tl.load(min_log_p_ptr + row)
        top_p, top_k = tl.load(top_p_ptr + row), tl.load(top_k_ptr + row)
        needs_mass = top_p < 1.0

        # The links: winner of the race, winner among those before it, and so on.
        each = tl.arange(0, SPLITS)
        partial_best = tl.load(best_ptr + row * num_blocks + each, mask=each < splits, other=LOWEST)
        winner = id_of(tl.max(partial_best, axis=0))
        link_0 = _order_key_of(row_ptr, winner, row_max, temperature, min_log_p)
        size = tl.load(list_size_ptr + row)
        slot = tl.arange(0, LIST)
        is_listed = (slot < size) & (size <= LIST)
        order = tl.load(order_ptr + row * LIST + slot, mask=is_listed, other=LOWEST)
        race = tl.load(race_ptr + row * LIST + slot, mask=is_listed, other=LOWEST)
        link_1 = _listed_link(order, race, link_0)
        link_2 = _listed_link(order, race, link_1)
        link_3 = _listed_link(order, race, link_2)

        offsets = tl.arange(0, BLOCK)
        mass_0 = tl.zeros([BLOCK], tl.int64)
        mass_1 = tl.zeros([BLOCK], tl.int64)
        mass_2 = tl.zeros([BLOCK], tl.int64)
        mass_3 = tl.zeros([BLOCK], tl.int64)
        count_0 = tl.zeros([BLOCK], tl.int32)
        count_1 = tl.zeros([BLOCK], tl.int32)
        count_2 = tl.zeros([BLOCK], tl.int32)
        count_3 = tl.zeros([BLOCK], tl.int32)
        first = split * blocks_per_split
        for block in range(first, tl.minimum(first + blocks_per_split, num_blocks)):
            ids = block * BLOCK + offsets
            x = load_logits(row_ptr, ids, vocab, mask_ptr, MASKED)
            scores = scores_of(x, row_max, temperature, min_log_p)
            keys = key_of(scores, ids)
            count_0 += (keys > link_0).to(tl.int32)
            count_1 += (keys > link_1).to(tl.int32)
            count_2 += (keys > link_2).to(tl.int32)
            count_3 += (keys > link_3).to(tl.int32)
            if needs_mass:
                masses = masses_of(scores)
                mass_0 += tl.where(keys > link_0, masses, 0)
                mass_1 += tl.where(keys > link_1, masses, 0)
                mass_2 += tl.where(keys > link_2, masses, 0)
                mass_3 += tl.where(keys > link_3, masses, 0)
        out = before_ptr + (row * num_blocks + split) * 8
        tl.store(out + 0, tl.sum(mass_0, axis=0))
        tl.store(out + 1, tl.sum(mass_1, axis=0))
        tl.store(out + 2, tl.sum(mass_2, axis=0))
        tl.store(out + 3, tl.sum(mass_3, axis=0))
        tl.store(out + 4, tl.sum(count_0, axis=0).to(tl.int64))
        tl.store(out + 5, tl.sum(count_1, axis=0).to(tl.int64))
        tl.store(out + 6, tl.sum(count_2, axis=0).to(tl.int64))
        tl.store(out + 7, tl.sum(count_3, axis=0).to(tl.int64))

        if arrive(arrival_ptr + row, splits):
            total = tl.sum(tl.load(mass_ptr + row * num_blocks + each, mask=each < splits, other=0), axis=0)
            limit = total * 0 + _HIGHEST
            if needs_mass:
                limit = (total.to(tl.float64) * top_p).to(tl.int64)
            link = link_0
            is_kept = _is_kept(before_ptr, row, num_blocks, splits, 0, limit, top_k, SPLITS)
            if (is_kept == 0) & (link_1 != _HIGHEST):
                link = link_1
                is_kept = _is_kept(before_ptr, row, num_blocks, splits, 1, limit, top_k, SPLITS)
            if (is_kept == 0) & (link_2 != _HIGHEST):
                link = link_2
                is_kept = _is_kept(before_ptr, row, num_blocks, splits, 2, limit, top_k, SPLITS)
            if (is_kept == 0) & (link_3 != _HIGHEST):
                link = link_3
                is_kept = _is_kept(before_ptr, row, num_blocks, splits, 3, limit, top_k, SPLITS)
            if is_kept == 0:
                key = row_key(tl.load(seed_ptr + row), tl.load(position_ptr + row), PURPOSE)
                while is_kept == 0:
                    link = _next_link(
                        row_ptr, table_ptr, mask_ptr, key, link, row_max, temperature, min_log_p, vocab,
                        MASKED, SLOW_BLOCK,
                    )  # fmt: skip
                    before, count = _before_link(
                        row_ptr, mask_ptr, link, row_max, temperature, min_log_p, vocab, needs_mass,
                        MASKED, SLOW_BLOCK,
                    )  # fmt: skip
                    is_kept = ((before <= limit) & (count < top_k)).to(tl.int32)
            tl.store(token_ptr + row, id_of(link).to(tl.int64))


@triton.jit
def _listed_link(order, race, link):
    """Order key of the winner among the listed tokens before ``link``; highest if there is none."""
    alive = tl.where(order > link, race, LOWEST)
    winner = tl.max(alive, axis=0)
    found = tl.max(tl.where(race == winner, order, LOWEST), axis=0)
    return tl.where(winner == LOWEST, _HIGHEST, found)


@triton.jit
def _is_kept(before_ptr, row, num_blocks, splits, which, limit, top_k, SPLITS: tl.constexpr):
    """Whether top-p and top-k keep link number ``which``: 0 or 1."""
    each = tl.arange(0, SPLITS)
    at = before_ptr + (row * num_blocks + each) * 8 + which
    mass = tl.sum(tl.load(at, mask=each < splits, other=0, cache_modifier=".cg"), axis=0)
    count = tl.sum(tl.load(at + 4, mask=each < splits, other=0, cache_modifier=".cg"), axis=0)
    return ((mass <= limit) & (count < top_k)).to(tl.int32)
