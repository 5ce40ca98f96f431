"""Hyper-connections: how a sublayer reads from and writes to the streams of the trunk (spec 4.2)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.reference.number_formats import bf16
from deepinfer.reference.parameters import Parameters
from deepinfer.reference.setting import Setting


@dataclass(frozen=True, slots=True)
class Mixes:
    """What one sublayer's hyper-connection computes from the trunk entering it."""

    read: Tensor  # [T, M] pi'
    write: Tensor  # [T, M] omega
    carry: Tensor  # [T, M, M] C, from old stream (first index) to new stream (second index)


def sinkhorn(logits: Tensor, iterations: int, epsilon: float) -> Tensor:
    """Near doubly stochastic ``[..., M, M]``. The softmax is the first row pass, and a column pass ends it."""
    matrix = torch.softmax(logits, -1) + epsilon
    matrix = matrix / (matrix.sum(-2, keepdim=True) + epsilon)
    for _ in range(iterations - 1):
        matrix = matrix / (matrix.sum(-1, keepdim=True) + epsilon)
        matrix = matrix / (matrix.sum(-2, keepdim=True) + epsilon)
    return matrix


def _products(trunk: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """``m``: rows of ``weight [rows, M * d]`` times the flattened trunk ``[T, M, d]``, divided by its RMS."""
    flat = trunk.flatten(1)
    return torch.rsqrt(flat.square().mean(-1, keepdim=True) + epsilon) * (flat @ weight.T)


def mixes(trunk: Tensor, parameters: Parameters, name: str, setting: Setting) -> Mixes:
    """Read mix for the next sublayer, write mix and carry matrix of this one.

    Args:
        trunk: ``[T, M, d]`` as it enters the sublayer.
        name: ``hc_attn`` or ``hc_ffn``.
    """
    text, streams = setting.text, setting.text.hc_mult
    product = _products(trunk, parameters[f"{name}_fn"], text.rms_norm_eps)
    scale, base = parameters[f"{name}_scale"], parameters[f"{name}_base"]
    read, write, carry = product.split((streams, streams, streams * streams), -1)
    read_base, write_base, carry_base = base.split((streams, streams, streams * streams))
    matrix = (scale[2] * carry + carry_base).unflatten(-1, (streams, streams))
    return Mixes(
        read=torch.sigmoid(scale[0] * read + read_base) + text.hc_eps,
        write=2 * torch.sigmoid(scale[1] * write + write_base),
        carry=sinkhorn(matrix, text.hc_sinkhorn_iters, text.hc_eps),
    )


def collapse(trunk: Tensor, read_mix: Tensor) -> Tensor:
    """Weighted sum of the streams: ``[T, M, d]``, ``[T, M]`` -> ``[T, d]``."""
    return (read_mix[..., None] * trunk).sum(1)


def head_mix(trunk: Tensor, parameters: Parameters, setting: Setting) -> Tensor:
    """The final read mix of checkpoints with ``hc_shifted`` false, ``[T, M]``."""
    product = _products(trunk, parameters["hc_head_fn"], setting.text.rms_norm_eps)
    return torch.sigmoid(parameters["hc_head_scale"] * product + parameters["hc_head_base"]) + setting.text.hc_eps


def sublayer(
    trunk: Tensor,
    read_mix: Tensor,
    parameters: Parameters,
    kind: str,
    compute: Callable[[Tensor], Tensor],
    setting: Setting,
) -> tuple[Tensor, Tensor]:
    """``SUB``: read, norm, compute, write.

    Args:
        trunk: ``[T, M, d]``.
        read_mix: ``[T, M]`` that the *previous* sublayer made.
        kind: ``attn`` or ``ffn``, which hyper-connection and norm to take.
        compute: the sublayer itself, ``[T, d]`` -> ``[T, d]``.
    Returns:
        The new trunk, and the read mix for the *next* sublayer, made from the trunk that entered this one.
    """
    roundings = setting.roundings
    mix = mixes(trunk, parameters, f"hc_{kind}", setting)
    own_or_previous = read_mix if setting.text.hc_shifted else mix.read
    read = bf16(collapse(trunk, own_or_previous), roundings.bf16_read)
    output = compute(setting.norm(read, parameters[f"{kind}_norm.weight"]))
    carried = torch.einsum("tij,tid->tjd", mix.carry, trunk)
    written = mix.write[..., None] * output[:, None]
    return bf16(written + carried, roundings.bf16_trunk), mix.read
