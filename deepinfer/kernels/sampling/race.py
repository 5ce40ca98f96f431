"""The sampler's second launch: the Gumbel race. Greedy rows and rows without truncation end here."""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer.kernels.sampling.gumbel import GOLDEN, gumbel_of_bits, mix64, noise_bound, row_key
from deepinfer.kernels.sampling.stages import (
    LOWEST,
    arrive,
    id_of,
    key_of,
    load_logits,
    mask_of,
    masses_of,
    ordinal_of,
    race_of_block,
    row_maximum,
    scores_of,
    value_of,
)

_ORDINAL_OF_INF = tl.constexpr(0x7F800000)
_ORDINAL_OF_MINUS_INF = tl.constexpr(-0x7F800001)


@triton.jit
def _top_k_floor(group_ptr, row, num_groups, top_k, GROUPS: tl.constexpr):
    """A lower bound of the ``top_k``-th largest logit: that of the group maxima, by their 16 leading bits."""
    each = tl.arange(0, GROUPS)
    maxima = tl.load(group_ptr + row * num_groups + each, mask=each < num_groups, other=float("-inf"))
    leading = ordinal_of(maxima) >> 16
    floor = -32768
    for bit in tl.static_range(16):
        middle = floor + (1 << (15 - bit))
        enough = tl.sum((leading >= middle).to(tl.int32), axis=0) >= top_k
        floor = tl.where(enough, middle, floor)
    # Below the ordinal of -inf there are only NaN.
    return tl.where(floor > (_ORDINAL_OF_MINUS_INF >> 16), value_of(floor << 16), float("-inf"))


@triton.jit(do_not_specialize=["blocks_per_split", "splits"])
def race_kernel(
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
    group_ptr,
    best_ptr,
    mass_ptr,
    order_ptr,
    race_ptr,
    list_size_ptr,
    arrival_ptr,
    token_ptr,
    bad_ptr,
    stride,
    vocab,
    num_blocks,
    num_groups,
    blocks_per_split,
    splits,
    MASKED: tl.constexpr,
    TRUNCATES: tl.constexpr,
    PURPOSE: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    GROUPS: tl.constexpr,
    LIST: tl.constexpr,
):
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    kind = tl.load(kind_ptr + row)
    top_key = row_maximum(maxima_ptr, row, num_blocks, splits, SPLITS)
    ordinal = (top_key >> 32).to(tl.int32)
    is_bad = (ordinal >= _ORDINAL_OF_INF) | (ordinal <= _ORDINAL_OF_MINUS_INF)
    if split == 0:
        tl.store(bad_ptr + row, is_bad)
        tl.store(token_ptr + row, tl.where(is_bad, 0, id_of(top_key)).to(tl.int64))  # the answer of a greedy row
    if (kind != 0) & (is_bad == 0):
        row_max = value_of(ordinal)
        temperature, min_log_p = tl.load(temperature_ptr + row), tl.load(min_log_p_ptr + row)
        floor = row_max * 0.0 - float("inf")
        if TRUNCATES:
            needs_mass = (kind == 2) & (tl.load(top_p_ptr + row) < 1.0)
            top_k = tl.load(top_k_ptr + row)
            if (kind == 2) & (top_k <= num_groups):
                floor = _top_k_floor(group_ptr, row, num_groups, top_k, GROUPS)
                floor = scores_of(floor, row_max, temperature, float("-inf"))
        key = row_key(tl.load(seed_ptr + row), tl.load(position_ptr + row), PURPOSE)
        mask_ptr = mask_of(mask_ptr, mask_row_ptr, row, vocab, MASKED)
        offsets = tl.arange(0, BLOCK)
        steps = (offsets + 1).to(tl.uint64) * GOLDEN
        # The most likely token has score 0: whoever wins is not behind it.
        own = mix64(key + (id_of(top_key) + 1).to(tl.uint64) * GOLDEN)
        to_beat = gumbel_of_bits(own, table_ptr, True)
        best = tl.full([BLOCK], LOWEST, tl.int64)
        mass = tl.zeros([BLOCK], tl.int64)
        first = split * blocks_per_split
        STEP: tl.constexpr = (BLOCK * GOLDEN) % 2**64
        base = key + (first * BLOCK).to(tl.uint64) * GOLDEN
        for block in range(first, tl.minimum(first + blocks_per_split, num_blocks)):
            ids = block * BLOCK + offsets
            x = load_logits(logits_ptr + row * stride, ids, vocab, mask_ptr, MASKED)
            scores = scores_of(x, row_max, temperature, min_log_p)
            if TRUNCATES:
                if needs_mass:
                    mass += masses_of(scores)
            bits = mix64(steps + base)
            base += STEP
            allowed = (scores >= floor) & (scores > float("-inf")) & (scores + noise_bound(bits) >= to_beat)
            if tl.max(allowed.to(tl.int32), axis=0) > 0:
                race = race_of_block(bits, scores, ids, allowed, table_ptr)
                best = tl.maximum(best, race)
                if kind == 1:  # no list is kept: whoever wins beats the best so far as well
                    to_beat = tl.maximum(to_beat, value_of((tl.max(best, axis=0) >> 32).to(tl.int32)))
                if TRUNCATES:
                    if kind == 2:
                        listed = race >= (ordinal_of(to_beat).to(tl.int64) << 32)
                        slot = tl.atomic_add(list_size_ptr + row + tl.zeros_like(ids), 1, mask=listed, sem="relaxed")
                        inside = listed & (slot < LIST)
                        tl.store(order_ptr + row * LIST + slot, key_of(scores, ids), mask=inside)
                        tl.store(race_ptr + row * LIST + slot, race, mask=inside)
        tl.store(best_ptr + row * num_blocks + split, tl.max(best, axis=0))
        if TRUNCATES:
            tl.store(mass_ptr + row * num_blocks + split, tl.sum(mass, axis=0))
        if kind == 1:
            if arrive(arrival_ptr + row, splits):
                each = tl.arange(0, SPLITS)
                partial = tl.load(
                    best_ptr + row * num_blocks + each, mask=each < splits, other=LOWEST, cache_modifier=".cg"
                )
                tl.store(token_ptr + row, id_of(tl.max(partial, axis=0)).to(tl.int64))
