"""The streams that a forward begins with, in one launch: token ids, their embeddings, the first read mix."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.overlap import launch_options, wait_for_earlier_kernels

_BLOCK = 1024


@triton.jit
def _first_streams_kernel(
    ids, embedding, trunk, read_mix, hidden,
    M: tl.constexpr, M_P2: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    wait_for_earlier_kernels(OVERLAP)
    token = tl.load(ids + row)
    columns = part * BLOCK + tl.arange(0, BLOCK)
    mask = columns < hidden
    value = tl.load(embedding + token.to(tl.int64) * hidden + columns, mask, other=0.0)
    for stream in tl.static_range(M):
        tl.store(trunk + (row * M + stream) * hidden + columns, value, mask)
    if part == 0:
        streams = tl.arange(0, M_P2)
        tl.store(read_mix + row * M + streams, tl.where(streams == 0, 1.0, 0.0), streams < M)


def first_streams(ids: Tensor, embedding: Tensor, streams: int) -> tuple[Tensor, Tensor]:
    """Equal streams of token ids, of which the first is read.

    Args:
        ids: ``[rows]`` int32 or int64, dense.
        embedding: ``[vocab, hidden]`` bf16.
    Returns:
        trunk ``[rows, streams, hidden]`` bf16 and read mix ``[rows, streams]`` float32.
    """
    rows, hidden = ids.shape[0], embedding.shape[1]
    assert embedding.is_contiguous()
    assert ids.is_contiguous()
    trunk = embedding.new_empty(rows, streams, hidden)
    read_mix = torch.empty(rows, streams, dtype=torch.float32, device=embedding.device)
    if rows:
        _first_streams_kernel[(rows, triton.cdiv(hidden, _BLOCK))](
            ids, embedding, trunk, read_mix, hidden,
            M=streams, M_P2=triton.next_power_of_2(streams), BLOCK=_BLOCK, num_warps=4,
            **launch_options(embedding.device),
        )  # fmt: skip
    return trunk, read_mix
