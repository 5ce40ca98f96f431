"""The configuration of the released model (spec 2), for dummy weights at true widths and for the size table."""

from __future__ import annotations

from deepinfer.config.model import ModelConfig, QuantizationConfig, TextConfig, VisionConfig, YarnConfig


def released_config() -> ModelConfig:
    """DeepSeek-V4.1-Flash as released."""
    return ModelConfig(
        text=_released_text(),
        vision=VisionConfig(),  # its defaults are the released values
        quantization=QuantizationConfig(),
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        image_token_id=129264,
    )


def _released_text() -> TextConfig:
    return TextConfig(
        vocab_size=129280,
        hidden_size=5120,
        num_hidden_layers=40,
        num_attention_heads=64,
        num_key_value_heads=1,
        head_dim=512,
        qk_rope_head_dim=64,
        q_lora_rank=1280,
        o_lora_rank=1024,
        o_groups=8,
        moe_intermediate_size=2304,
        n_routed_experts=384,
        num_experts_per_tok=6,
        n_shared_experts=1,
        scoring_func="sqrtsoftplus",
        topk_method="noaux_tc",
        norm_topk_prob=True,
        routed_scaling_factor=1.5,
        hidden_act="silu",
        swiglu_limit=10.0,
        rms_norm_eps=1e-20,
        attention_bias=False,
        attention_dropout=0.0,
        tie_word_embeddings=False,
        max_position_embeddings=1048576,
        rope_theta=10000.0,
        compress_rope_theta=160000.0,
        rope_scaling=YarnConfig(),  # its defaults are the released values
        sliding_window=128,
        compress_ratios=(0,) * 2 + (2,) * 18 + (1,) * 20 + (0,) * 3,
        kv_source_layer_ids=(2, 8, 14, 20),
        index_source_layer_ids=(2, 8, 14, 20, 24, 28, 32, 36),
        index_n_heads=32,
        index_head_dim=128,
        index_topk=512,
        candidate_source_layer_id=20,
        candidate_topk_blocks=2048,
        candidate_block_size=8,
        hc_mult=4,
        hc_sinkhorn_iters=20,
        hc_eps=1e-6,
        engram_layer_ids=(1, 14),
        engram_num_embeddings=(384006168, 384016682),
        engram_max_ngram_size=4,
        engram_vocab_size=16_000_000,
        engram_n_heads=8,
        engram_head_dim=256,
        engram_pad_token_id=2,
        engram_compressed_vocab_size=99092,
        num_nextn_predict_layers=3,
        dspark_block_size=5,
        dspark_noise_token_id=128799,
        dspark_target_layer_ids=(37, 38, 39),
        dspark_markov_rank=256,
        dspark_n_routed_experts=128,
        dspark_num_experts_per_tok=3,
    )
