"""Memory of a sublayer's activations at its largest moment: upper estimates of what lives at the same time.

Only one sublayer runs at a time, so a step needs the largest of these. Sums are over the NVIDIA path's layers
(:mod:`deepinfer.layers.fused`); weights are those of the model, so nothing here knows a kernel's own buffers but for
the size of its blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer.config.model import TextConfig

EXPERT_BLOCK = 16
"""Pairs to whose multiple kernels for many rows fill up an expert's."""
_BF16, _FLOAT = 2, 4


def sublayer_bytes(text: TextConfig, rows: int, is_fast: bool = False) -> dict[str, int]:
    """Bytes by sublayer of a step of ``rows`` rows.

    Args:
        is_fast: dense products of many rows are in FP8.
    """
    copies = _Copies(rows, is_fast)
    found = {"attention": _attention(text, rows, copies), "experts": _experts(text, rows, copies)}
    if text.engram_layer_ids:
        found["n-gram memory"] = _engram(text, rows, copies)
    return found


@dataclass(frozen=True, slots=True)
class _Copies:
    """What a product of more than a few hundred rows makes besides its result, one product at a time."""

    rows: int
    is_fast: bool

    def largest(self, *shapes: tuple[int, int]) -> int:
        """Bytes of the largest of these products with FP8 weights ``(outputs, inputs)``: the weight in bf16, or in FP8
        beside the input in FP8 with a scale per row."""
        widened = max(outputs * inputs for outputs, inputs in shapes) * _BF16
        if not self.is_fast:
            return widened
        return max(widened, *(outputs * inputs + self.rows * (inputs + _FLOAT) for outputs, inputs in shapes))


def _attention(text: TextConfig, rows: int, copies: _Copies) -> int:
    """All of it lives until the output is made: input and its rounding, latents, key records (fewer bytes than a bf16
    key), queries with those of the index, context, the low-rank output, the output."""
    hidden, latent, low = text.hidden_size, text.q_lora_rank, text.o_groups * text.o_lora_rank
    context = text.num_attention_heads * text.head_dim
    queries = context + (text.index_n_heads * text.index_head_dim if text.index_source_layer_ids else 0)
    projected = latent + text.head_dim
    width = 2 * hidden + projected + latent + text.head_dim + queries + context + low + hidden
    weights = ((projected, hidden), (queries, latent), (low, context // text.o_groups), (hidden, low))
    return rows * width * _BF16 + copies.largest(*weights)


def _experts(text: TextConfig, rows: int, copies: _Copies) -> int:
    """The routed experts' products, or the sum of their outputs with the shared expert's; beside both the input, its
    rounding, and float32 gate and up of the shared expert.

    Hopper's kernels hold the pairs, each expert's filled up to blocks, with two of three activations (inputs, inner,
    outputs) at once. Where Triton stands in, it holds gate and up of the pairs in float32 as well.
    """
    hidden, width, experts = text.hidden_size, text.moe_intermediate_size, text.n_routed_experts
    pairs = rows * text.num_experts_per_tok
    filled = pairs + EXPERT_BLOCK * min(pairs, experts)
    beside = rows * (2 * hidden * _BF16 + 2 * width * _FLOAT)
    hopper = filled * (hidden + width) * _BF16
    triton = pairs * (2 * width * _FLOAT + (width + hidden) * _BF16)
    adding = filled * hidden * _BF16 + rows * (width + 2 * hidden) * _BF16
    return beside + max(hopper, triton, adding) + copies.largest((2 * width, hidden), (hidden, width))


def _engram(text: TextConfig, rows: int, copies: _Copies) -> int:
    """Table rows, and the keys of all streams and the value that are made of them."""
    found = (text.engram_max_ngram_size - 1) * text.engram_n_heads * text.engram_head_dim
    made = (text.hc_mult + 1) * text.hidden_size
    return rows * (found + made) * _BF16 + copies.largest((made, found))
