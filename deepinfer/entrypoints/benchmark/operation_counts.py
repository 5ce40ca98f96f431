"""How many multiplications a prompt token costs, and how that grows with the length of the prompt."""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer.checkpoint.inspect import summarize_config
from deepinfer.checkpoint.tensor_specs import SizeGroup
from deepinfer.config.layer_plan import IndexMode
from deepinfer.config.model import ModelConfig

_WEIGHTS_OF_EVERY_TOKEN = (
    SizeGroup.ATTENTION,
    SizeGroup.COMPRESSOR_INDEXER,
    SizeGroup.HYPER_CONNECTION,
    SizeGroup.ROUTER,
    SizeGroup.SHARED_EXPERT,
    SizeGroup.ENGRAM,
)


@dataclass(frozen=True, slots=True)
class TokenWork:
    """Multiply-accumulates per prompt token, the mean over a prompt."""

    weights: float
    """With the weights: the same for every token."""
    attention: float
    """With window and selected entries: bounded, so constant for long prompts."""
    scan: float
    """Scores of the index scan: proportional to the length of the prompt."""
    scored_entries: float
    """Entries that the scan looks at, over all layers that scan everything."""

    @property
    def total(self) -> float:
        return self.weights + self.attention + self.scan


def prefill_work(config: ModelConfig, prompt_tokens: int) -> TokenWork:
    """Work per token of one prompt of ``prompt_tokens`` tokens (spec 4; the head is computed for one row only)."""
    text, sizes = config.text, summarize_config(config).sizes
    weights = float(sum(sizes[group].num_parameters for group in _WEIGHTS_OF_EVERY_TOKEN if group in sizes))
    weights += sizes[SizeGroup.ROUTED_EXPERT].num_parameters * text.num_experts_per_tok / text.n_routed_experts
    attention = scan = scored = 0.0
    for layer in text.layers:
        keys = _mean_visible(prompt_tokens, 1, text.sliding_window)
        if layer.ratio:
            keys += _mean_visible(prompt_tokens, layer.ratio, text.index_topk)
        attention += 2 * text.num_attention_heads * text.head_dim * keys
        if layer.owns_indexer:
            is_bounded = layer.mode is IndexMode.REINDEX
            limit = text.candidate_topk_blocks * text.candidate_block_size if is_bounded else None
            entries = _mean_visible(prompt_tokens, layer.ratio, limit)
            scan += text.index_n_heads * (text.index_head_dim + 1) * entries
            scored += 0.0 if is_bounded else entries
    return TokenWork(weights, attention, scan, scored)


def _mean_visible(prompt_tokens: int, ratio: int, limit: int | None) -> float:
    """Mean over positions p of ``min((p + 1) // ratio, limit)``."""
    most = prompt_tokens if limit is None else limit
    return sum(min((position + 1) // ratio, most) for position in range(prompt_tokens)) / prompt_tokens
