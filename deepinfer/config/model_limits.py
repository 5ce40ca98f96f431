"""Upper limits of the counts in ``config.json``: what is enumerated at start-up has to be enumerable.

A damaged file can name a count that would fill memory with tensor names or hash tables before a weight is looked at.
The limits are far above any model (the released one has 40 layers, 384 experts per layer and 24 hash tables per n-gram
layer), so what they refuse is damage.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from deepinfer.errors import ConfigError

MAX_WIDTH = 2**31 - 1
"""Of every number without a limit of its own: widths and lengths become tensor dimensions, ids are int32."""
MAX_LAYERS = 4096
MAX_HEADS = 65536
MAX_EXPERTS = 65536
"""Per layer."""
MAX_ALL_EXPERTS = 2**18
"""Of all layers together, 16 times the released model: three tensors each, listed in seconds and below a gigabyte."""
MAX_HASH_TABLES = 16384
"""Of all n-gram layers together: each takes a prime number of its own, and those are searched one by one."""

TEXT_LIMITS = {
    "vocab_size": 2**24,  # the tokenizer keeps a text per id
    "num_hidden_layers": MAX_LAYERS,
    "num_nextn_predict_layers": MAX_LAYERS,
    "n_routed_experts": MAX_EXPERTS,
    "dspark_n_routed_experts": MAX_EXPERTS,
    "num_attention_heads": MAX_HEADS,
    "index_n_heads": MAX_HEADS,
    "hc_mult": 1024,  # streams are mixed by a matrix with the square of it
    "hc_sinkhorn_iters": 10_000,  # a loop of every sublayer
    "engram_max_ngram_size": 1024,
    "engram_n_heads": 4096,
    "engram_vocab_size": 2**40,  # rows of one hash table; the primality test is exact up to 2**48
    "dspark_block_size": 1024,  # drafts per step, each prepared for
}
VISION_LIMITS = {"num_hidden_layers": MAX_LAYERS, "num_attention_heads": MAX_HEADS}


def check_limits(section: Any, where: str, limits: Mapping[str, int]) -> None:
    """Raise a ConfigError for the first integer of a section that is beyond its limit.

    Args:
        section: a dataclass; call it before anything is enumerated.
        where: the section's name in the file.
        limits: by field; integers that are not in it have :data:`MAX_WIDTH`.
    """
    for field in dataclasses.fields(section):
        value, most = getattr(section, field.name), limits.get(field.name, MAX_WIDTH)
        if isinstance(value, int) and value > most:
            raise beyond_limit(f"{where}.{field.name}", value, f"at most {most}")


def beyond_limit(key: str, value: int, supported: str, consequence: str = "") -> ConfigError:
    """The error for a count that no model has.

    Args:
        consequence: what the value comes to, where that is what is beyond a limit.
    """
    shown = repr(value) if value < 10**30 else f"a number of {len(str(value))} digits"
    return ConfigError(
        f"config key {key} is {shown}",
        why=f"{consequence}no model has that many, so the file is damaged or was written for another program",
        fix=f"supported: {supported}; use the config.json that was released with the weights",
    )
