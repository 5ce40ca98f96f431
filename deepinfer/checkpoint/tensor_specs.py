"""Which tensors a checkpoint must hold, derived from the configuration: the tables of spec 3.2 to 3.5 as code."""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from deepinfer.checkpoint.codecs import GROUP, tile_grid
from deepinfer.config.layer_plan import LayerPlan
from deepinfer.config.model import ModelConfig, TextConfig, VisionConfig

Shape = tuple[int, ...]


class Kind(enum.Enum):
    """How a tensor is stored (spec 3.2)."""

    FP8 = "FP8"  # e4m3, one ue8m0 scale per 32x32 tile
    FP4 = "FP4"  # packed e2m1, one ue8m0 scale per row and 32 columns
    TABLE = "TABLE"  # e4m3, one ue8m0 scale per row and 32 columns; memory-mapped
    BF16 = "BF16"
    F32 = "F32"

    @property
    def is_quantized(self) -> bool:
        return self in (Kind.FP8, Kind.FP4, Kind.TABLE)


class Part(enum.Enum):
    """What a tensor is needed for. A part is loaded as a whole or not at all."""

    TEXT = "text"
    DRAFT = "draft"
    VISION = "vision"


class SizeGroup(enum.Enum):
    """Row of the size table (spec 1.3) that a tensor is counted in."""

    ATTENTION = "attention"
    COMPRESSOR_INDEXER = "compressors + indexers"
    HYPER_CONNECTION = "hyper-connections"
    ROUTER = "router weights and biases"
    SHARED_EXPERT = "shared experts"
    ROUTED_EXPERT = "routed experts"
    ENGRAM = "engram projections and gate vectors"
    EMBEDDING = "embedding + head + norms"
    ENGRAM_TABLE = "engram tables"
    DRAFT = "draft"
    VISION = "vision + aligner + image vectors"


SCALE_DTYPE = "F8_E8M0"
ITEM_BYTES = {"F32": 4, "BF16": 2, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1}
_STORED_DTYPE = {Kind.FP8: "F8_E4M3", Kind.FP4: "I8", Kind.TABLE: "F8_E4M3", Kind.BF16: "BF16", Kind.F32: "F32"}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One expected tensor.

    ``shape`` is the logical shape ``[out, in]``. ``dtypes`` are the accepted safetensors dtypes, the released one
    first, and ``other_shapes`` further accepted shapes with the same elements in the same order.
    """

    name: str
    kind: Kind
    shape: Shape
    part: Part
    group: SizeGroup
    dtypes: tuple[str, ...]
    other_shapes: tuple[Shape, ...] = ()

    @property
    def stored_shape(self) -> Shape:
        """Shape in the file: an FP4 weight holds two columns per byte."""
        if self.kind is Kind.FP4:
            return (*self.shape[:-1], self.shape[-1] // 2)
        return self.shape

    @property
    def scale_name(self) -> str | None:
        """Name of the scale tensor: that of ``X.weight`` is ``X.scale``."""
        return self.name.removesuffix("weight") + "scale" if self.kind.is_quantized else None

    @property
    def scale_shape(self) -> Shape | None:
        if self.kind is Kind.FP8:
            return tile_grid(*self.shape)
        if self.kind.is_quantized:
            return (self.shape[0], self.shape[1] // GROUP)
        return None

    @property
    def num_parameters(self) -> int:
        """Logical elements; scales are not counted."""
        return math.prod(self.shape)

    @property
    def data_bytes(self) -> int:
        """Bytes of the weight in the file, in the released dtype."""
        return math.prod(self.stored_shape) * ITEM_BYTES[self.dtypes[0]]

    @property
    def scale_bytes(self) -> int:
        return 0 if self.scale_shape is None else math.prod(self.scale_shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of weight and scale together."""
        return self.data_bytes + self.scale_bytes


_IGNORED_DUPLICATE = re.compile(r"mtp\.\d+\.(embed|head)\.weight")


def is_ignored_duplicate(name: str) -> bool:
    """Draft copies of the backbone's embedding and head: allowed in a file, never read (spec 3.4)."""
    return _IGNORED_DUPLICATE.fullmatch(name) is not None


def canonical_name(name: str) -> str:
    """A tensor's name without the optional leading ``model.``."""
    return name.removeprefix("model.")


def expected_tensors(config: ModelConfig) -> dict[str, TensorSpec]:
    """All tensors that ``config`` describes, by canonical name, in model order (scales belong to their weights)."""
    specs: dict[str, TensorSpec] = {}
    for spec in _all_specs(config):
        assert spec.name not in specs, f"{spec.name} specified twice"
        specs[spec.name] = spec
    return specs


def _all_specs(config: ModelConfig) -> Iterator[TensorSpec]:
    text = config.text
    yield from _backbone_specs(text)
    for stage in range(text.num_nextn_predict_layers):
        yield from _draft_stage_specs(text, stage)
    if config.vision is not None:
        yield from _vision_specs(config.vision, text.hidden_size)


def _make(
    part: Part, prefix: str, name: str, kind: Kind, shape: Shape, group: SizeGroup, *, f32: bool = False
) -> TensorSpec:
    """One spec; ``f32``: the file may also hold this BF16 tensor as F32."""
    dtypes = (_STORED_DTYPE[kind], "F32") if f32 else (_STORED_DTYPE[kind],)
    return TensorSpec(prefix + name, kind, shape, part, group, dtypes)


def _backbone_specs(text: TextConfig) -> Iterator[TensorSpec]:
    group, hidden, streams = SizeGroup.EMBEDDING, text.hidden_size, text.hc_mult
    yield _make(Part.TEXT, "", "embed.weight", Kind.BF16, (text.vocab_size, hidden), group)
    for layer in text.layers:
        prefix = f"layers.{layer.layer_id}."
        if layer.has_engram:
            yield from _engram_specs(text, layer.layer_id, prefix)
        yield from _block_specs(text, Part.TEXT, prefix, num_experts=text.n_routed_experts)
        yield from _compressed_attention_specs(text, layer, prefix + "attn.")
    if not text.hc_shifted:
        group = SizeGroup.HYPER_CONNECTION
        yield _make(Part.TEXT, "", "hc_head_fn", Kind.F32, (streams, streams * hidden), group)
        yield _make(Part.TEXT, "", "hc_head_base", Kind.F32, (streams,), group)
        yield TensorSpec("hc_head_scale", Kind.F32, (1,), Part.TEXT, group, ("F32",), other_shapes=((),))
    group = SizeGroup.EMBEDDING
    yield _make(Part.TEXT, "", "norm.weight", Kind.BF16, (hidden,), group)
    yield _make(Part.TEXT, "", "head.weight", Kind.BF16, (text.vocab_size, hidden), group)


def _block_specs(text: TextConfig, part: Part, prefix: str, *, num_experts: int) -> Iterator[TensorSpec]:
    """What every transformer block holds, backbone layer or draft stage."""
    hidden, streams = text.hidden_size, text.hc_mult
    mixes = streams * (streams + 2)  # read, write and the square matrix
    for norm in ("attn_norm", "ffn_norm"):
        yield _make(part, prefix, f"{norm}.weight", Kind.BF16, (hidden,), SizeGroup.EMBEDDING)
    for sublayer in ("attn", "ffn"):
        hc, group = f"hc_{sublayer}_", SizeGroup.HYPER_CONNECTION
        yield _make(part, prefix, hc + "fn", Kind.F32, (mixes, streams * hidden), group)
        yield _make(part, prefix, hc + "base", Kind.F32, (mixes,), group)
        yield _make(part, prefix, hc + "scale", Kind.F32, (3,), group)
    yield from _attention_specs(text, part, prefix + "attn.")
    yield from _moe_specs(text, part, prefix + "ffn.", num_experts)


def _attention_specs(text: TextConfig, part: Part, prefix: str) -> Iterator[TensorSpec]:
    hidden, rank, group = text.hidden_size, text.q_lora_rank, SizeGroup.ATTENTION
    query_width = text.num_attention_heads * text.head_dim
    output_rank = text.o_groups * text.o_lora_rank
    for name, kind, shape in (
        ("wq_a.weight", Kind.FP8, (rank, hidden)),
        ("q_norm.weight", Kind.BF16, (rank,)),
        ("wq_b.weight", Kind.FP8, (query_width, rank)),
        ("wkv.weight", Kind.FP8, (text.head_dim, hidden)),
        ("kv_norm.weight", Kind.BF16, (text.head_dim,)),
        ("wo_a.weight", Kind.FP8, (output_rank, query_width // text.o_groups)),
        ("wo_b.weight", Kind.FP8, (hidden, output_rank)),
        ("attn_sink", Kind.F32, (text.num_attention_heads,)),
    ):
        yield _make(part, prefix, name, kind, shape, group)


def _compressed_attention_specs(text: TextConfig, layer: LayerPlan, prefix: str) -> Iterator[TensorSpec]:
    """Compressor, index keys and indexer, each only in the layers that own one (spec 1.2)."""
    hidden, group = text.hidden_size, SizeGroup.COMPRESSOR_INDEXER
    if layer.owns_kv:
        compressor = prefix + "compressor."
        yield _make(Part.TEXT, compressor, "wkv.weight", Kind.BF16, (text.head_dim, hidden), group)
        if layer.ratio == 2:
            yield _make(Part.TEXT, compressor, "wgate.weight", Kind.BF16, (text.head_dim, hidden), group)
        yield _make(Part.TEXT, compressor, "norm.weight", Kind.BF16, (text.head_dim,), group)
    indexer, width = prefix + "indexer.", text.index_head_dim
    if layer.owns_index_keys:
        yield _make(Part.TEXT, indexer, "wk.weight", Kind.BF16, (width, text.head_dim), group)
        yield _make(Part.TEXT, indexer, "k_norm.weight", Kind.BF16, (width,), group)
    if layer.owns_indexer:
        query_shape = (text.index_n_heads * width, text.q_lora_rank)
        yield _make(Part.TEXT, indexer, "wq_b.weight", Kind.FP8, query_shape, group)
        yield _make(Part.TEXT, indexer, "weights_proj.weight", Kind.BF16, (text.index_n_heads, hidden), group)


def _moe_specs(text: TextConfig, part: Part, prefix: str, num_experts: int) -> Iterator[TensorSpec]:
    hidden, inner = text.hidden_size, text.moe_intermediate_size
    yield _make(part, prefix, "gate.weight", Kind.BF16, (num_experts, hidden), SizeGroup.ROUTER)
    yield _make(part, prefix, "gate.bias", Kind.F32, (num_experts,), SizeGroup.ROUTER)
    yield _make(part, prefix, "gate.bias_vl", Kind.F32, (num_experts,), SizeGroup.ROUTER)
    projections = (("w1.weight", (inner, hidden)), ("w2.weight", (hidden, inner)), ("w3.weight", (inner, hidden)))
    for name, shape in projections:
        yield _make(part, prefix + "shared_experts.", name, Kind.FP8, shape, SizeGroup.SHARED_EXPERT)
    for expert in range(num_experts):
        for name, shape in projections:
            yield _make(part, f"{prefix}experts.{expert}.", name, Kind.FP4, shape, SizeGroup.ROUTED_EXPERT)


def engram_table_name(layer_id: int) -> str:
    """Canonical name of a layer's n-gram table."""
    return f"layers.{layer_id}.engram.embed.weight"


def _engram_specs(text: TextConfig, layer_id: int, prefix: str) -> Iterator[TensorSpec]:
    rows = text.engram_num_embeddings[text.engram_layer_ids.index(layer_id)]
    hidden, streams, group = text.hidden_size, text.hc_mult, SizeGroup.ENGRAM
    width = (text.engram_max_ngram_size - 1) * text.engram_n_heads * text.engram_head_dim
    table_shape = (rows, text.engram_head_dim)
    yield _make(Part.TEXT, "", engram_table_name(layer_id), Kind.TABLE, table_shape, SizeGroup.ENGRAM_TABLE)
    engram = prefix + "engram."
    yield _make(Part.TEXT, engram, "wkv.weight", Kind.FP8, ((streams + 1) * hidden, width), group)
    yield _make(Part.TEXT, engram, "q_weight", Kind.BF16, (streams, hidden), group, f32=True)
    yield _make(Part.TEXT, engram, "k_weight", Kind.BF16, (streams, hidden), group, f32=True)


def _draft_stage_specs(text: TextConfig, stage: int) -> Iterator[TensorSpec]:
    prefix, hidden, rank = f"mtp.{stage}.", text.hidden_size, text.dspark_markov_rank
    specs = list(_block_specs(text, Part.DRAFT, prefix, num_experts=text.dspark_n_routed_experts))
    if stage == 0:
        features = len(text.dspark_target_layer_ids) * hidden
        specs.append(_make(Part.DRAFT, prefix, "main_proj.weight", Kind.FP8, (hidden, features), SizeGroup.DRAFT))
        specs.append(_make(Part.DRAFT, prefix, "main_norm.weight", Kind.BF16, (hidden,), SizeGroup.DRAFT))
    if stage == text.num_nextn_predict_layers - 1:
        vocab = (text.vocab_size, rank)
        for name, shape, f32 in (
            ("norm.weight", (hidden,), False),
            ("markov_head.embed.weight", vocab, False),
            ("markov_head.head.weight", vocab, False),
            ("confidence_head.proj.weight", (1, hidden + rank), True),
        ):
            specs.append(_make(Part.DRAFT, prefix, name, Kind.BF16, shape, SizeGroup.DRAFT, f32=f32))
    for spec in specs:  # the size table counts the draft as one row
        yield TensorSpec(spec.name, spec.kind, spec.shape, spec.part, SizeGroup.DRAFT, spec.dtypes)


def _vision_specs(vision: VisionConfig, text_hidden: int) -> Iterator[TensorSpec]:
    width, inner, patch = vision.hidden_size, vision.intermediate_size, vision.patch_size
    cell = vision.downsample_ratio**2 * width
    shapes: dict[str, Shape] = {"vision.patch_embed.proj.weight": (width, 3 * patch * patch)}
    shapes["vision.patch_embed.proj.bias"] = (width,)
    for block in range(vision.num_hidden_layers):
        prefix = f"vision.blocks.{block}."
        shapes[prefix + "norm1.weight"] = shapes[prefix + "norm2.weight"] = (width,)
        shapes[prefix + "attn.wqkv.weight"] = (3 * width, width)
        shapes[prefix + "attn.wqkv.bias"] = (3 * width,)
        shapes[prefix + "attn.wo.weight"] = (width, width)
        shapes[prefix + "attn.wo.bias"] = (width,)
        shapes[prefix + "mlp.w1.weight"] = (2 * inner, width)
        shapes[prefix + "mlp.w2.weight"] = (width, inner)
    shapes["vision.norm.weight"] = (width,)
    shapes["aligner.w1.weight"] = (text_hidden, cell)
    shapes["aligner.w2.weight"] = (text_hidden, text_hidden)
    shapes["aligner.w1.bias"] = shapes["aligner.w2.bias"] = (text_hidden,)
    for name in ("image_start", "image_end", "image_newline"):
        shapes[name] = (text_hidden,)
    for name, shape in shapes.items():
        other = ((width, 3, patch, patch),) if name == "vision.patch_embed.proj.weight" else ()
        yield TensorSpec(name, Kind.BF16, shape, Part.VISION, SizeGroup.VISION, ("BF16",), other)
