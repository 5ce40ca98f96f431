"""Every model configuration that spec 2.4 refuses is refused, with the key, the value and what is supported."""

from __future__ import annotations

import math
import re

import pytest

from deepinfer.config.model_file import model_config_from_dict
from deepinfer.errors import ConfigError

# (place in the file, value, text that names what is supported)
REFUSED = [
    # item 1
    ("architectures", ["DeepseekV3ForCausalLM"], "DeepseekV41ForCausalLM"),
    ("architectures", ["DeepseekV41ForCausalLM", "Other"], "DeepseekV41ForCausalLM"),
    ("architectures", [], "DeepseekV41ForCausalLM"),
    ("architectures", "DeepseekV41ForCausalLM", "DeepseekV41ForCausalLM"),
    ("architectures", [7], "DeepseekV41ForCausalLM"),
    ("model_type", "deepseek_v4", "deepseek_v41"),
    ("dtype", "float16", "bfloat16"),
    # item 2
    ("quantization_config.quant_method", "awq", "fp8"),
    ("quantization_config.activation_scheme", "static", "dynamic"),
    ("quantization_config.weight_block_size", [128, 128], "(32, 32)"),
    ("quantization_config.scale_fmt", "fp32", "ue8m0"),
    ("quantization_config.expert_dtype", "fp8", "fp4"),
    # item 3
    ("text_config.hidden_act", "gelu", "silu"),
    ("text_config.attention_bias", True, "False"),
    ("text_config.attention_dropout", 0.1, "0.0"),
    ("text_config.num_key_value_heads", 8, "1"),
    ("text_config.tie_word_embeddings", True, "False"),
    ("text_config.n_shared_experts", 2, "1"),
    ("text_config.gate_temp", 2.0, "1.0"),
    # item 4
    ("text_config.scoring_func", "sigmoid", "sqrtsoftplus"),
    ("text_config.topk_method", "greedy", "noaux_tc"),
    ("text_config.norm_topk_prob", False, "True"),
    # item 5
    ("text_config.compress_ratios", [0, 0, 2, 2, 1, 1, 1, 1], "10 entries"),
    ("text_config.compress_ratios", [0, 0, 2, 2, 1, 1, 1, 1, 0, 1], "0 for every draft stage"),
    ("text_config.compress_ratios", [0, 0, 1, 1, 2, 2, 2, 2, 0, 0], "ratio-2 layers before"),
    ("text_config.compress_ratios[2]", [0, 0, 4, 2, 1, 1, 1, 1, 0, 0], "0, 1 or 2"),
    ("text_config.num_nextn_predict_layers", -1, ">= 0"),
    # item 6
    ("text_config.overlap_compression", True, "absent"),
    ("text_config.compressor_ape", True, "absent"),
    ("text_config.use_hc_norm", True, "absent"),
    # item 7: test_layer_plan.py has every rule, here one that it is wired in
    ("text_config.kv_source_layer_ids", [2], "Start a segment at the first layer of ratio 1"),
    # item 8
    ("text_config.candidate_block_size", 0, ">= 1"),
    ("text_config.candidate_topk_blocks", 0, ">= 1"),
    ("text_config.candidate_topk_blocks", 1, "at least index_topk / candidate_block_size = 2"),
    # item 9
    ("text_config.dspark_target_attn_input", False, "True"),
    ("text_config.dspark_target_layer_ids", [5, 6, 8], "below 8"),
    ("text_config.dspark_target_layer_ids", [], "distinct ascending layers"),
    ("text_config.dspark_noise_token_id", 512, "below 512"),
    ("text_config.dspark_markov_rank", 0, ">= 1"),
    ("text_config.dspark_num_experts_per_tok", 5, "at most dspark_n_routed_experts (4)"),
    # item 10
    ("text_config.engram_num_embeddings", [6126, 6333], "[6126, 6332]"),
    ("text_config.engram_num_embeddings", [6126], "[6126, 6332]"),
    ("text_config.engram_layer_ids", [3, 1], "distinct ascending layers below 8"),
    ("text_config.engram_layer_ids", [1, 8], "distinct ascending layers below 8"),
    ("text_config.engram_max_ngram_size", 1, ">= 2"),
    ("text_config.engram_n_heads", 0, ">= 1"),
    ("text_config.engram_pad_token_id", 512, "below 512"),
    # item 11
    ("text_config.hidden_size", 250, "multiple of 32"),
    ("text_config.head_dim", 72, "multiple of 32"),
    ("text_config.index_head_dim", 40, "multiple of 32"),
    ("text_config.q_lora_rank", 65, "multiple of 32"),
    ("text_config.o_lora_rank", 30, "o_groups * o_lora_rank % 32 == 0"),
    ("text_config.moe_intermediate_size", 48, "multiple of 32"),
    ("text_config.engram_head_dim", 48, "multiple of 32"),
    ("text_config.qk_rope_head_dim", 31, "even number up to 64"),
    ("text_config.qk_rope_head_dim", 66, "even number up to 64"),
    ("text_config.o_groups", 3, "o_groups"),
    ("text_config.num_experts_per_tok", 9, "at most n_routed_experts (8)"),
    # item 12
    ("tokenizer_compatibility", "legacy", "'release' or 'native'"),
    # numbers that would poison the arithmetic
    ("text_config.rms_norm_eps", -1e-6, ">= 0"),
    ("text_config.hc_eps", math.nan, ">= 0"),
    ("text_config.swiglu_limit", 0.0, "positive"),
    ("text_config.swiglu_limit", math.inf, "positive"),
    ("text_config.rope_theta", 0, "positive"),
    ("text_config.compress_rope_theta", -1, "positive"),
    ("text_config.rope_scaling.factor", 0, "positive"),
    ("text_config.rope_scaling.rope_type", "linear", "yarn"),
    ("text_config.hidden_size", 0, ">= 1"),
    ("text_config.sliding_window", 0, ">= 1"),
    ("text_config.index_topk", 0, ">= 1"),
    ("eos_token_id", 512, "below vocab_size (512)"),
    ("image_token_id", -1, "below vocab_size (512)"),
    # wrong JSON types
    ("text_config.hidden_size", "256", "of type int"),
    ("text_config.hidden_size", 256.0, "of type int"),
    ("text_config.attention_bias", 0, "of type bool"),
    ("text_config.compress_ratios", 2, "a list of integers"),
    ("text_config", [], "object"),
    ("text_config.rope_scaling", "yarn", "an object or null"),
    # vision
    ("vision_config.num_attention_heads", 3, "a divisor of hidden_size"),
    ("vision_config.patch_size", 0, ">= 1"),
    ("vision_config.min_pixels", 0, ">= 1"),
    ("vision_config.max_wh_ratio", 0.5, ">= 1"),
    ("vision_config.rope_theta", 0, "positive"),
]


def _set(raw, key, value):
    *path, last = re.sub(r"\[\d+\]$", "", key).split(".")
    for part in path:
        raw = raw[part]
    raw[last] = value


@pytest.mark.parametrize(("key", "value", "supported"), REFUSED, ids=lambda item: str(item)[:40])
def test_unsupported_value_is_refused_by_name(tiny, key, value, supported):
    _set(tiny, key, value)
    with pytest.raises(ConfigError) as caught:
        model_config_from_dict(tiny)
    message = str(caught.value)
    assert f"key {key} " in message
    shown = value[2] if key.endswith("[2]") else value
    if isinstance(value, (str, bool)):  # numbers and lists may be shown in another form, (128, 128) for [128, 128]
        assert repr(shown) in message
    elif isinstance(value, (int, float)):
        assert f"{value!r}" in message or f"{float(value)!r}" in message
    assert supported in message
    assert isinstance(caught.value, ValueError)


REQUIRED_TEXT = """
    vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim qk_rope_head_dim
    q_lora_rank o_lora_rank o_groups moe_intermediate_size n_routed_experts num_experts_per_tok n_shared_experts
    scoring_func topk_method norm_topk_prob routed_scaling_factor hidden_act swiglu_limit rms_norm_eps attention_bias
    attention_dropout tie_word_embeddings max_position_embeddings rope_theta compress_rope_theta sliding_window
    compress_ratios kv_source_layer_ids index_source_layer_ids index_n_heads index_head_dim index_topk
    candidate_topk_blocks candidate_block_size hc_mult hc_sinkhorn_iters hc_eps
""".split()  # noqa: SIM905 - as a list literal it would take 39 lines


@pytest.mark.parametrize("key", REQUIRED_TEXT)
def test_missing_text_key_is_named(tiny, key):
    del tiny["text_config"][key]
    with pytest.raises(ConfigError, match=rf"text_config\.{key} is missing"):
        model_config_from_dict(tiny)


@pytest.mark.parametrize(
    "key",
    [
        *("architectures", "model_type", "dtype", "text_config", "quantization_config"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id"),
    ],
)
def test_missing_top_level_key_is_named(tiny, key):
    del tiny[key]
    with pytest.raises(ConfigError, match=rf"{key} is missing"):
        model_config_from_dict(tiny)


@pytest.mark.parametrize("key", ["factor", "original_max_position_embeddings"])
def test_partial_yarn_section_is_refused(tiny, key):
    del tiny["text_config"]["rope_scaling"][key]
    with pytest.raises(ConfigError, match=rf"rope_scaling\.{key} is missing"):
        model_config_from_dict(tiny)


@pytest.mark.parametrize("key", ["quant_method", "activation_scheme", "weight_block_size", "scale_fmt", "expert_dtype"])
def test_partial_quantization_section_is_refused(tiny, key):
    del tiny["quantization_config"][key]
    with pytest.raises(ConfigError, match=rf"quantization_config\.{key} is missing"):
        model_config_from_dict(tiny)


HUGE = """
    text_config.vocab_size text_config.hidden_size text_config.num_hidden_layers text_config.num_attention_heads
    text_config.head_dim text_config.o_groups text_config.n_routed_experts text_config.num_experts_per_tok
    text_config.max_position_embeddings text_config.sliding_window text_config.index_n_heads text_config.index_topk
    text_config.hc_mult text_config.hc_sinkhorn_iters text_config.engram_max_ngram_size text_config.engram_vocab_size
    text_config.engram_n_heads text_config.engram_head_dim text_config.num_nextn_predict_layers
    text_config.dspark_block_size text_config.dspark_markov_rank text_config.dspark_n_routed_experts
    text_config.rope_scaling.original_max_position_embeddings vision_config.num_hidden_layers
    vision_config.num_attention_heads vision_config.hidden_size vision_config.patch_size
""".split()  # noqa: SIM905 - as a list literal it would take 27 lines


@pytest.mark.parametrize("value", [2**52, 10**400], ids=["2**52", "10**400"])  # multiples of 32
@pytest.mark.parametrize("key", HUGE)
def test_an_absurd_count_is_refused_before_anything_is_enumerated(tiny, key, value):
    _set(tiny, key, value)
    with pytest.raises(ConfigError) as caught:
        model_config_from_dict(tiny)
    assert f"key {key} " in caught.value.what
    assert len(caught.value.what) < 120
    assert "damaged" in caught.value.why
    assert "at most" in caught.value.fix


def test_counts_that_only_multiply_to_something_absurd_are_refused(tiny):
    text = tiny["text_config"]
    text["n_routed_experts"] = 65536
    text["dspark_n_routed_experts"] = 65536
    with pytest.raises(ConfigError, match="makes 655360 experts"):
        model_config_from_dict(tiny)
    text["n_routed_experts"] = text["dspark_n_routed_experts"] = 8
    text["engram_max_ngram_size"], text["engram_n_heads"] = 1024, 4096
    with pytest.raises(ConfigError, match="makes 8380416 hash tables"):
        model_config_from_dict(tiny)


def test_models_many_times_larger_than_the_released_one_are_taken(tiny):
    text = tiny["text_config"]
    text["n_routed_experts"] = 16384
    text["num_attention_heads"], text["hidden_size"], text["max_position_embeddings"] = 4096, 65536, 2**30
    assert model_config_from_dict(tiny).text.n_routed_experts == 16384


@pytest.mark.parametrize("value", [10**400, -(10**400)])
def test_an_integer_beyond_the_range_of_floats_is_refused_by_name(tiny, value):
    tiny["text_config"]["swiglu_limit"] = value
    with pytest.raises(ConfigError, match=r"swiglu_limit is -?inf"):
        model_config_from_dict(tiny)


def test_limits_of_a_kernel_are_not_limits_of_the_model(tiny):
    tiny["text_config"]["candidate_block_size"] = 5
    tiny["text_config"]["candidate_topk_blocks"] = 7
    text = model_config_from_dict(tiny).text
    assert (text.candidate_block_size, text.candidate_topk_blocks) == (5, 7)
