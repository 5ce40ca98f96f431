"""Sensible distributions for random weights: every tensor non-trivial, activations near unit size (spec 4.2 and 11)."""

from __future__ import annotations

import hashlib
import math
import re
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.checkpoint.tensor_specs import Kind, TensorSpec

_INDEXED_BLOCK = re.compile(r"(?:layers|mtp)\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Distribution:
    """Normal values: ``mean`` is a number, or a tensor of the spec's shape."""

    mean: float | Tensor
    std: float


def seed_of(seed: int, name: str) -> int:
    """63-bit seed of one tensor, so that each can be made without the others."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def distribution_of(spec: TensorSpec, num_streams: int) -> Distribution:
    """How random values of a tensor are drawn.

    Args:
        spec: the tensor.
        num_streams: hyper-connection streams (``hc_mult``).
    """
    name = spec.name
    last = name.rsplit(".", 1)[-1]
    if name.endswith(("norm.weight", "norm1.weight", "norm2.weight", "q_weight", "k_weight")):
        return Distribution(1.0, 0.2)
    if last in ("bias", "bias_vl"):
        return Distribution(0.0, 0.1)
    if last.startswith("hc_") and last.endswith("_scale"):
        return Distribution(0.5, 0.1)
    if last.startswith("hc_") and last.endswith("_base"):
        return Distribution(_hyper_connection_base(spec, num_streams), 0.5)
    if name.endswith(("attn_sink", "embed.weight")) and spec.kind is not Kind.TABLE:
        return Distribution(0.0, 1.0)
    if name.startswith("image_"):
        return Distribution(0.0, 1.0)
    if spec.kind is Kind.TABLE:
        return Distribution(0.0, 0.5)
    return Distribution(0.0, 1.0 / math.sqrt(spec.shape[-1]))


def _hyper_connection_base(spec: TensorSpec, streams: int) -> Tensor:
    """Initial values of a fresh model: each block reads mainly one stream and leaves the others nearly alone."""
    block = _INDEXED_BLOCK.match(spec.name)
    read = torch.full((streams,), -3.0)
    read[int(block.group(1)) % streams if block else 0] = 3.0
    if spec.shape[0] == streams:  # the final head mix has a read part only
        return read
    mix = torch.full((streams, streams), -3.0).fill_diagonal_(3.0)
    return torch.cat((read, torch.zeros(streams), mix.flatten()))
