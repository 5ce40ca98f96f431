"""Names and logical shapes of all tensors, without scales and packing (spec 3.3 to 3.5)."""

from __future__ import annotations

from deepinfer.config.layer_plan import LayerPlan
from deepinfer.config.model import ModelConfig, TextConfig, VisionConfig
from deepinfer.errors import CheckpointError
from deepinfer.reference.parameters import WeightMap

Shapes = dict[str, tuple[int, ...]]


def backbone_shapes(text: TextConfig) -> Shapes:
    """The language model without the draft."""
    vocab, width, streams = text.vocab_size, text.hidden_size, text.hc_mult
    shapes: Shapes = {"embed.weight": (vocab, width), "head.weight": (vocab, width), "norm.weight": (width,)}
    if not text.hc_shifted:
        shapes |= {"hc_head_fn": (streams, streams * width), "hc_head_base": (streams,), "hc_head_scale": (1,)}
    for layer in text.layers:
        prefix = f"layers.{layer.layer_id}."
        shapes |= _block(prefix, text, text.n_routed_experts)
        shapes |= _compressor(prefix + "attn.", text, layer)
        if layer.has_engram:
            shapes |= _engram(prefix + "engram.", text, text.engram_layer_ids.index(layer.layer_id))
    return shapes


def draft_shapes(text: TextConfig) -> Shapes:
    """The ``mtp.*`` stages."""
    stages, width, rank = text.num_nextn_predict_layers, text.hidden_size, text.dspark_markov_rank
    shapes: Shapes = {}
    for stage in range(stages):
        shapes |= _block(f"mtp.{stage}.", text, text.dspark_n_routed_experts)
    if stages:
        last = f"mtp.{stages - 1}."
        shapes["mtp.0.main_proj.weight"] = (width, width * len(text.dspark_target_layer_ids))
        shapes["mtp.0.main_norm.weight"] = (width,)
        shapes[last + "norm.weight"] = (width,)
        shapes[last + "markov_head.embed.weight"] = (text.vocab_size, rank)
        shapes[last + "markov_head.head.weight"] = (text.vocab_size, rank)
        shapes[last + "confidence_head.proj.weight"] = (1, width + rank)
    return shapes


def vision_shapes(vision: VisionConfig, text: TextConfig) -> Shapes:
    """Vision tower, aligner and the three span vectors."""
    width, inner, hidden = vision.hidden_size, vision.intermediate_size, text.hidden_size
    shapes: Shapes = {
        "vision.patch_embed.proj.weight": (width, 3 * vision.patch_size**2),
        "vision.patch_embed.proj.bias": (width,),
        "vision.norm.weight": (width,),
        "aligner.w1.weight": (hidden, width * vision.downsample_ratio**2),
        "aligner.w1.bias": (hidden,),
        "aligner.w2.weight": (hidden, hidden),
        "aligner.w2.bias": (hidden,),
        "image_start": (hidden,),
        "image_end": (hidden,),
        "image_newline": (hidden,),
    }
    for number in range(vision.num_hidden_layers):
        block = f"vision.blocks.{number}."
        shapes |= {block + "norm1.weight": (width,), block + "norm2.weight": (width,)}
        shapes |= {block + "attn.wqkv.weight": (3 * width, width), block + "attn.wqkv.bias": (3 * width,)}
        shapes |= {block + "attn.wo.weight": (width, width), block + "attn.wo.bias": (width,)}
        shapes |= {block + "mlp.w1.weight": (2 * inner, width), block + "mlp.w2.weight": (width, inner)}
    return shapes


def _block(prefix: str, text: TextConfig, num_experts: int) -> Shapes:
    """Hyper-connections, attention and experts: what every layer and draft stage has."""
    width, streams, heads, rank = text.hidden_size, text.hc_mult, text.num_attention_heads, text.o_lora_rank
    num_mixes = 2 * streams + streams * streams
    shapes: Shapes = {}
    for kind in ("attn", "ffn"):
        shapes |= {
            f"{kind}_norm.weight": (width,),
            f"hc_{kind}_fn": (num_mixes, streams * width),
            f"hc_{kind}_base": (num_mixes,),
            f"hc_{kind}_scale": (3,),
        }
    shapes |= {
        "attn.wq_a.weight": (text.q_lora_rank, width),
        "attn.q_norm.weight": (text.q_lora_rank,),
        "attn.wq_b.weight": (heads * text.head_dim, text.q_lora_rank),
        "attn.wkv.weight": (text.head_dim, width),
        "attn.kv_norm.weight": (text.head_dim,),
        "attn.wo_a.weight": (text.o_groups * rank, heads // text.o_groups * text.head_dim),
        "attn.wo_b.weight": (width, text.o_groups * rank),
        "attn.attn_sink": (heads,),
        "ffn.gate.weight": (num_experts, width),
        "ffn.gate.bias": (num_experts,),
        "ffn.gate.bias_vl": (num_experts,),
    }
    for name in ("shared_experts", *(f"experts.{number}" for number in range(num_experts))):
        inner = text.moe_intermediate_size
        shapes |= {f"ffn.{name}.w1.weight": (inner, width), f"ffn.{name}.w3.weight": (inner, width)}
        shapes[f"ffn.{name}.w2.weight"] = (width, inner)
    return {prefix + name: shape for name, shape in shapes.items()}


def _compressor(prefix: str, text: TextConfig, layer: LayerPlan) -> Shapes:
    shapes: Shapes = {}
    if layer.owns_kv:
        shapes["compressor.wkv.weight"] = (text.head_dim, text.hidden_size)
        shapes["compressor.norm.weight"] = (text.head_dim,)
        if layer.ratio == 2:
            shapes["compressor.wgate.weight"] = (text.head_dim, text.hidden_size)
    if layer.owns_index_keys:
        shapes["indexer.wk.weight"] = (text.index_head_dim, text.head_dim)
        shapes["indexer.k_norm.weight"] = (text.index_head_dim,)
    if layer.owns_indexer:
        shapes["indexer.wq_b.weight"] = (text.index_n_heads * text.index_head_dim, text.q_lora_rank)
        shapes["indexer.weights_proj.weight"] = (text.index_n_heads, text.hidden_size)
    return {prefix + name: shape for name, shape in shapes.items()}


def _engram(prefix: str, text: TextConfig, number: int) -> Shapes:
    columns = (text.engram_max_ngram_size - 1) * text.engram_n_heads
    return {
        prefix + "embed.weight": (text.engram_num_embeddings[number], text.engram_head_dim),
        prefix + "wkv.weight": ((text.hc_mult + 1) * text.hidden_size, columns * text.engram_head_dim),
        prefix + "q_weight": (text.hc_mult, text.hidden_size),
        prefix + "k_weight": (text.hc_mult, text.hidden_size),
    }


def check_shapes(config: ModelConfig, weights: WeightMap) -> None:
    """Every backbone tensor has to be there; draft and vision tensors are checked where they are given.

    Raises:
        CheckpointError: names the tensor, its shape and the expected one.
    """
    required = backbone_shapes(config.text)
    optional = draft_shapes(config.text)
    if config.vision is not None:
        optional |= vision_shapes(config.vision, config.text)
        optional.pop("vision.patch_embed.proj.weight")  # stored flat or as [width, 3, P, P]; flattened where it is used
    for name, shape in (required | optional).items():
        if name not in weights:
            if name in optional:
                continue
            raise CheckpointError(
                f"tensor {name} is missing", why=f"the model needs it, {shape}", fix="check the names"
            )
        if tuple(weights[name].shape) != shape:
            raise CheckpointError(
                f"tensor {name} has shape {tuple(weights[name].shape)}",
                why=f"the configuration says {shape}",
                fix="use the config.json that belongs to the weights",
            )
