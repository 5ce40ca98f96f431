"""The released ``config.json`` and the tiny one, as parsed JSON: typed in from the specification, sections 2 and 11."""

from __future__ import annotations

import copy
from typing import Any

import pytest

_SCHEME = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [32, 32],
    "scale_fmt": "ue8m0",
    "expert_dtype": "fp4",
}

_FIXED = {
    "num_key_value_heads": 1,
    "n_shared_experts": 1,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-20,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "candidate_block_size": 8,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "engram_max_ngram_size": 4,
    "engram_pad_token_id": 2,
}

_RELEASED = {
    "architectures": ["DeepseekV41ForCausalLM"],
    "model_type": "deepseek_v41",
    "dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "image_token_id": 129264,
    "quantization_config": _SCHEME,
    "text_config": {
        **_FIXED,
        "vocab_size": 129280,
        "hidden_size": 5120,
        "num_hidden_layers": 40,
        "num_attention_heads": 64,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 1280,
        "o_lora_rank": 1024,
        "o_groups": 8,
        "moe_intermediate_size": 2304,
        "n_routed_experts": 384,
        "num_experts_per_tok": 6,
        "swiglu_limit": 10.0,
        "max_position_embeddings": 1048576,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 16,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 65536,
        },
        "sliding_window": 128,
        "compress_ratios": [0, 0] + [2] * 18 + [1] * 20 + [0, 0, 0],
        "kv_source_layer_ids": [2, 8, 14, 20],
        "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
        "index_n_heads": 32,
        "index_head_dim": 128,
        "index_topk": 512,
        "candidate_source_layer_id": 20,
        "candidate_topk_blocks": 2048,
        "engram_layer_ids": [1, 14],
        "engram_num_embeddings": [384006168, 384016682],
        "engram_vocab_size": 16000000,
        "engram_n_heads": 8,
        "engram_head_dim": 256,
        "engram_compressed_vocab_size": 99092,
        "num_nextn_predict_layers": 3,
        "dspark_block_size": 5,
        "dspark_noise_token_id": 128799,
        "dspark_target_layer_ids": [37, 38, 39],
        "dspark_markov_rank": 256,
        "dspark_n_routed_experts": 128,
        "dspark_num_experts_per_tok": 3,
    },
    "vision_config": {
        "hidden_size": 1024,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "intermediate_size": 2816,
        "patch_size": 14,
        "rope_theta": 10000,
        "downsample_ratio": 3,
        "max_image_tokens": 1024,
        "min_pixels": 295936,
        "max_wh_ratio": None,
    },
}

_TINY = {
    **_RELEASED,
    "image_token_id": 501,
    "text_config": {
        **_FIXED,
        "vocab_size": 512,
        "hidden_size": 256,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "head_dim": 64,
        "qk_rope_head_dim": 32,
        "q_lora_rank": 64,
        "o_lora_rank": 32,
        "o_groups": 4,
        "moe_intermediate_size": 64,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "swiglu_limit": 0.5,
        "max_position_embeddings": 1024,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4,
            "beta_fast": 8,
            "beta_slow": 1,
            "original_max_position_embeddings": 64,
        },
        "sliding_window": 16,
        "compress_ratios": [0, 0, 2, 2, 1, 1, 1, 1, 0, 0],
        "kv_source_layer_ids": [2, 4],
        "index_source_layer_ids": [2, 4, 6],
        "index_n_heads": 4,
        "index_head_dim": 64,
        "index_topk": 16,
        "candidate_source_layer_id": 4,
        "candidate_topk_blocks": 8,
        "engram_layer_ids": [1, 3],
        "engram_num_embeddings": [6126, 6332],
        "engram_vocab_size": 1000,
        "engram_n_heads": 2,
        "engram_head_dim": 32,
        "engram_compressed_vocab_size": 512,
        "num_nextn_predict_layers": 2,
        "dspark_block_size": 4,
        "dspark_noise_token_id": 500,
        "dspark_target_layer_ids": [5, 6, 7],
        "dspark_markov_rank": 32,
        "dspark_n_routed_experts": 4,
        "dspark_num_experts_per_tok": 2,
    },
    "vision_config": {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 2,
        "intermediate_size": 192,
        "patch_size": 14,
        "downsample_ratio": 3,
        "max_image_tokens": 64,
        "min_pixels": 7056,
    },
}


@pytest.fixture
def released() -> dict[str, Any]:
    """A fresh copy of the released configuration."""
    return copy.deepcopy(_RELEASED)


@pytest.fixture
def tiny() -> dict[str, Any]:
    """A fresh copy of the tiny configuration; its identity map is spelled as 512 compressed ids."""
    return copy.deepcopy(_TINY)
