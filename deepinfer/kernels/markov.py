"""The draft's first-order term: logits of a slot, from those of the hidden states and the token before (spec 7.4).

Meaning: ``base + embedding[previous] @ head.T``. Bound by reading ``head`` once; the rows of a batch pass through in
tiles of 16, so a row's sums do not depend on its neighbours.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS = tl.constexpr(16)
_TOKENS = 64


@triton.jit(do_not_specialize=["rows"])
def _markov_kernel(
    base, previous, embedding, head, out, rows, vocab, base_stride, WIDTH: tl.constexpr, WIDTH_P2: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    column = tl.arange(0, WIDTH_P2)
    weight = tl.load(
        head + token[None, :].to(tl.int64) * WIDTH + column[:, None],
        (token[None, :] < vocab) & (column[:, None] < WIDTH),
        other=0.0,
    )
    for first in range(0, rows, _ROWS):
        row = first + tl.arange(0, _ROWS)
        is_row = row < rows
        known = tl.load(previous + row, is_row, other=0)
        places = known[:, None] * WIDTH + column[None, :]
        state = tl.load(embedding + places, is_row[:, None] & (column[None, :] < WIDTH), other=0.0)
        inside = is_row[:, None] & (token[None, :] < vocab)
        place = row[:, None].to(tl.int64)
        logits = tl.load(base + place * base_stride + token[None, :], inside, other=0.0)
        logits += tl.dot(state, weight, out_dtype=tl.float32)
        tl.store(out + place * vocab + token[None, :], logits, inside)


def markov_logits(base: Tensor, previous: Tensor, embedding: Tensor, head: Tensor) -> Tensor:
    """Logits of one slot of every request.

    Args:
        base: float32 ``[requests, vocab]``, rows may be strided.
        previous: int64 ``[requests]``, the token before, in the vocabulary.
        embedding, head: bf16 ``[vocab, width]``.
    Returns:
        float32 ``[requests, vocab]``.
    """
    rows, vocab = base.shape
    width = embedding.shape[1]
    assert head.shape == (vocab, width), f"{head.shape=} {embedding.shape=} {vocab=}"
    assert head.is_contiguous()
    assert embedding.is_contiguous()
    assert base.stride(1) == 1, f"{base.stride()=}"
    assert previous.dtype == torch.int64, f"{previous.dtype=}"
    assert previous.is_contiguous()
    out = torch.empty(rows, vocab, device=base.device)
    if rows == 0:
        return out
    _markov_kernel[(triton.cdiv(vocab, _TOKENS),)](
        base, previous, embedding, head, out, rows, vocab, base.stride(0),
        WIDTH=width, WIDTH_P2=max(16, triton.next_power_of_2(width)), TOKENS=_TOKENS, num_warps=4,
    )  # fmt: skip
    return out
