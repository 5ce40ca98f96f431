"""Which values are rounded: one switch per rounding and quantisation point of the model.

The points are those that the specification names (its section 4) and a few that it leaves open and this project fixed,
so that the engine and the executable specification can agree tensor by tensor: attention probabilities, expert
products G and U, router scores, gates and hyper-connection mixes are never rounded.
"""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Roundings:
    """True: the value is rounded at this point. Names start with the format: fp32, bf16, q8 (e4m3), q4 (e2m1).

    The order follows a token through the model.
    """

    bf16_embedding: bool = False
    """The trunk's first value (4.1), and the vectors of an image span."""
    bf16_feature: bool = False
    """Mean of the streams, input of the draft (7.2)."""
    bf16_engram_projection: bool = False
    """Keys and value ``kv`` of an Engram layer (4.10 f)."""
    bf16_engram_trunk: bool = False
    """The trunk after the Engram update (4.10 f)."""
    bf16_read: bool = False
    """``u``, what a sublayer reads from the trunk (4.2)."""
    bf16_norm: bool = False
    """Output of every RMS norm (0.2)."""

    q8_attention_input: bool = False
    """``x`` before wq_a and wkv (4.5)."""
    bf16_query_latent: bool = False
    """``a_q``, output of wq_a (4.5)."""
    q8_query_latent: bool = False
    """``q_r`` before wq_b and indexer.wq_b (4.5, 4.7)."""
    bf16_query: bool = False
    """Output of wq_b (4.5)."""
    bf16_key: bool = False
    """Output of wkv (4.5)."""
    bf16_rope: bool = False
    """Output of the forward rotation: queries, window keys, entries, index keys and queries (4.4)."""
    q8_window_key: bool = False
    """``k~``, what the sliding window stores (4.5)."""

    fp32_pair: bool = False
    """Score and value of a token while a ratio-2 compressor waits for its partner (4.6)."""
    bf16_pooled: bool = False
    """Output of the compressor before its norm (4.6)."""
    q4_entry: bool = False
    """Main entry ``e_j`` (4.6): Q4e, or Q8 when the configuration says so."""
    bf16_index_key: bool = False
    """Output of indexer.wk (4.6)."""
    q4_index_key: bool = False
    """``kappa_j`` (4.6)."""
    bf16_index_query: bool = False
    """Output of indexer.wq_b (4.7)."""
    q4_index_query: bool = False
    """``iq`` (4.7)."""
    bf16_index_weight: bool = False
    """``g`` (4.7)."""
    bf16_index_score: bool = False
    """``z`` (4.7)."""

    bf16_context: bool = False
    """Attention context before the inverse rotation (4.8)."""
    bf16_context_rotated: bool = False
    """Attention context after the inverse rotation (4.8)."""
    q8_context: bool = False
    """The context before wo_a (4.8)."""
    bf16_group_output: bool = False
    """``t_g``, output of wo_a (4.8)."""
    q8_group_output: bool = False
    """``t_g`` before wo_b (4.8)."""
    bf16_attention_output: bool = False
    """Output of wo_b (4.8)."""

    q8_ffn_input: bool = False
    """``x`` before w1 and w3 of routed and shared experts (4.9)."""
    q8_swiglu: bool = False
    """``a`` before w2, straight from full precision (4.9)."""
    bf16_expert_output: bool = False
    """``y_e`` and ``y_shared`` (4.9)."""
    bf16_ffn_output: bool = False
    """The sum over experts (4.9)."""
    bf16_trunk: bool = False
    """The trunk after a sublayer's write (4.2)."""
    bf16_hidden: bool = False
    """``h`` before the last norm, and ``g_s`` of the draft (4.1, 7.3)."""

    q8_draft_features: bool = False
    """Concatenated features before main_proj (7.2)."""
    bf16_draft_context: bool = False
    """Output of main_proj (7.2)."""
    bf16_vision: bool = False
    """Every product, sum and norm of the vision tower and the aligner (8.3, 8.4)."""

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """All switches, in the order of the model."""
        return tuple(field.name for field in fields(cls))

    @classmethod
    def of(cls, *names: str) -> Roundings:
        """Only the switches ``names`` on."""
        return cls(**dict.fromkeys(names, True))

    @classmethod
    def none(cls) -> Roundings:
        """Float mode: nothing is rounded anywhere."""
        return cls()

    @classmethod
    def faithful(cls) -> Roundings:
        """Every rounding of the specification."""
        return cls.of(*cls.names())

    @classmethod
    def qat_woa(cls) -> Roundings:
        """Every quantiser and no bf16 rounding: the golden mode ``qat-woa``."""
        return cls.of(*(name for name in cls.names() if not name.startswith("bf16_")))

    @classmethod
    def qat(cls) -> Roundings:
        """As :meth:`qat_woa` but with an unquantised context before wo_a: the golden mode ``qat``."""
        return cls.of(*(name for name in cls.names() if not name.startswith("bf16_") and name != "q8_context"))
