"""The tiny configuration of spec 11: every branch of the model in sizes that a CPU runs in seconds."""

from __future__ import annotations

import dataclasses

from deepinfer.config.model import ModelConfig, QuantizationConfig, TextConfig, VisionConfig, YarnConfig


def tiny_config(*, vision: bool = True, image_token_id: int = 501, **text_overrides: object) -> ModelConfig:
    """The tiny model.

    ``engram_compressed_vocab_size`` is left out: spec 11 means the identity map over 512 ids by it, and an absent key
    says that (a real tokenizer has fewer distinct keys than ids). The hash constants are the same.

    Args:
        vision: whether the model has the vision part.
        image_token_id: has to lie below ``vocab_size``.
        text_overrides: fields of :class:`TextConfig` to change.
    """
    text = _tiny_text()
    if text_overrides:
        text = dataclasses.replace(text, **text_overrides)  # type: ignore[arg-type]
    return ModelConfig(
        text=text,
        vision=_tiny_vision() if vision else None,
        quantization=QuantizationConfig(),
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        image_token_id=image_token_id,
    )


def _tiny_vision() -> VisionConfig:
    return VisionConfig(
        num_hidden_layers=2,
        hidden_size=64,
        num_attention_heads=2,
        intermediate_size=192,
        patch_size=14,
        downsample_ratio=3,
        max_image_tokens=64,
        min_pixels=7056,
    )


def _tiny_text() -> TextConfig:
    return TextConfig(
        vocab_size=512,
        hidden_size=256,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=1,
        head_dim=64,
        qk_rope_head_dim=32,
        q_lora_rank=64,
        o_lora_rank=32,
        o_groups=4,
        moe_intermediate_size=64,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_shared_experts=1,
        scoring_func="sqrtsoftplus",
        topk_method="noaux_tc",
        norm_topk_prob=True,
        routed_scaling_factor=1.5,
        hidden_act="silu",
        swiglu_limit=0.5,  # so small that the clamp acts
        rms_norm_eps=1e-20,
        attention_bias=False,
        attention_dropout=0.0,
        tie_word_embeddings=False,
        max_position_embeddings=1024,
        rope_theta=10000.0,
        compress_rope_theta=160000.0,
        rope_scaling=YarnConfig(factor=4.0, beta_fast=8.0, beta_slow=1.0, original_max_position_embeddings=64),
        sliding_window=16,
        compress_ratios=(0, 0, 2, 2, 1, 1, 1, 1, 0, 0),
        kv_source_layer_ids=(2, 4),
        index_source_layer_ids=(2, 4, 6),
        index_n_heads=4,
        index_head_dim=64,
        index_topk=16,
        candidate_source_layer_id=4,
        candidate_topk_blocks=8,
        candidate_block_size=8,
        hc_mult=4,
        hc_sinkhorn_iters=20,
        hc_eps=1e-6,
        engram_layer_ids=(1, 3),
        engram_num_embeddings=(6126, 6332),
        engram_max_ngram_size=4,
        engram_vocab_size=1000,
        engram_n_heads=2,
        engram_head_dim=32,
        engram_pad_token_id=2,
        num_nextn_predict_layers=2,
        dspark_block_size=4,
        dspark_noise_token_id=500,
        dspark_target_layer_ids=(5, 6, 7),
        dspark_markov_rank=32,
        dspark_n_routed_experts=4,
        dspark_num_experts_per_tok=2,
    )
