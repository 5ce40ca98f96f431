"""Which pairs of (row, chosen expert) go to which expert: the order in which a grouped product works on them.

Pair ``p`` is place ``p % k`` of row ``p // k``. The pairs of one expert lie together, cut into blocks of ``block``
pairs; the last block of an expert is filled up with the number of pairs, which stands for nothing. Pairs of expert -1
(padding, or experts of another rank) are in no block. A row's experts are distinct. Built on the device: one launch, no
host reads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.moe import router_cuda


@dataclass(frozen=True, slots=True)
class ExpertBlocks:
    """Pairs in the order of their experts.

    The buffers have the size of the worst case; what is beyond ``num_ordered`` is undefined.
    """

    block: int
    """Pairs per block."""
    num_pairs: int
    ordered: Tensor
    """int32 ``[blocks * block]``: pair numbers, or ``num_pairs`` where a block is filled up."""
    block_expert: Tensor
    """int32 ``[blocks]``: the expert of each block."""
    num_ordered: Tensor
    """int32 ``[1]``: entries of ``ordered`` in use, a multiple of ``block``."""
    offsets: Tensor
    """int32 ``[experts + 1]``: first entry of each expert in ``ordered``; the last is ``num_ordered``."""
    place: Tensor
    """int32 ``[pairs]``: where a pair stands in ``ordered``; -1 for pairs of no expert."""

    @property
    def buffers(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """What a kernel that orders writes."""
        return self.ordered, self.block_expert, self.num_ordered, self.offsets, self.place


def max_blocks(num_pairs: int, num_experts: int, block: int) -> int:
    """Blocks that ``num_pairs`` pairs can need at most: each expert may leave one block partly filled."""
    return max(1, num_pairs // block + min(num_pairs, num_experts))


def new_blocks(num_pairs: int, num_experts: int, block: int, device: torch.device) -> ExpertBlocks:
    """Room for the order of ``num_pairs`` pairs; the kernels write all of it that is defined.

    Every array begins at a multiple of 16 bytes: Triton compiles what reads them anew for other addresses.
    """
    blocks = max_blocks(num_pairs, num_experts, block)
    sizes = [blocks * block, blocks, 1, num_experts + 1, num_pairs]
    rooms = [-(-size // 4) * 4 for size in sizes]
    parts = torch.empty(sum(rooms), dtype=torch.int32, device=device).split(rooms)
    return ExpertBlocks(block, num_pairs, *(part[:size] for part, size in zip(parts, sizes, strict=True)))


MAX_LANES = 1024
"""Pairs that a program counts at once: Triton 3.6 does not compile a histogram of 2,048 for Hopper."""


@triton.jit
def _order_kernel(
    experts_ptr, ordered_ptr, block_expert_ptr, total_ptr, offsets_ptr, place_ptr, num_pairs, num_experts,
    PAIRS: tl.constexpr, BLOCK: tl.constexpr, EXPERTS: tl.constexpr,
    FILL: tl.constexpr,
):  # fmt: skip
    mine = tl.program_id(0)
    bins = tl.arange(0, EXPERTS)
    lanes = tl.arange(0, PAIRS)
    counts = tl.zeros([EXPERTS], tl.int32)
    begin = 0
    while begin < num_pairs:
        expert = tl.load(experts_ptr + begin + lanes, begin + lanes < num_pairs, other=-1)
        counts += tl.histogram(tl.where(expert < 0, num_experts, expert), EXPERTS)  # a bin of its own for nothing
        begin += PAIRS
    counts = tl.where(bins < num_experts, counts, 0)
    blocks = (counts + BLOCK - 1) // BLOCK
    starts = (tl.cumsum(blocks, 0) - blocks) * BLOCK
    start = tl.sum(tl.where(bins == mine, starts, 0))
    num_blocks = tl.sum(tl.where(bins == mine, blocks, 0))
    count = tl.sum(tl.where(bins == mine, counts, 0))
    tl.store(offsets_ptr + mine, start)
    if mine == num_experts - 1:
        tl.store(offsets_ptr + num_experts, start + num_blocks * BLOCK)
        tl.store(total_ptr, start + num_blocks * BLOCK)
    seen = 0
    begin = 0
    while begin < num_pairs:
        pair = begin + lanes
        expert = tl.load(experts_ptr + pair, pair < num_pairs, other=-1)
        is_mine = (expert == mine) & (pair < num_pairs)
        position = start + seen + tl.cumsum(is_mine.to(tl.int32), 0) - 1
        tl.store(ordered_ptr + position, pair, is_mine)
        tl.store(place_ptr + pair, position, is_mine)
        if mine == 0:
            tl.store(place_ptr + pair, -1, (expert < 0) & (pair < num_pairs))
        seen += tl.sum(is_mine.to(tl.int32))
        begin += PAIRS
    if BLOCK > 1:  # a block of 1 is never filled up, and Triton 3.6 cannot compile the store of a single lane
        last = start + count + tl.arange(0, FILL)
        tl.store(ordered_ptr + last, num_pairs, last < start + num_blocks * BLOCK)
    done = 0
    while done < num_blocks:
        tl.store(block_expert_ptr + start // BLOCK + done + lanes, mine, done + lanes < num_blocks)
        done += PAIRS


def order_pairs(experts: Tensor, num_experts: int, block: int, *, cuda: bool | None = None) -> ExpertBlocks:
    """Order the pairs of ``experts`` (int32 ``[rows, k]``, -1 for none) into blocks of one expert each.

    A block of 1 gives the plain order of a contiguous grouped product. Within an expert the pairs keep their order, so
    the result is the same every time.

    Args:
        cuda: force :mod:`.router_cuda` (True) or Triton (False); default the former where it can.
    """
    num_pairs = experts.numel()
    found = new_blocks(num_pairs, num_experts, block, experts.device)
    if cuda if cuda is not None else router_cuda.accepts_order(experts, num_experts):
        router_cuda.order_pairs(experts, num_experts, found.buffers, block)
        return found
    lanes = min(MAX_LANES, max(128, triton.next_power_of_2(num_pairs)))
    _order_kernel[(num_experts,)](
        experts, *found.buffers, num_pairs, num_experts,
        PAIRS=lanes, BLOCK=block, EXPERTS=triton.next_power_of_2(num_experts + 1), FILL=triton.next_power_of_2(block),
    )  # fmt: skip
    return found
