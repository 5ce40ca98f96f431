"""Window, sink, compressed entries and output groups against scalar loops; replay rules of spec 6."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer.errors import RequestError
from deepinfer.reference.ablation import Ablation
from deepinfer.reference.attention import attend, project_output, window_mask
from deepinfer.reference.compressor import latents
from deepinfer.reference.parameters import Parameters
from deepinfer.reference.roundings import Roundings
from deepinfer.reference.setting import Setting

from .tiny import random_ids, random_weights, tiny_config, tiny_model


def test_window_counts_the_query_itself() -> None:
    assert window_mask(torch.arange(5), 3).int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [0, 1, 1, 1, 0],
        [0, 0, 1, 1, 1],
    ]
    assert window_mask(torch.arange(4), 3, floor=2).int().tolist() == [[0] * 4, [0] * 4, [0, 0, 1, 0], [0, 0, 1, 1]]


def test_attention_equals_scalar_loops_with_the_sink_in_the_denominator_only() -> None:
    queries, keys = torch.randn(2, 3, 8, dtype=torch.float64), torch.randn(5, 8, dtype=torch.float64)
    keys[4] = keys[1]  # a key that is there twice counts twice
    visible = torch.tensor([[True, True, False, False, True], [False] * 5])
    sink = torch.tensor([0.3, -2.0, 4.0], dtype=torch.float64)
    context, _ = attend(queries, keys, visible, sink)
    for head in range(3):
        total = math.exp(sink[head].item())
        expected = torch.zeros(8, dtype=torch.float64)
        for index in (0, 1, 4):
            weight = math.exp(float(queries[0, head] @ keys[index]) / math.sqrt(8))
            total += weight
            expected += weight * keys[index]
        torch.testing.assert_close(context[0, head], expected / total)
    assert not context[1].any()  # nothing visible: nothing contributes


def test_output_groups_are_neighbouring_heads() -> None:
    config = tiny_config(num_attention_heads=4, head_dim=32, o_groups=2, o_lora_rank=32)
    setting = Setting(config.text, Roundings.none(), Ablation())
    weights = {"wo_a.weight": torch.randn(64, 64), "wo_b.weight": torch.randn(256, 64)}
    context = torch.randn(1, 4, 32)
    first = weights["wo_a.weight"][:32] @ torch.cat((context[0, 0], context[0, 1]))
    second = weights["wo_a.weight"][32:] @ torch.cat((context[0, 2], context[0, 3]))
    expected = weights["wo_b.weight"] @ torch.cat((first, second))
    output = project_output(context, Parameters(weights, torch.float32), setting)
    torch.testing.assert_close(output[0], expected, rtol=1e-4, atol=1e-4)


def test_ratio_two_pools_every_channel_of_an_aligned_pair_by_its_own_softmax() -> None:
    config = tiny_config(hidden_size=32, head_dim=32)
    setting = Setting(config.text, Roundings.none(), Ablation())
    weights = {
        "wkv.weight": torch.randn(32, 32),
        "wgate.weight": torch.randn(32, 32),
        "norm.weight": torch.ones(32),
    }
    x = torch.randn(5, 32)  # the fifth token waits for its partner
    pooled = latents(x, 2, Parameters(weights, torch.float32), setting)
    assert pooled.shape == (2, 32)
    for entry in range(2):
        channels = []
        for channel in range(32):
            scores = [math.exp(float(weights["wgate.weight"][channel] @ x[2 * entry + i])) for i in (0, 1)]
            values = [float(weights["wkv.weight"][channel] @ x[2 * entry + i]) for i in (0, 1)]
            channels.append((scores[0] * values[0] + scores[1] * values[1]) / sum(scores))
        size = math.sqrt(sum(value * value for value in channels) / 32)
        torch.testing.assert_close(pooled[entry], torch.tensor(channels) / size, rtol=1e-4, atol=1e-5)


def run(ids: Tensor, **options: Any) -> tuple[Tensor, dict[str, Any]]:
    trace: dict[str, Any] = {}
    with torch.no_grad():
        logits = tiny_model(dtype=torch.float64).forward(ids, trace=trace, **options)
    return logits, trace


def test_a_longer_sequence_does_not_change_earlier_rows() -> None:
    """Decode equals prefill: no row looks ahead, odd lengths included."""
    ids = random_ids(75)
    full, _ = run(ids)
    for length in (1, 2, 15, 16, 17, 33, 66):
        prefix, _ = run(ids[:length])
        torch.testing.assert_close(prefix, full[:length], rtol=1e-9, atol=1e-9)


def test_decoder_replay_of_the_whole_prompt_changes_nothing() -> None:
    ids = random_ids(40)
    exact, _ = run(ids)
    kept, _ = run(ids, decoder_keep=40)
    assert torch.equal(exact, kept)
    longer, _ = run(ids, decoder_keep=100)
    assert torch.equal(exact, longer)


def test_decoder_replay_does_not_need_earlier_decoder_rows() -> None:
    """No window of a kept row reaches before the kept rows, and the first decoder layer's entries stay complete."""
    ids = random_ids(60)
    exact, exact_trace = run(ids)
    kept, trace = run(ids, decoder_keep=25)
    assert torch.equal(trace["layers.4.attn.entry"], exact_trace["layers.4.attn.entry"])
    assert not torch.allclose(kept[40:], exact[40:])
    mask = trace["layers.5.attn.probabilities"][:, :, :60] > 0
    assert not mask[:35].any()
    assert mask[35:, 0].sum(1).tolist() == [min(row + 1, 16) for row in range(25)]


def test_encoder_replay_reads_old_entries_with_a_floored_window() -> None:
    ids = random_ids(70)
    exact, exact_trace = run(ids)
    replayed, trace = run(ids, prefix_hit=40)
    start = 40 - 16
    assert replayed.shape == (70 - start, 512)
    entries = trace["layers.4.attn.entry"]
    torch.testing.assert_close(entries[:40], exact_trace["layers.4.attn.entry"][:40])
    assert not torch.allclose(entries[40:], exact_trace["layers.4.attn.entry"][40:])
    assert torch.equal(trace["layers.1.engram.rows"], exact_trace["layers.1.engram.rows"][start:])
    window = trace["layers.0.attn.probabilities"][:, 0] > 0
    assert window.sum(1).tolist() == [min(row + 1, 16) for row in range(70 - start)]
    assert not torch.allclose(replayed, exact[start:])


def test_a_hit_no_longer_than_the_window_replays_everything() -> None:
    """Then nothing is missing, so the result is the cold one."""
    ids = random_ids(50)
    exact, _ = run(ids)
    replayed, _ = run(ids, prefix_hit=14)
    torch.testing.assert_close(replayed, exact, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("hit", [0, 3, 50, 52])
def test_impossible_hits_are_refused(hit: int) -> None:
    with pytest.raises(RequestError, match="prefix_hit"):
        run(random_ids(50), prefix_hit=hit)


def test_switch_to_fp8_entries_is_used() -> None:
    ids = random_ids(20)
    entries = []
    for fp4 in (True, False):
        config = tiny_config(use_fp4_sparse_kv=fp4)
        trace: dict[str, Tensor] = {}
        roundings = Roundings.of("bf16_rope", "q4_entry")
        tiny_model(config, random_weights(config), roundings).forward(ids, trace=trace)
        entries.append(trace["layers.2.attn.entry"].detach())
    assert len(entries[0][0, :16].abs().unique()) <= 8  # one scale, eight magnitudes
    assert len(entries[1][0, :16].abs().unique()) > 8
