"""What the fused model of the NVIDIA path takes, and what is set aside for its steps. No GPU needed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deepinfer.checkpoint.tiny import tiny_config
from deepinfer.config.cache_size import size_cache
from deepinfer.config.engine import EngineConfig
from deepinfer.config.env import read_environment
from deepinfer.config.resolve import resolve
from deepinfer.config.scheduler import SchedulerConfig
from deepinfer.engine import fused_setup
from deepinfer.engine.fused_setup import (
    draft_graph_sizes,
    graph_sizes,
    not_fused_because,
    prompt_graph_sizes,
    step_shape,
)
from deepinfer.engine.speculation_setup import _measured_sizes
from deepinfer.errors import CapacityError, ConfigError
from deepinfer.kvcache.memory_plan import StepShape, step_reserves


def on_nvidia(path: Path, **arguments: Any) -> EngineConfig:
    """A configuration as if the machine had a GPU."""
    config, _ = resolve({"model": path, **arguments}, read_environment({}))
    return replace(config, device=replace(config.device, platform="nvidia"))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ({}, None),
        ({"hc_shifted": False}, "hc_shifted"),
        ({"candidate_block_size": 6, "candidate_topk_blocks": 11}, "candidate_block_size is 6"),
        ({"candidate_block_size": 6, "candidate_source_layer_id": None}, None),
        ({"o_lora_rank": 16}, "o_lora_rank is 16"),
    ],
)
def test_models_that_the_kernels_do_not_take_are_refused(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch, text: dict[str, Any], reason: str | None
) -> None:
    monkeypatch.setattr(fused_setup.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(fused_setup.torch.cuda, "is_available", lambda: False)
    found = not_fused_because(on_nvidia(tiny_path), tiny_config(vision=False, **text))
    assert found is None if reason is None else reason in str(found)


@pytest.mark.parametrize(("capability", "is_taken"), [((8, 0), False), ((8, 9), True), ((9, 0), True), ((10, 0), True)])
def test_gpus_without_fp8_are_refused(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], is_taken: bool
) -> None:
    monkeypatch.setattr(fused_setup.importlib.util, "find_spec", lambda name: object())
    cuda = fused_setup.torch.cuda
    monkeypatch.setattr(cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(cuda, "get_device_name", lambda: "A100")
    found = not_fused_because(on_nvidia(tiny_path), tiny_config(vision=False))
    assert found is None if is_taken else "A100" in str(found)


def test_no_captured_step_is_larger_than_a_step_may_be() -> None:
    """Buffers are made for ``max_num_batched_tokens`` rows."""
    limits = SchedulerConfig(max_num_seqs=100, max_num_batched_tokens=300, num_speculative_tokens=5)
    assert graph_sizes(limits)[-1] == 300
    assert graph_sizes(replace(limits, max_num_batched_tokens=4096))[-1] == 512
    assert graph_sizes(replace(limits, num_speculative_tokens=0))[-1] == 100
    assert graph_sizes(SchedulerConfig(max_num_seqs=1)) == [1]


def test_captured_drafts_hold_every_batch_up_to_a_limit() -> None:
    limits = SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=4096, num_speculative_tokens=5)
    assert draft_graph_sizes(limits) == [1, 2, 4, 8, 16, 24, 32, 48, 64]
    assert draft_graph_sizes(replace(limits, max_num_seqs=256))[-1] == 512 // 5
    assert draft_graph_sizes(replace(limits, max_num_batched_tokens=70))[-1] == 14
    assert draft_graph_sizes(replace(limits, max_num_seqs=1, max_num_batched_tokens=4)) == []
    assert draft_graph_sizes(replace(limits, num_speculative_tokens=0)) == []


def test_memory_is_set_aside_for_graphs_that_are_captured(tiny_path: Path) -> None:
    arguments: dict[str, Any] = {"max_num_seqs": 16, "num_speculative_tokens": 4}
    shapes = {mode: step_shape(on_nvidia(tiny_path, cuda_graphs=mode, **arguments)) for mode in ("startup", "off")}
    config = on_nvidia(tiny_path, **arguments)
    decoding, drafting = graph_sizes(config.scheduler), draft_graph_sizes(config.scheduler)
    prompts = prompt_graph_sizes(config)
    assert shapes["startup"].num_graphs == len(decoding) + len(prompts) + len(drafting)
    assert shapes["startup"].num_sampler_graphs == len(decoding)
    assert shapes["startup"].max_graph_drafts == 16
    assert shapes["startup"].max_graph_samples == decoding[-1]
    off = shapes["off"]
    assert off.num_graphs == off.num_sampler_graphs == off.max_graph_drafts == off.max_graph_samples == 0
    assert not shapes["off"].is_fast
    assert step_shape(replace(config, numerics="fast")).is_fast
    text = tiny_config(vision=False).text
    reserves = {
        mode: {item.name: item.num_bytes for item in step_reserves(text, shape)} for mode, shape in shapes.items()
    }
    of_graphs = "graphs", "captured steps", "logits of captured steps", "logits of captured drafts"
    assert [reserves["off"][name] for name in of_graphs] == [0, 0, 0, 0]
    assert shapes["startup"].max_graph_rows == 512
    assert reserves["startup"]["captured steps"] > 256 * 2**20 + 512 * 3 * text.hc_mult * text.hidden_size * 2
    graphs = (len(decoding) + len(prompts) + len(drafting)) * 24 + len(decoding) * 4
    assert reserves["startup"]["graphs"] == graphs * 2**20
    assert reserves["startup"]["logits of captured steps"] == 128 * text.vocab_size * 4  # 80 rows, filled up
    rows = 16 * 4 + 3 * 64
    assert reserves["startup"]["logits of captured drafts"] == rows * text.vocab_size * 4
    uneven = {
        item.name: item for item in step_reserves(text, StepShape(256, 100, 9, num_drafts=5, max_graph_drafts=70))
    }
    rows = 384 + 3 * 128  # 350 and 70 rows, filled up as batch-invariant products are
    assert uneven["logits of captured drafts"].num_bytes == rows * text.vocab_size * 4
    assert uneven["logits and their copy"].num_bytes == (100 + 128) * text.vocab_size * 4
    rejecting = step_shape(on_nvidia(tiny_path, sampler="rejection", **arguments))
    assert (rejecting.num_sampler_graphs, rejecting.max_graph_samples) == (0, 0)
    assert rejecting.num_graphs == len(decoding) + len(prompts)
    waiting = step_shape(on_nvidia(tiny_path, async_scheduling=False, **arguments))
    assert waiting.num_graphs == len(decoding) + len(prompts) + len(drafting)
    assert waiting.num_sampler_graphs == waiting.max_graph_samples == 0
    with pytest.raises(ConfigError, match="cuda_graphs"):
        on_nvidia(tiny_path, cuda_graphs="sometimes")


@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        (2048, [16, 32, 48, 64, 96, 128, 192, 256, 384, 512]),
        (200, [16, 32, 48, 64, 96, 128, 192, 200]),
        (16, [16]),
        (9, [9]),
    ],
)
def test_graphs_of_prompts_end_with_the_largest_step(tiny_path: Path, most: int, sizes: list[int]) -> None:
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": most, "num_speculative_tokens": 0}
    assert prompt_graph_sizes(on_nvidia(tiny_path, **limits)) == sizes
    assert prompt_graph_sizes(on_nvidia(tiny_path, cuda_graphs="off", **limits)) == []


def test_no_measured_step_is_larger_than_a_step_may_be(tiny_path: Path) -> None:
    config = on_nvidia(tiny_path, max_num_seqs=40, max_num_batched_tokens=100, num_speculative_tokens=4)
    assert _measured_sizes(config, ())[-1] == 100
    assert _measured_sizes(config, graph_sizes(config.scheduler))[-1] == 100


def test_memory_of_steps_is_not_given_to_the_caches(tiny_path: Path) -> None:
    config = on_nvidia(tiny_path, max_num_seqs=4, max_model_len=1024, memory_fraction=1.0)
    sizes = {"bytes_per_block": 1 << 20, "fixed_bytes": 1 << 20, "available_bytes": 30 << 20}
    assert size_cache(config, **sizes)[0].cache.num_blocks == 29
    sized, reason = size_cache(config, **sizes, step_bytes=10 << 20)
    assert sized.cache.num_blocks == 19
    assert "for steps" in str(reason)
    given = replace(config, cache=replace(config.cache, num_blocks=25))
    with pytest.raises(CapacityError):
        size_cache(given, **sizes, step_bytes=10 << 20)
