"""The smaller sections of ``config.json``: YaRN, quantisation and vision (spec 2.1 to 2.3)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from deepinfer.config.model_limits import VISION_LIMITS, check_limits
from deepinfer.errors import ConfigError

_ONLY_MEANING = "the model's arithmetic is defined for that only"


def require(condition: bool, key: str, value: object, supported: str, why: str = _ONLY_MEANING) -> None:
    """Raise a ConfigError that names ``key``, ``value`` and what is ``supported``, unless ``condition`` holds."""
    if not condition:
        raise ConfigError(f"config key {key} is {value!r}", why=why, fix=f"supported: {supported}")


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnConfig:
    """``rope_scaling`` of the compressing layers (spec 4.4). Ratio-0 layers and the draft never scale."""

    factor: float = 16.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    original_max_position_embeddings: int = 65536

    def __post_init__(self) -> None:
        check_limits(self, "text_config.rope_scaling", {})
        for key in ("factor", "beta_fast", "beta_slow", "original_max_position_embeddings"):
            value = getattr(self, key)
            require(0 < value < math.inf, f"text_config.rope_scaling.{key}", value, "a positive number")


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationConfig:
    """How the checkpoint stores its weights. Only the released scheme exists."""

    quant_method: str = "fp8"
    activation_scheme: str = "dynamic"
    weight_block_size: tuple[int, int] = (32, 32)
    scale_fmt: str = "ue8m0"
    expert_dtype: str = "fp4"

    def __post_init__(self) -> None:
        supported = {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": (32, 32),
            "scale_fmt": "ue8m0",
            "expert_dtype": "fp4",
        }
        for key, only in supported.items():
            value = getattr(self, key)
            require(value == only, f"quantization_config.{key}", value, repr(only))


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """The vision tower (spec 2.3 and 8). Sizes in channels, ``patch_size`` in pixels."""

    hidden_size: int = 1024
    num_hidden_layers: int = 32
    num_attention_heads: int = 16
    intermediate_size: int = 2816
    patch_size: int = 14
    rope_theta: float = 10000.0
    downsample_ratio: int = 3
    max_image_tokens: int = 1024
    min_pixels: int = 295936
    max_wh_ratio: float | None = None

    def __post_init__(self) -> None:
        check_limits(self, "vision_config", VISION_LIMITS)
        for key in (
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "intermediate_size",
            "patch_size",
            "downsample_ratio",
            "max_image_tokens",
            "min_pixels",
        ):
            value = getattr(self, key)
            require(value >= 1, f"vision_config.{key}", value, "an integer >= 1")
        require(0 < self.rope_theta < math.inf, "vision_config.rope_theta", self.rope_theta, "a positive number")
        ratio = self.max_wh_ratio
        require(ratio is None or ratio >= 1, "vision_config.max_wh_ratio", ratio, "null or a number >= 1")
        heads = self.num_attention_heads
        require(self.hidden_size % heads == 0, "vision_config.num_attention_heads", heads, "a divisor of hidden_size")
        head_dim = self.hidden_size // heads
        require(head_dim % 4 == 0, "vision_config.hidden_size", self.hidden_size, "a head width divisible by 4")
