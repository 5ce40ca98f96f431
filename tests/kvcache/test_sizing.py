import dataclasses

import pytest

from deepinfer.config.model import ModelConfig, QuantizationConfig, TextConfig, YarnConfig
from deepinfer.errors import CapacityError, ConfigError
from deepinfer.kvcache.sizing import blocks_for, cache_sizes


def released_text(**changes) -> TextConfig:
    """The released language model without its n-gram tables, which have no cache."""
    values = {
        "vocab_size": 129280,
        "hidden_size": 5120,
        "num_hidden_layers": 40,
        "num_attention_heads": 64,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 1280,
        "o_lora_rank": 1024,
        "o_groups": 8,
        "moe_intermediate_size": 2304,
        "n_routed_experts": 384,
        "num_experts_per_tok": 6,
        "n_shared_experts": 1,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "hidden_act": "silu",
        "swiglu_limit": 10.0,
        "rms_norm_eps": 1e-20,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "max_position_embeddings": 1048576,
        "rope_theta": 10000.0,
        "compress_rope_theta": 160000.0,
        "rope_scaling": YarnConfig(),
        "sliding_window": 128,
        "compress_ratios": (0,) * 2 + (2,) * 18 + (1,) * 20 + (0,) * 3,
        "kv_source_layer_ids": (2, 8, 14, 20),
        "index_source_layer_ids": (2, 8, 14, 20, 24, 28, 32, 36),
        "index_n_heads": 32,
        "index_head_dim": 128,
        "index_topk": 512,
        "candidate_source_layer_id": 20,
        "candidate_topk_blocks": 2048,
        "candidate_block_size": 8,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "num_nextn_predict_layers": 3,
        "dspark_block_size": 5,
        "dspark_target_layer_ids": (37, 38, 39),
        "dspark_markov_rank": 256,
    }
    return TextConfig(**{**values, **changes})


def model(**changes) -> ModelConfig:
    return ModelConfig(
        text=released_text(**changes),
        vision=None,
        quantization=QuantizationConfig(),
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        image_token_id=129264,
    )


def test_released_model_takes_890_bytes_per_token():
    sizes = cache_sizes(model(), "faithful")
    assert sizes.token_bytes == 890
    assert sizes.block_bytes == 113_920
    assert {item.record_bytes for item in sizes.block_items} == {288, 68}
    assert len(sizes.block_items) == 8, "four streams, each with main entries and index keys"


def test_released_model_takes_3_04_megabytes_of_rings_per_sequence():
    sizes = cache_sizes(model(), "faithful")
    *rings, compressor = sizes.slot_items
    assert sum(ring.num_bytes for ring in rings) == 43 * 134 * 528 == 3_042_336
    assert compressor.num_bytes == 3 * 28_672
    assert sizes.slot_bytes == 3_042_336 + 3 * 28_672


def test_fp8_main_entries_take_528_bytes():
    sizes = cache_sizes(model(use_fp4_sparse_kv=False), "faithful")
    assert sizes.token_bytes == 2.5 * (528 + 68)


def test_float32_mode_takes_four_bytes_per_value():
    sizes = cache_sizes(model(), "float32")
    assert sizes.token_bytes == 2.5 * 4 * (512 + 128)
    assert sizes.slot_bytes == 43 * 134 * 4 * 512 + 3 * 28_672


def test_rings_follow_backtracking():
    sizes = cache_sizes(model(), "faithful", max_backtracking=0)
    *rings, compressor = sizes.slot_items
    assert sum(ring.count for ring in rings) == 43 * 128
    assert compressor.count == 3 * 2


def test_model_without_drafts_has_no_draft_rings():
    text = released_text()
    changes = {
        "num_nextn_predict_layers": 0,
        "compress_ratios": text.compress_ratios[:40],
        "dspark_target_layer_ids": (),
    }
    sizes = cache_sizes(model(**changes), "faithful")
    assert [item.count for item in sizes.slot_items] == [40 * 134, 3 * 7]


def test_unknown_numerics_mode_is_refused():
    with pytest.raises(ConfigError, match="'fp16'"):
        cache_sizes(model(), "fp16")
    with pytest.raises(ConfigError, match="max_backtracking is -1"):
        cache_sizes(model(), "faithful", max_backtracking=-1)


def test_blocks_fill_what_the_slots_leave():
    sizes = cache_sizes(model(), "faithful")
    memory = 10 * sizes.slot_bytes + 100 * sizes.block_bytes + sizes.block_bytes - 1
    budget = blocks_for(memory, sizes, num_slots=10)
    assert budget.num_blocks == 100
    assert budget.num_tokens == 99 * 128
    text = budget.explain()
    assert "100 x 113,920 = 11,392,000 bytes" in text
    assert "room for 12,672 tokens" in text


@pytest.mark.parametrize("spare_blocks", [-5, 0, 1])
def test_too_little_memory_is_refused_with_the_arithmetic(spare_blocks):
    sizes = cache_sizes(model(), "faithful")
    with pytest.raises(CapacityError, match=r"113,920(.|\n)*max_model_len"):
        blocks_for(4 * sizes.slot_bytes + spare_blocks * sizes.block_bytes, sizes, num_slots=4)


def test_a_whole_context_has_to_fit_when_asked_for():
    sizes = cache_sizes(model(), "faithful")
    memory = 4 * sizes.slot_bytes + 9 * sizes.block_bytes
    assert blocks_for(memory, sizes, num_slots=4, min_tokens=8 * 128).num_blocks == 9
    with pytest.raises(CapacityError, match="1,025 tokens"):
        blocks_for(memory, sizes, num_slots=4, min_tokens=8 * 128 + 1)


def test_sizes_are_values():
    sizes = cache_sizes(model(), "faithful")
    assert sizes == cache_sizes(model(), "faithful")
    assert dataclasses.replace(sizes, numerics="float32") != sizes
