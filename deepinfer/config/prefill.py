"""Decoder bounded replay: how much of a prompt goes through the decoder half of the model (spec 6.1)."""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer.config.model import TextConfig
from deepinfer.errors import ConfigError

RECOMMENDED_KEEP_TOKENS = 140
"""For the released model: its window of 128, 6 tokens of draft backtracking, and some to spare."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillConfig:
    """Whether the decoder layers skip all but the end of a prompt."""

    truncation: str = "off"
    """``off``: they run on every prompt token. ``mask``: on every one, but windows do not reach past the kept tokens
    (to compare with). ``compact``: on the kept tokens only."""
    keep_tokens: int = 0
    """Prompt tokens that are kept; 0 when ``truncation`` is off."""

    def __post_init__(self) -> None:
        if self.truncation not in ("off", "mask", "compact"):
            raise ConfigError(
                f"prefill_truncation is {self.truncation!r}", why="no such mode", fix="use off, mask or compact"
            )
        if self.keep_tokens < 0:
            raise ConfigError(
                f"prefill_keep_tokens is {self.keep_tokens}",
                why="it counts prompt tokens",
                fix=f"give a number >= 0; {RECOMMENDED_KEEP_TOKENS} suits the released model",
            )

    @property
    def is_truncating(self) -> bool:
        return self.truncation != "off"

    @property
    def decoder_keep_tokens(self) -> int:
        """Prompt tokens that the decoder layers run on, or 0 for all of them."""
        return self.keep_tokens if self.is_truncating else 0


def check_truncation(prefill: PrefillConfig, text: TextConfig, max_backtracking: int) -> None:
    """Raise ConfigError where truncation would leave a window without its keys, or does not fit the model.

    Args:
        max_backtracking: tokens that verification may take back.
    """
    if not prefill.is_truncating:
        return
    least = text.sliding_window + max_backtracking
    if prefill.keep_tokens < least:
        raise ConfigError(
            f"prefill_keep_tokens is {prefill.keep_tokens}",
            why=f"with prefill_truncation={prefill.truncation} the first generated tokens need the windows of "
            f"sliding_window + backtracking = {text.sliding_window} + {max_backtracking} = {least} prompt tokens",
            fix=f"give {least} or more ({max(RECOMMENDED_KEEP_TOKENS, least)} is a good choice)",
        )
    cut = text.first_decoder_layer
    for condition, why in (
        (cut < text.num_hidden_layers, "the model has no decoder layers (none with compress ratio 1)"),
        (all(layer < cut for layer in text.engram_layer_ids), f"an n-gram layer lies behind layer {cut}"),
        (all(layer.layer_id <= cut for layer in text.kv_source_layers), f"a KV source lies behind layer {cut}"),
        (
            not text.num_nextn_predict_layers or all(layer > cut for layer in text.dspark_target_layer_ids),
            f"the draft takes features at or before layer {cut}, for tokens that would not have all of them",
        ),
    ):
        if not condition:
            raise ConfigError(
                f"prefill_truncation is {prefill.truncation!r}", why=why, fix="leave it off for this model"
            )
