"""The configuration of ``tiny-v41``: every mechanism of the released model in about 14 million parameters."""

from __future__ import annotations

from deepinfer.config.engram_hashing import engram_primes
from deepinfer.config.model import ModelConfig, QuantizationConfig, TextConfig, YarnConfig
from tools.tiny.tokenizer import IMAGE_ID, NOISE_ID, VOCAB_SIZE

_ENGRAM_LAYERS = (1, 4)
_ENGRAM_BUCKETS = 5000
_ENGRAM_HEADS = 2
_MAX_NGRAM = 4


def tiny_v41_config(num_compressed: int) -> ModelConfig:
    """The model's configuration.

    Args:
        num_compressed: distinct compressed ids of its tokenizer.
    """
    primes = engram_primes(len(_ENGRAM_LAYERS), _MAX_NGRAM, _ENGRAM_HEADS, _ENGRAM_BUCKETS)
    text = TextConfig(
        **_widths(),  # type: ignore[arg-type]
        **_layers(),  # type: ignore[arg-type]
        **_fixed(),  # type: ignore[arg-type]
        engram_layer_ids=_ENGRAM_LAYERS,
        engram_num_embeddings=tuple(sum(layer) for layer in primes),
        engram_max_ngram_size=_MAX_NGRAM,
        engram_vocab_size=_ENGRAM_BUCKETS,
        engram_n_heads=_ENGRAM_HEADS,
        engram_head_dim=32,
        engram_pad_token_id=2,
        engram_compressed_vocab_size=num_compressed,
    )
    return ModelConfig(
        text=text,
        vision=None,
        quantization=QuantizationConfig(),
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        image_token_id=IMAGE_ID,
    )


def _widths() -> dict[str, object]:
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 256,
        "num_hidden_layers": 10,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 128,
        "qk_rope_head_dim": 32,
        "q_lora_rank": 128,
        "o_lora_rank": 64,
        "o_groups": 2,
        "moe_intermediate_size": 96,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "index_n_heads": 4,
        "index_head_dim": 64,
        "hc_mult": 4,
    }


def _layers() -> dict[str, object]:
    """Two window layers, two ratio-2 streams, one ratio-1 stream with two Reindex layers, three draft stages."""
    return {
        "sliding_window": 128,
        "compress_ratios": (0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0),
        "kv_source_layer_ids": (2, 4, 6),
        "index_source_layer_ids": (2, 4, 6, 7, 9),
        "index_topk": 64,  # of 1,024 and 2,048 entries at 2k tokens
        "candidate_source_layer_id": 6,
        "candidate_topk_blocks": 32,
        "candidate_block_size": 8,
        "num_nextn_predict_layers": 3,
        "dspark_block_size": 5,
        "dspark_noise_token_id": NOISE_ID,
        "dspark_target_layer_ids": (7, 8, 9),
        "dspark_markov_rank": 64,
        "dspark_n_routed_experts": 4,
        "dspark_num_experts_per_tok": 2,
    }


def _fixed() -> dict[str, object]:
    """Choices that the released model makes too, and positions up to 16,384."""
    return {
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
        "max_position_embeddings": 16384,
        "rope_theta": 10000.0,
        "compress_rope_theta": 160000.0,
        "rope_scaling": YarnConfig(factor=4.0, beta_fast=32.0, beta_slow=1.0, original_max_position_embeddings=4096),
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
    }
