"""Selection: scores, ties, visibility and candidate blocks, against scalar loops."""

from __future__ import annotations

import torch

from deepinfer.reference.ablation import Ablation
from deepinfer.reference.compressor import visible_entries
from deepinfer.reference.indexer import (
    UNAVAILABLE,
    candidate_blocks,
    in_blocks,
    index_scores,
    membership,
    random_scores,
    select_top,
)
from deepinfer.reference.parameters import Parameters
from deepinfer.reference.roundings import Roundings
from deepinfer.reference.setting import Setting

from .tiny import random_ids, random_weights, tiny_config, tiny_model


def scalar_top(scores: list[float], count: int) -> list[int]:
    """Largest scores, lowest index first among equals, by sorting Python tuples."""
    available = [(-score, index) for index, score in enumerate(scores) if score != UNAVAILABLE]
    return sorted(index for _, index in sorted(available)[:count])


def unpadded(row: torch.Tensor) -> list[int]:
    return [index for index in row.tolist() if index >= 0]


def test_scores_apply_relu_before_the_signed_weight() -> None:
    config = tiny_config(index_n_heads=2, index_head_dim=32, hidden_size=32)
    setting = Setting(config.text, Roundings.none(), Ablation())
    queries, keys, x = torch.zeros(1, 2, 32), torch.zeros(3, 32), torch.zeros(1, 32)
    queries[0, 0, 0], queries[0, 1, 1] = 1.0, 1.0
    keys[0, 0], keys[1, 1], keys[2, 0] = 3.0, 5.0, -7.0
    x[0, 0] = 1.0
    weight = torch.zeros(2, 32)
    weight[0, 0], weight[1, 0] = 2.0, -0.5
    parameters = Parameters({"weights_proj.weight": weight}, torch.float32)
    assert index_scores(x, queries, keys, parameters, setting).tolist() == [[6.0, -2.5, 0.0]]


def test_equal_scores_go_to_the_lowest_index() -> None:
    scores = torch.tensor([[1.0, 0.0, -0.0, 0.0, 2.0, -0.0], [0.0] * 6, [-0.0, 0.0, -1.0, 0.0, -0.0, 0.0]])
    assert select_top(scores, 3).tolist() == [[0, 1, 4], [0, 1, 2], [0, 1, 3]]


def test_fewer_entries_than_asked_for_are_padded() -> None:
    scores = torch.tensor([[UNAVAILABLE, 1.0, UNAVAILABLE], [UNAVAILABLE] * 3])
    assert select_top(scores, 2).tolist() == [[1, -1], [-1, -1]]
    assert select_top(scores, 5).tolist() == [[1, -1, -1, -1, -1], [-1] * 5]
    assert select_top(torch.zeros(2, 0), 2).tolist() == [[-1, -1], [-1, -1]]


def test_selection_equals_a_scalar_sort() -> None:
    scores = torch.randint(-3, 3, (40, 57)).float()
    scores[torch.rand(40, 57) < 0.3] = UNAVAILABLE
    for row, selected in zip(scores.tolist(), select_top(scores, 12), strict=True):
        assert unpadded(selected) == scalar_top(row, 12)


def test_membership_inverts_a_padded_list() -> None:
    assert membership(torch.tensor([[0, 2, -1], [-1, -1, -1]]), 3).tolist() == [[True, False, True], [False] * 3]


def test_visible_entries_are_complete_groups() -> None:
    positions = torch.arange(5)
    assert visible_entries(positions, 5, 1).sum(1).tolist() == [1, 2, 3, 4, 5]
    assert visible_entries(positions, 2, 2).sum(1).tolist() == [0, 1, 1, 2, 2]


def scalar_blocks(scores: list[float], num_visible: int, size: int, count: int) -> list[int]:
    if num_visible == 0:
        return []
    best = [max(scores[start : min(start + size, num_visible)]) for start in range(0, num_visible, size)]
    best[-1] = float("inf")
    return scalar_top(best, count)


def test_candidate_blocks_equal_scalar_loops() -> None:
    scores = torch.randint(-4, 4, (45, 45)).float()
    visible = visible_entries(torch.arange(45) - 1, 45, 1)  # the first row sees nothing
    blocks = candidate_blocks(scores, visible, 4, 3)
    for row in range(45):
        assert unpadded(blocks[row]) == scalar_blocks(scores[row].tolist(), row, 4, 3)


def test_the_last_visible_block_is_kept_and_hidden_entries_do_not_count() -> None:
    scores = torch.tensor([[5.0, 5.0, 4.0, 4.0, -9.0, 100.0, 100.0, 100.0]])
    visible = torch.arange(8)[None] < 5
    blocks = candidate_blocks(scores, visible, 2, 2)
    assert blocks.tolist() == [[0, 2]]
    assert in_blocks(blocks, 2, 8).tolist() == [[True, True, False, False, True, True, False, False]]


def test_infinite_scores_do_not_beat_the_last_block() -> None:
    scores = torch.tensor([[float("inf"), float("inf"), -1.0]])
    assert candidate_blocks(scores, torch.ones(1, 3, dtype=torch.bool), 1, 1).tolist() == [[2]]


def selections(**changes: object) -> dict[str, torch.Tensor]:
    config = tiny_config(**changes)
    trace: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        tiny_model(config, random_weights(config)).forward(random_ids(80), trace=trace)
    return trace


def test_reindex_selects_inside_the_blocks_and_the_source_outside_too() -> None:
    trace = selections(candidate_topk_blocks=2)
    row = 79
    allowed = in_blocks(trace["layers.4.attn.blocks"], 8, 80)
    assert unpadded(trace["layers.4.attn.blocks"][row])[-1] == 9
    inside = trace["layers.6.attn.index_scores"].masked_fill(~allowed, UNAVAILABLE)
    assert unpadded(trace["layers.6.attn.selected"][row]) == scalar_top(inside[row].tolist(), 16)
    source = trace["layers.4.attn.selected"]
    assert unpadded(source[row]) == scalar_top(trace["layers.4.attn.index_scores"][row].tolist(), 16)
    assert not allowed[row][source[row]].all()
    for reuse, source_layer in ((3, 2), (5, 4), (7, 6)):
        assert torch.equal(trace[f"layers.{reuse}.attn.selected"], trace[f"layers.{source_layer}.attn.selected"])


def test_without_a_candidate_source_nobody_is_restricted() -> None:
    trace = selections(candidate_source_layer_id=None)
    assert "layers.4.attn.blocks" not in trace
    for row in (0, 40, 79):
        expected = scalar_top(trace["layers.6.attn.index_scores"][row].tolist(), 16)
        assert unpadded(trace["layers.6.attn.selected"][row]) == expected


def test_index_keys_come_from_their_own_source_list() -> None:
    """Two KV streams, but index keys only at the first: the second stream's indexer scores the first one's keys."""
    changes = {
        "compress_ratios": [0, 0, 1, 1, 1, 1, 1, 1, 0, 0],
        "kv_source_layer_ids": [2, 4],
        "index_k_source_layer_ids": [2],
    }
    config = tiny_config(**changes)
    weights = random_weights(config)
    assert "layers.4.attn.indexer.wk.weight" not in weights
    trace: dict[str, torch.Tensor] = {}
    tiny_model(config, weights).forward(random_ids(40), trace=trace)
    assert "layers.4.attn.index_key" not in trace
    assert "layers.4.attn.entry" in trace
    query, keys = trace["layers.4.attn.index_query"], trace["layers.2.attn.index_key"]
    gate = trace["layers.4.attn.input"] @ weights["layers.4.attn.indexer.weights_proj.weight"].T
    row = 39
    expected = [
        sum(float(gate[row, head] * max(query[row, head] @ key, torch.tensor(0.0))) for head in range(4))
        for key in keys
    ]
    torch.testing.assert_close(trace["layers.4.attn.index_scores"][row], torch.tensor(expected), rtol=1e-4, atol=1e-4)


def test_random_scores_do_not_depend_on_the_length_of_the_sequence() -> None:
    short = random_scores(torch.arange(20), 20, 1, layer_id=4, seed=7)
    long = random_scores(torch.arange(50), 50, 1, layer_id=4, seed=7)
    assert torch.equal(short, long[:20, :20])
    assert not torch.equal(short, random_scores(torch.arange(20), 20, 1, layer_id=6, seed=7))
