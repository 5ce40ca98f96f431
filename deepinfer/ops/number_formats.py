"""The small number formats of the model: e4m3, e2m1 and power-of-two scales, and the three group quantisers.

Names follow spec 0.2: ``q8`` (FP8 in groups of 32), ``q4u`` (FP4 in groups of 32, power-of-two scale) and ``q4e``
(FP4 in groups of 16, e4m3 scale). Codes are ``uint8``; scales are kept as bytes. Everything here is exact: a code
times its scale has few enough bits for float32.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

E4M3_MAX = 448.0
E2M1_MAX = 6.0
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E4M3_TINY = 2.0**-9  # smallest subnormal


def ceil_log2(x: Tensor) -> Tensor:
    """Smallest integer ``e`` with ``x <= 2**e``, from the bits (spec 0.2, ``cl2``).

    Args:
        x: float32, positive and normal, any shape.
    Returns:
        int32, same shape.
    """
    return ((x.view(torch.int32) + 0x7FFFFF) >> 23) - 127


def power_of_two(exponent: Tensor) -> Tensor:
    """``2**exponent`` as float32, exactly, for int32 exponents in [-126, 127]."""
    return ((exponent + 127) << 23).view(torch.float32)


def scale_from_byte(byte: Tensor) -> Tensor:
    """Value of a ue8m0 scale byte as float32: ``2**(byte - 127)``. Byte 0 is the subnormal 2**-127."""
    bits = byte.to(torch.int32) << 23
    return torch.where(bits == 0, 1 << 22, bits).view(torch.float32)


def e4m3_decode(codes: Tensor) -> Tensor:
    """Values of e4m3 codes (uint8) as float32."""
    return codes.view(torch.float8_e4m3fn).to(torch.float32)


def e4m3_encode(x: Tensor) -> Tensor:
    """Round float32 to e4m3 codes (uint8), nearest even, saturating at 448."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def e2m1_round(x: Tensor) -> Tensor:
    """Round float32 to the nearest e2m1 value, ties to the even code, saturating at 6. Returns values, not codes."""
    magnitude = x.abs().clamp_max(E2M1_MAX)
    # The spacing is 0.5 below 2, 1 below 4 and 2 above; round() is half-to-even, which is the even code in each range.
    fine = (magnitude * 2).round() * 0.5
    middle = magnitude.round()
    coarse = (magnitude * 0.5).round() * 2
    rounded = torch.where(magnitude < 2, fine, torch.where(magnitude < 4, middle, coarse))
    return torch.copysign(rounded, x)


def e2m1_pack(values: Tensor) -> Tensor:
    """Pack exact e2m1 values ``[..., n]`` into bytes ``[..., n / 2]``: even column in the low nibble (spec 3.2)."""
    magnitude = values.abs()
    code = torch.where(magnitude < 2, magnitude * 2, torch.where(magnitude < 4, magnitude + 2, magnitude * 0.5 + 4))
    code = code.to(torch.uint8) | (torch.signbit(values).to(torch.uint8) << 3)
    return code[..., 0::2] | (code[..., 1::2] << 4)


@cache
def _nibble_pairs(device: torch.device) -> Tensor:
    signed = torch.tensor([*E2M1_VALUES, *(-value for value in E2M1_VALUES)], device=device)
    byte = torch.arange(256, device=device)
    return torch.stack((signed[byte & 15], signed[byte >> 4]), dim=-1)  # [256, 2]


def e2m1_unpack(packed: Tensor) -> Tensor:
    """Values ``[..., n]`` (float32) of packed bytes ``[..., n / 2]``."""
    pairs = _nibble_pairs(packed.device).index_select(0, packed.reshape(-1).to(torch.int64))
    return pairs.view(*packed.shape[:-1], 2 * packed.shape[-1])


def _groups(x: Tensor, size: int) -> Tensor:
    return x.to(torch.float32).unflatten(-1, (-1, size))


def q8(x: Tensor) -> tuple[Tensor, Tensor]:
    """FP8 activation quantiser: e4m3 codes ``[..., n]`` and ue8m0 bytes ``[..., n / 32]`` (spec 0.2, ``Q8``)."""
    groups = _groups(x, 32)
    exponent = ceil_log2(groups.abs().amax(-1, keepdim=True).clamp_min(1e-4) / E4M3_MAX)
    codes = e4m3_encode(groups * power_of_two(-exponent))
    return codes.flatten(-2), (exponent.squeeze(-1) + 127).to(torch.uint8)


def q8_decode(codes: Tensor, scales: Tensor) -> Tensor:
    """Float32 values of :func:`q8` output."""
    return (_e4m3_groups(codes, 32) * scale_from_byte(scales).unsqueeze(-1)).flatten(-2)


def _e4m3_groups(codes: Tensor, size: int) -> Tensor:
    return e4m3_decode(codes).unflatten(-1, (-1, size))


def q8_round(x: Tensor) -> Tensor:
    """``deq(Q8(x))`` as float32 without materialising the codes."""
    groups = _groups(x, 32)
    exponent = ceil_log2(groups.abs().amax(-1, keepdim=True).clamp_min(1e-4) / E4M3_MAX)
    rounded = (groups * power_of_two(-exponent)).to(torch.float8_e4m3fn).to(torch.float32)
    return (rounded * power_of_two(exponent)).flatten(-2)


def q4u(x: Tensor) -> tuple[Tensor, Tensor]:
    """Index-key FP4 quantiser: packed codes ``[..., n / 2]`` and ue8m0 bytes ``[..., n / 32]`` (spec 0.2, ``Q4u``)."""
    groups = _groups(x, 32)
    exponent = ceil_log2(groups.abs().amax(-1, keepdim=True).clamp_min(6 * 2.0**-126) / E2M1_MAX)
    values = e2m1_round(groups * power_of_two(-exponent))
    return e2m1_pack(values.flatten(-2)), (exponent.squeeze(-1) + 127).to(torch.uint8)


def q4u_decode(codes: Tensor, scales: Tensor) -> Tensor:
    """Float32 values of :func:`q4u` output."""
    return (e2m1_unpack(codes).unflatten(-1, (-1, 32)) * scale_from_byte(scales).unsqueeze(-1)).flatten(-2)


def q4u_round(x: Tensor) -> Tensor:
    """``deq(Q4u(x))`` as float32."""
    groups = _groups(x, 32)
    exponent = ceil_log2(groups.abs().amax(-1, keepdim=True).clamp_min(6 * 2.0**-126) / E2M1_MAX)
    return (e2m1_round(groups * power_of_two(-exponent)) * power_of_two(exponent)).flatten(-2)


def q4e(x: Tensor) -> tuple[Tensor, Tensor]:
    """Main-KV FP4 quantiser: packed codes ``[..., n / 2]``, e4m3 scale codes ``[..., n / 16]`` (spec 0.2, ``Q4e``)."""
    groups = _groups(x, 16)
    largest = groups.abs().amax(-1, keepdim=True).clamp_min(E2M1_MAX * _E4M3_TINY)
    scale_codes = e4m3_encode((largest / E2M1_MAX).clamp_max(E4M3_MAX))
    inverse = e4m3_decode(scale_codes).reciprocal()  # float32, as the spec asks: not a division per element
    return e2m1_pack(e2m1_round(groups * inverse).flatten(-2)), scale_codes.squeeze(-1)


def q4e_decode(codes: Tensor, scales: Tensor) -> Tensor:
    """Float32 values of :func:`q4e` output."""
    return (e2m1_unpack(codes).unflatten(-1, (-1, 16)) * e4m3_decode(scales).unsqueeze(-1)).flatten(-2)
