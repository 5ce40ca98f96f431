"""The tiny configuration of spec 11 with random float weights that exercise every branch."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from deepinfer.config.engram_hashing import engram_primes
from deepinfer.config.model import ModelConfig
from deepinfer.config.model_file import model_config_from_dict
from deepinfer.reference import ReferenceModel, Roundings
from deepinfer.reference.tensor_shapes import backbone_shapes, draft_shapes

TEXT: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "qk_rope_head_dim": 32,
    "q_lora_rank": 64,
    "o_lora_rank": 32,
    "o_groups": 4,
    "moe_intermediate_size": 64,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "hidden_act": "silu",
    "swiglu_limit": 0.5,
    "rms_norm_eps": 1e-20,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "sliding_window": 16,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4,
        "beta_fast": 8,
        "beta_slow": 1,
        "original_max_position_embeddings": 64,
    },
    "max_position_embeddings": 1024,
    "compress_ratios": [0, 0, 2, 2, 1, 1, 1, 1, 0, 0],
    "kv_source_layer_ids": [2, 4],
    "index_source_layer_ids": [2, 4, 6],
    "index_n_heads": 4,
    "index_head_dim": 64,
    "index_topk": 16,
    "candidate_source_layer_id": 4,
    "candidate_topk_blocks": 8,
    "candidate_block_size": 8,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "engram_layer_ids": [1, 3],
    "engram_num_embeddings": [6126, 6332],
    "engram_max_ngram_size": 4,
    "engram_vocab_size": 1000,
    "engram_n_heads": 2,
    "engram_head_dim": 32,
    "engram_pad_token_id": 2,
    "engram_compressed_vocab_size": 512,
    "num_nextn_predict_layers": 2,
    "dspark_block_size": 4,
    "dspark_noise_token_id": 500,
    "dspark_target_layer_ids": [5, 6, 7],
    "dspark_markov_rank": 32,
    "dspark_n_routed_experts": 4,
    "dspark_num_experts_per_tok": 2,
}


def tiny_config(**changes: Any) -> ModelConfig:
    """The configuration of spec 11 without vision, with some keys of ``text_config`` changed."""
    text = TEXT | changes
    if "engram_vocab_size" in changes:
        primes = engram_primes(2, text["engram_max_ngram_size"], text["engram_n_heads"], text["engram_vocab_size"])
        text["engram_num_embeddings"] = [sum(layer) for layer in primes]
    return model_config_from_dict(
        {
            "architectures": ["DeepseekV41ForCausalLM"],
            "model_type": "deepseek_v41",
            "dtype": "bfloat16",
            "bos_token_id": 0,
            "eos_token_id": 1,
            "pad_token_id": 2,
            "image_token_id": 501,
            "text_config": text,
            "quantization_config": {
                "quant_method": "fp8",
                "activation_scheme": "dynamic",
                "weight_block_size": [32, 32],
                "scale_fmt": "ue8m0",
                "expert_dtype": "fp4",
            },
        }
    )


def random_weights(config: ModelConfig, seed: int = 0) -> dict[str, Tensor]:
    """Float weights of backbone and draft with the distributions of spec 11."""
    generator = torch.Generator().manual_seed(seed)
    shapes = backbone_shapes(config.text) | draft_shapes(config.text)
    return {name: _random(name, shape, config.text.hc_mult, generator) for name, shape in shapes.items()}


def _random(name: str, shape: tuple[int, ...], streams: int, generator: torch.Generator) -> Tensor:
    normal = torch.randn(shape, generator=generator)
    if "norm" in name or name.endswith(("q_weight", "k_weight")):
        return 1 + 0.2 * normal
    if name.endswith("_base") and len(normal) > streams:
        layer = int(name.split(".")[1])
        read = torch.full((streams,), -3.0)
        read[layer % streams] = 3.0
        carry = 6 * torch.eye(streams) - 3
        return torch.cat((read, torch.zeros(streams), carry.flatten())) + 0.5 * normal
    if name.endswith("_scale"):
        return 0.5 * (1 + 0.2 * normal)
    if "gate.bias" in name:
        return 0.1 * normal
    if name.endswith("engram.embed.weight"):
        return 0.5 * normal
    if name.endswith("embed.weight") or len(shape) == 1:
        return normal
    return normal / math.sqrt(shape[-1])


def tiny_model(
    config: ModelConfig | None = None,
    weights: dict[str, Tensor] | None = None,
    roundings: Roundings | None = None,
    dtype: torch.dtype = torch.float32,
) -> ReferenceModel:
    """A model over the identity token map."""
    config = config or tiny_config()
    return ReferenceModel(config, weights or random_weights(config), None, roundings=roundings, dtype=dtype)


def random_ids(length: int, seed: int = 0) -> Tensor:
    """Token ids ``[length]`` below 500, so that no special id of the tiny model is among them."""
    return torch.randint(0, 500, (length,), generator=torch.Generator().manual_seed(seed))
