"""The model configuration: every key of the released ``config.json`` in one frozen tree.

Source of names, defaults and rejections: the model specification, section 2. Reading a file is in
:mod:`deepinfer.config.model_file`, the derived per-layer roles in :mod:`deepinfer.config.layer_plan`, the smaller
sections in :mod:`deepinfer.config.model_sections`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from deepinfer.config.engram_hashing import engram_primes
from deepinfer.config.layer_plan import LayerPlan, plan_layers
from deepinfer.config.model_limits import MAX_ALL_EXPERTS, MAX_HASH_TABLES, TEXT_LIMITS, beyond_limit, check_limits
from deepinfer.config.model_sections import QuantizationConfig, VisionConfig, YarnConfig, require


@dataclass(frozen=True, kw_only=True)
class TextConfig:
    """The language model (spec 2.2). Widths in channels, layer lists by absolute layer number."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_shared_experts: int
    scoring_func: str
    topk_method: str
    norm_topk_prob: bool
    routed_scaling_factor: float
    hidden_act: str
    swiglu_limit: float
    rms_norm_eps: float
    attention_bias: bool
    attention_dropout: float
    tie_word_embeddings: bool
    max_position_embeddings: int
    rope_theta: float
    compress_rope_theta: float
    sliding_window: int
    compress_ratios: tuple[int, ...]
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_topk_blocks: int
    candidate_block_size: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    rope_scaling: YarnConfig | None = None
    index_k_source_layer_ids: tuple[int, ...] | None = None
    candidate_source_layer_id: int | None = None
    hc_shifted: bool = True
    use_fp4_sparse_kv: bool = True
    engram_layer_ids: tuple[int, ...] = ()
    engram_num_embeddings: tuple[int, ...] = ()
    engram_max_ngram_size: int = 4
    engram_vocab_size: int = 16_000_000
    engram_n_heads: int = 8
    engram_head_dim: int = 256
    engram_pad_token_id: int = 2
    engram_compressed_vocab_size: int | None = None
    num_nextn_predict_layers: int = 0
    dspark_block_size: int = 5
    dspark_noise_token_id: int = 128799
    dspark_target_layer_ids: tuple[int, ...] = ()
    dspark_target_attn_input: bool = True
    dspark_markov_rank: int = 0
    dspark_n_routed_experts: int = 128
    dspark_num_experts_per_tok: int = 3
    gate_temp: float = 1.0

    def __post_init__(self) -> None:
        self._check_fixed_choices()
        check_limits(self, "text_config", TEXT_LIMITS)
        self._check_numbers()
        self._check_widths()
        self._check_ratios()
        self._check_selection()
        self._check_engram()
        self._check_draft()
        assert len(self.layers) == self.num_hidden_layers

    @cached_property
    def layers(self) -> tuple[LayerPlan, ...]:
        """Role of every backbone layer (spec 1.2)."""
        return plan_layers(
            compress_ratios=self.compress_ratios[: self.num_hidden_layers],
            kv_sources=self.kv_source_layer_ids,
            index_sources=self.index_source_layer_ids,
            index_k_sources=self.index_k_source_layer_ids,
            candidate_source=self.candidate_source_layer_id,
            engram_layers=self.engram_layer_ids,
            feature_layers=self.dspark_target_layer_ids if self.num_nextn_predict_layers else (),
        )

    @property
    def first_decoder_layer(self) -> int:
        """First layer with compress ratio 1, or the number of layers when there is none."""
        ratios = self.compress_ratios[: self.num_hidden_layers]
        return ratios.index(1) if 1 in ratios else self.num_hidden_layers

    @property
    def kv_source_layers(self) -> tuple[LayerPlan, ...]:
        """Layers that own a compressed key/value stream, ascending."""
        return tuple(layer for layer in self.layers if layer.owns_kv)

    def _check_fixed_choices(self) -> None:
        for key, only in (
            ("hidden_act", "silu"),
            ("attention_bias", False),
            ("attention_dropout", 0.0),
            ("num_key_value_heads", 1),
            ("scoring_func", "sqrtsoftplus"),
            ("topk_method", "noaux_tc"),
            ("norm_topk_prob", True),
            ("tie_word_embeddings", False),
            ("n_shared_experts", 1),
            ("gate_temp", 1.0),
        ):
            value = getattr(self, key)
            require(value == only, f"text_config.{key}", value, repr(only))

    def _check_numbers(self) -> None:
        for key in ("routed_scaling_factor", "swiglu_limit", "rope_theta", "compress_rope_theta"):
            value = getattr(self, key)
            require(0 < value < math.inf, f"text_config.{key}", value, "a positive number")
        for key in ("rms_norm_eps", "hc_eps"):
            value = getattr(self, key)
            require(0 <= value < math.inf, f"text_config.{key}", value, "a number >= 0")
        stages = self.num_nextn_predict_layers
        require(stages >= 0, "text_config.num_nextn_predict_layers", stages, "an integer >= 0")

    def _check_widths(self) -> None:
        positive = (
            "vocab_size hidden_size num_hidden_layers num_attention_heads head_dim qk_rope_head_dim q_lora_rank "
            "o_lora_rank o_groups moe_intermediate_size n_routed_experts num_experts_per_tok max_position_embeddings "
            "sliding_window index_n_heads index_head_dim index_topk hc_mult hc_sinkhorn_iters"
        )
        for key in positive.split():
            value = getattr(self, key)
            require(value >= 1, f"text_config.{key}", value, "an integer >= 1")
        groups = "the quantisation groups are 32 wide"
        for key in ("hidden_size", "head_dim", "index_head_dim", "q_lora_rank", "moe_intermediate_size"):
            value = getattr(self, key)
            require(value % 32 == 0, f"text_config.{key}", value, "a multiple of 32", groups)
        group_width = self.o_groups * self.o_lora_rank
        rank = self.o_lora_rank
        require(group_width % 32 == 0, "text_config.o_lora_rank", rank, "o_groups * o_lora_rank % 32 == 0", groups)
        require(
            self.num_attention_heads % self.o_groups == 0,
            "text_config.o_groups",
            self.o_groups,
            f"a divisor of num_attention_heads ({self.num_attention_heads})",
            "each output group takes the same number of heads",
        )
        rope = self.qk_rope_head_dim
        smallest = min(self.head_dim, self.index_head_dim)
        require(
            rope % 2 == 0 and rope <= smallest,
            "text_config.qk_rope_head_dim",
            rope,
            f"an even number up to {smallest} (the smaller of head_dim and index_head_dim)",
            "the rotation takes pairs from the end of each head",
        )
        require(
            self.num_experts_per_tok <= self.n_routed_experts,
            "text_config.num_experts_per_tok",
            self.num_experts_per_tok,
            f"at most n_routed_experts ({self.n_routed_experts})",
            "a token cannot visit more experts than there are",
        )
        num_experts = self.num_hidden_layers * self.n_routed_experts
        num_experts += self.num_nextn_predict_layers * self.dspark_n_routed_experts
        if num_experts > MAX_ALL_EXPERTS:
            raise beyond_limit(
                "text_config.n_routed_experts",
                self.n_routed_experts,
                f"up to {MAX_ALL_EXPERTS} in all layers and draft stages together",
                f"that makes {num_experts} experts in all; ",
            )

    def _check_ratios(self) -> None:
        expected = self.num_hidden_layers + self.num_nextn_predict_layers
        ratios = self.compress_ratios
        require(
            len(ratios) == expected,
            "text_config.compress_ratios",
            list(ratios),
            f"{expected} entries, one per layer and draft stage",
            f"it has {len(ratios)} entries",
        )
        for index, ratio in enumerate(ratios):
            require(ratio in (0, 1, 2), f"text_config.compress_ratios[{index}]", ratio, "0, 1 or 2")
        draft = ratios[self.num_hidden_layers :]
        require(not any(draft), "text_config.compress_ratios", list(ratios), "0 for every draft stage")
        backbone = ratios[: self.num_hidden_layers]
        if 1 in backbone:
            require(
                2 not in backbone[backbone.index(1) :],
                "text_config.compress_ratios",
                list(ratios),
                "all ratio-2 layers before the first ratio-1 layer",
                "the encoder/decoder split has to be monotone",
            )

    def _check_selection(self) -> None:
        if self.candidate_source_layer_id is None:
            return
        size, blocks = self.candidate_block_size, self.candidate_topk_blocks
        require(size >= 1, "text_config.candidate_block_size", size, "an integer >= 1")
        require(blocks >= 1, "text_config.candidate_topk_blocks", blocks, "an integer >= 1")
        require(
            size * blocks >= self.index_topk,
            "text_config.candidate_topk_blocks",
            blocks,
            f"at least index_topk / candidate_block_size = {self.index_topk / size:g}",
            f"{blocks} blocks of {size} entries cannot hold index_topk = {self.index_topk} selections",
        )

    def _check_engram(self) -> None:
        ids = self.engram_layer_ids
        if not ids:
            counts = list(self.engram_num_embeddings)
            require(not counts, "text_config.engram_num_embeddings", counts, "[] without engram layers")
            return
        require(
            list(ids) == sorted(set(ids)) and ids[0] >= 0 and ids[-1] < self.num_hidden_layers,
            "text_config.engram_layer_ids",
            list(ids),
            f"distinct ascending layers below {self.num_hidden_layers}",
            "they name backbone layers",
        )
        ngram = self.engram_max_ngram_size
        require(ngram >= 2, "text_config.engram_max_ngram_size", ngram, "an integer >= 2")
        require(self.engram_vocab_size >= 2, "text_config.engram_vocab_size", self.engram_vocab_size, "an integer >= 2")
        require(self.engram_n_heads >= 1, "text_config.engram_n_heads", self.engram_n_heads, "an integer >= 1")
        width = self.engram_head_dim
        require(width >= 32 and width % 32 == 0, "text_config.engram_head_dim", width, "a multiple of 32")
        pad = self.engram_pad_token_id
        require(0 <= pad < self.vocab_size, "text_config.engram_pad_token_id", pad, f"an id below {self.vocab_size}")
        num_tables = len(ids) * (ngram - 1) * self.engram_n_heads
        if num_tables > MAX_HASH_TABLES:
            raise beyond_limit(
                "text_config.engram_n_heads",
                self.engram_n_heads,
                f"up to {MAX_HASH_TABLES} hash tables in all layers together",
                f"with {len(ids)} layers and n-grams of 2 to {ngram} tokens that makes {num_tables} hash tables; ",
            )
        primes = engram_primes(len(ids), self.engram_max_ngram_size, self.engram_n_heads, self.engram_vocab_size)
        expected = tuple(sum(layer) for layer in primes)
        require(
            tuple(self.engram_num_embeddings) == expected,
            "text_config.engram_num_embeddings",
            list(self.engram_num_embeddings),
            f"{list(expected)}",
            "the row counts have to be the sums of the bucket primes",
        )

    def _check_draft(self) -> None:
        require(
            self.dspark_target_attn_input is True,
            "text_config.dspark_target_attn_input",
            self.dspark_target_attn_input,
            "True",
        )
        if not self.num_nextn_predict_layers:
            return
        targets = self.dspark_target_layer_ids
        in_range = bool(targets) and all(0 <= layer < self.num_hidden_layers for layer in targets)
        require(
            in_range and list(targets) == sorted(set(targets)),
            "text_config.dspark_target_layer_ids",
            list(targets),
            f"distinct ascending layers below {self.num_hidden_layers}",
            "the draft takes its features there",
        )
        noise = self.dspark_noise_token_id
        in_vocab = f"an id below {self.vocab_size}"
        require(0 <= noise < self.vocab_size, "text_config.dspark_noise_token_id", noise, in_vocab)
        for key in ("dspark_block_size", "dspark_markov_rank", "dspark_n_routed_experts", "dspark_num_experts_per_tok"):
            value = getattr(self, key)
            require(value >= 1, f"text_config.{key}", value, "an integer >= 1 when there are draft stages")
        require(
            self.dspark_num_experts_per_tok <= self.dspark_n_routed_experts,
            "text_config.dspark_num_experts_per_tok",
            self.dspark_num_experts_per_tok,
            f"at most dspark_n_routed_experts ({self.dspark_n_routed_experts})",
        )


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The whole ``config.json``. Build it with :func:`deepinfer.config.model_file.load_model_config`."""

    text: TextConfig
    vision: VisionConfig | None
    quantization: QuantizationConfig
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int
    image_token_id: int
    architecture: str = "DeepseekV41ForCausalLM"
    model_type: str = "deepseek_v41"
    dtype: str = "bfloat16"
    tokenizer_compatibility: str = "release"

    def __post_init__(self) -> None:
        for key, only in (
            ("architecture", "DeepseekV41ForCausalLM"),
            ("model_type", "deepseek_v41"),
            ("dtype", "bfloat16"),
        ):
            value = getattr(self, key)
            name = "architectures" if key == "architecture" else key
            require(value == only, name, value, repr(only))
        require(
            self.tokenizer_compatibility in ("release", "native"),
            "tokenizer_compatibility",
            self.tokenizer_compatibility,
            "'release' or 'native'",
        )
        for key in ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id"):
            value = getattr(self, key)
            require(0 <= value < self.text.vocab_size, key, value, f"an id below vocab_size ({self.text.vocab_size})")
