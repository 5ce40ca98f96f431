"""The sampler's first launch: the largest logit of each block of a row, and of each group of tokens for top-k."""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer.kernels.sampling.stages import key_of, load_logits, mask_of


@triton.jit(do_not_specialize=["blocks_per_split"])
def maximum_kernel(
    logits_ptr,
    kind_ptr,
    top_k_ptr,
    mask_ptr,
    mask_row_ptr,
    maxima_ptr,
    group_ptr,
    list_size_ptr,
    stride,
    vocab,
    num_blocks,
    num_groups,
    blocks_per_split,
    MASKED: tl.constexpr,
    TRUNCATES: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    offsets = tl.arange(0, BLOCK)
    if TRUNCATES:
        needs_groups = (tl.load(kind_ptr + row) == 2) & (tl.load(top_k_ptr + row) <= num_groups)
    mask_ptr = mask_of(mask_ptr, mask_row_ptr, row, vocab, MASKED)
    first = split * blocks_per_split
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    where = tl.zeros([BLOCK], tl.int32)
    for block in range(first, tl.minimum(first + blocks_per_split, num_blocks)):
        ids = block * BLOCK + offsets
        raw = tl.load(logits_ptr + row * stride + ids, mask=ids < vocab, other=float("-inf"))
        x = raw
        if MASKED:
            x = load_logits(logits_ptr + row * stride, ids, vocab, mask_ptr, MASKED)
        # NaN and +inf make a row bad, masked or not.
        x = tl.where((raw != raw) | (raw == float("inf")), float("inf"), x)
        is_larger = x > largest
        largest = tl.where(is_larger, x, largest)
        where = tl.where(is_larger, ids, where)
        if TRUNCATES:
            if needs_groups:
                groups = block * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
                top = tl.max(tl.reshape(x, (BLOCK // GROUP, GROUP)), axis=1)
                tl.store(group_ptr + row * num_groups + groups, top, mask=groups < num_groups)
    tl.store(maxima_ptr + row * num_blocks + split, tl.max(key_of(largest, where), axis=0))
    if TRUNCATES:
        if split == 0:
            tl.store(list_size_ptr + row, 0)
