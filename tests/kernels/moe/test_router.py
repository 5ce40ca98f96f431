"""The router kernel against the reference: experts, weights, and the order of the pairs."""

from __future__ import annotations

import pytest
import torch

from deepinfer.kernels.moe.expert_blocks import ExpertBlocks, max_blocks, order_pairs
from deepinfer.kernels.moe.router import Router, Routing
from deepinfer.ops.moe import route

SIZES = [(1, 8, 256, 2), (19, 8, 256, 2), (5, 24, 1120, 3), (33, 128, 160, 6)]
"""rows, experts, hidden, chosen."""


def _weights(rows: int, experts: int, hidden: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(rows + experts)
    x = torch.randn(rows, hidden).bfloat16()
    gate = (torch.randn(experts, hidden) * 3 / hidden**0.5).bfloat16()
    return tuple(part.to(device) for part in (x, gate, torch.randn(experts) * 0.1, torch.randn(experts) * 0.1))


def assert_order(blocks: ExpertBlocks, experts: torch.Tensor, num_experts: int) -> None:
    """Every pair of an expert stands once, in a block of its expert; the rest is filler."""
    flat = experts.flatten().cpu().tolist()
    number = int(blocks.num_ordered)
    ordered = blocks.ordered[:number].cpu().tolist()
    assert number % blocks.block == 0
    assert sorted(pair for pair in ordered if pair != len(flat)) == [p for p, e in enumerate(flat) if e >= 0]
    block_expert = blocks.block_expert[: number // blocks.block].cpu().tolist()
    assert block_expert == sorted(block_expert)
    place = blocks.place.cpu().tolist()
    for at, pair in enumerate(ordered):
        if pair != len(flat):
            assert flat[pair] == block_expert[at // blocks.block]
            assert place[pair] == at
    assert [p for p in range(len(flat)) if place[p] < 0] == [p for p, e in enumerate(flat) if e < 0]
    counts = [-(-flat.count(e) // blocks.block) * blocks.block for e in range(num_experts)]
    assert blocks.offsets.cpu().tolist() == [sum(counts[:e]) for e in range(num_experts + 1)]


@pytest.mark.parametrize(("rows", "experts", "hidden", "top"), SIZES)
@pytest.mark.parametrize("way", ["one launch", "two launches", None])
def test_router_chooses_what_the_reference_chooses(rows, experts, hidden, top, way, device):
    x, gate, bias, image_bias = _weights(rows, experts, hidden, device)
    is_image = torch.arange(rows, device=device) % 3 == 1
    positions = torch.arange(rows, dtype=torch.int32, device=device)
    positions[rows // 2 + 1 :: 4] = -1
    router = Router(gate, bias, image_bias, top, 1.5)
    both = torch.where(is_image[:, None], image_bias, bias).double()
    expected, weights = route(x, gate.double(), both, top, 1.5)
    expected[positions < 0], weights[positions < 0] = -1, 0
    for _ in range(2):  # the counters of the first launch must not disturb the second
        found = router.forward(x, positions=positions, is_image=is_image, block=4, way=way)
        assert torch.equal(found.experts.long(), expected)
        torch.testing.assert_close(found.weights.double(), weights, rtol=2e-6, atol=1e-9)  # float32 sums
        assert found.blocks is not None
        assert_order(found.blocks, expected, experts)


def test_equal_scores_go_to_the_lower_expert(device):
    x = torch.ones(3, 64, dtype=torch.bfloat16, device=device)
    gate = torch.zeros(8, 64, dtype=torch.bfloat16, device=device)
    router = Router(gate, torch.tensor([0, 1, 0, 1, 1, 0, 0, 0.0], device=device), None, 4, 1.0)
    assert router.forward(x).experts.tolist() == [[1, 3, 4, 0]] * 3
    assert router.forward(x).blocks is None


def test_a_row_alone_gets_the_same_bits(device):
    x, gate, bias, _ = _weights(33, 24, 1120, device)
    router = Router(gate, bias, None, 3, 1.5)
    together: Routing = router.forward(x)  # two launches; alone it is one
    for row in (0, 17, 32):
        alone = router.forward(x[row : row + 1].clone())
        assert torch.equal(alone.experts[0], together.experts[row])
        assert torch.equal(alone.weights[0], together.weights[row])


@pytest.mark.parametrize(
    ("rows", "num_experts", "top", "block"), [(1, 8, 2, 8), (37, 8, 3, 1), (37, 8, 3, 24), (50, 100, 6, 4)]
)
def test_pairs_are_ordered_by_expert(rows, num_experts, top, block, device):
    torch.manual_seed(rows)
    experts = torch.rand(rows, num_experts).topk(top, 1).indices.int()
    experts[torch.rand(rows, top) < 0.2] = -1
    blocks = order_pairs(experts.to(device), num_experts, block)
    assert blocks.ordered.shape[0] == max_blocks(rows * top, num_experts, block) * block
    assert_order(blocks, experts, num_experts)


def test_no_pairs_give_no_blocks(device):
    blocks = order_pairs(torch.full((4, 2), -1, dtype=torch.int32, device=device), 8, 16)
    assert int(blocks.num_ordered) == 0
    assert blocks.place.tolist() == [-1] * 8
