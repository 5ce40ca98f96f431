"""Products in FP8 with one scale per row: what ``numerics="fast"`` multiplies many rows with.

Tensor cores take e4m3 codes and no scale per group, so both operands are brought to one power of two per row: of the
activations, and of the weights (one for the 32 rows of a tile). e4m3 is a float format: under powers of two it keeps
its three mantissa bits, and the model's own values, codes of groups of 32, are the same values with the scale of the
row. That holds down to 2**-6 of the row's scale, and the largest value is between 224 and 448 times the scale: so down
to 2**-13.8 of the largest, or 2**-14.8 at best. What lies below is rounded to a multiple of 2**-9 of the scale, with an
error of at most 2**-17.8 of the largest. Operands are thus nearly exact.
What differs from ``faithful`` is the accumulator: FP8 tensor cores add with about 14 bits. cuBLAS moves their sums to
float32 every few steps unless ``FAST_ACCUMULATION`` lets them run on.

Values that are not finite become NaN, and so does the row's result.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels import nvrtc
from deepinfer.kernels.formats.e4m3 import LARGEST, e4m3_row, q8_exponent
from deepinfer.kernels.formats.float32 import power_of_two

MIN_ROWS = 513
"""Fewer activation rows are multiplied as in ``faithful``."""
MIN_ROWS_OF_GROUPS = 3 * MIN_ROWS
"""The same for a product of several groups, each of which takes a launch: on an H200 ``wo_a`` takes 128 to 133 us for
513 to 1,536 rows of codes, in bf16 63 to 130 (``bench/gpu/check_dense.py --only long``)."""
MIN_OUTPUTS = 1024
"""Fewer outputs per group do not pay for the conversion of the activations: 3 bytes per value, against a gain of about
``2 * outputs`` operations at 770 instead of 1,200 TFLOP/s."""
FAST_ACCUMULATION = True
"""Sums of 1,280 to 8,192 columns are then off by 1.1e-4 of their magnitude (root mean square; 2e-5 without), the
rounding to bf16 behind them by up to 1.1e-3 and more; a layer's products of 8,192 rows, with conversions, take 2.45
instead of 2.73 ms (in bf16 3.94) on an H200 (``bench/gpu/check_row_scaled.py``)."""
_MOST_ABOVE = 7
"""A tile's scale is at most 2**7 times that of its rows: the kernel decodes times 2**120, and bf16 ends at 2**128."""


def accepts(num_outputs: int, num_inputs: int, groups: int) -> bool:
    """Whether the product takes the shape and gains by it."""
    per_group = num_outputs // groups
    return num_inputs % 16 == 0 and per_group % 16 == 0 and per_group >= MIN_OUTPUTS


def min_rows(groups: int) -> int:
    """Fewest activation rows that are multiplied in FP8."""
    return MIN_ROWS if groups == 1 else MIN_ROWS_OF_GROUPS


class RowScaledWeight:
    """Makes the operand of an FP8 weight, and keeps its scales.

    Args:
        packed, words: of :mod:`deepinfer.kernels.dense.packing`.
        shape: rows and columns of the weight that exist.
    """

    def __init__(self, packed: Tensor, words: Tensor, shape: tuple[int, int]) -> None:
        self.packed, self.words, self.shape = packed, words, shape
        self.row_bytes = block_scales(_largest_codes(packed), _scale_bytes(words))
        self.row_scales = scales_of_rows(self.row_bytes, shape[0])
        """float32 ``[N]``"""

    def codes(self) -> Tensor:
        """New e4m3 ``[N, K]``: times ``row_scales`` the weight."""
        (rows, columns), packed = self.shape, self.packed
        num_blocks = packed.shape[0] * packed.shape[1]
        codes = torch.empty(32 * packed.shape[0], columns, dtype=torch.float8_e4m3fn, device=packed.device)
        defines = {"K": columns, "ROW_SCALED": 1}
        kernel = nvrtc.load_kernel("dense_unpack.cu", "dense_unpack", defines, packed.device)
        kernel.launch((-(-num_blocks // 4), 1, 1), 128, (packed, self.words, codes, num_blocks, self.row_bytes))
        return codes[:rows]


class StoredRowScaledWeight:
    """The meaning of :class:`RowScaledWeight`, of a weight as it is stored; for devices without the CUDA kernels.

    Args:
        codes: uint8 ``[N, K]``; scales: uint8 ``[ceil(N / 32), ceil(K / 32)]``.
    """

    def __init__(self, codes: Tensor, scales: Tensor) -> None:
        self.stored = codes, scales
        rows, columns = codes.shape
        sizes = torch.nn.functional.pad(codes & 0x7F, (0, -columns % 32, 0, -rows % 32))
        self.row_bytes = block_scales(sizes.unflatten(0, (-1, 32)).unflatten(2, (-1, 32)).amax((1, 3)), scales)
        self.row_scales = scales_of_rows(self.row_bytes, rows)

    def codes(self) -> Tensor:
        codes, scales = self.stored
        rows, columns = codes.shape
        shift = (scales.int() - self.row_bytes.int()[:, None]).clamp_max(_MOST_ABOVE)  # a tile of zeros has any scale
        factors = torch.exp2(shift.float()).repeat_interleave(32, 0)[:rows].repeat_interleave(32, 1)[:, :columns]
        return (codes.view(torch.float8_e4m3fn).float() * factors).to(torch.float8_e4m3fn)


def _largest_codes(packed: Tensor) -> Tensor:
    """uint8 ``[block rows, columns / 32]``: the largest code, without its sign, of every 32x32 tile of a weight."""
    halves = (packed & 0x7F).view(*packed.shape[:2], 128, 2, 8)  # a lane's 8 bytes of each column half
    return halves.amax((2, 4)).flatten(1)


def _scale_bytes(words: Tensor) -> Tensor:
    """uint8 ``[block rows, columns / 32]`` of ``packing.pack_scales``."""
    fields = torch.stack((words & 0xFFFF, words >> 16), dim=-1).flatten(1) >> 7
    return (fields - 120).clamp_min(0).to(torch.uint8)


def block_scales(largest: Tensor, scales: Tensor) -> Tensor:
    """The scale that 32 rows share, from those of their 32x32 tiles.

    The smallest under which no code exceeds 448, but at most 2**7 below a tile's own. 1 for zeros.

    Args:
        largest: uint8 ``[block rows, tiles]``, the largest code without its sign; scales: uint8, the same shape.
    Returns:
        uint8 ``[block rows]``, ue8m0.
    """
    values = torch.arange(128, dtype=torch.uint8, device=scales.device).view(torch.float8_e4m3fn).float()
    values[127] = 480.0  # the kernels know no NaN
    sizes = values[largest.int()].double() * torch.exp2(scales.double() - 127)
    fraction, exponent = torch.frexp(sizes.amax(1))
    fitting = exponent - 9 + (fraction > 0.875) + 127  # 448 is 0.875 * 2**9
    closest = torch.where(largest > 0, scales.int(), 0).amax(1) - _MOST_ABOVE
    found = torch.where(fraction == 0, 127, torch.maximum(fitting, closest).clamp(0, 254))
    return found.to(torch.uint8)


def scales_of_rows(row_bytes: Tensor, rows: int) -> Tensor:
    """float32 ``[rows]`` of one scale byte for every 32 rows."""
    return torch.exp2(row_bytes.float() - 127).repeat_interleave(32)[:rows].contiguous()


@triton.jit
def _row_codes_kernel(
    x_ptr, codes_ptr, scales_ptr, k, x_stride, QUANTIZE: tl.constexpr, GROUPS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, GROUPS)[:, None] * 32 + tl.arange(0, 32)[None, :]
    inside = columns < k
    x = tl.load(x_ptr + row * x_stride + columns, inside, other=0.0).to(tl.float32)
    if QUANTIZE:
        own = q8_exponent(tl.minimum(tl.max(tl.abs(x), axis=1), LARGEST))
        scaled = x * tl.expand_dims(power_of_two(-own), 1)
        x = scaled.to(tl.float8e4nv).to(tl.float32) * tl.expand_dims(power_of_two(own), 1)
    codes, exponent = e4m3_row(x)
    tl.store(codes_ptr + row * k + columns, codes, inside)
    tl.store(scales_ptr + row, power_of_two(exponent))


def row_codes(
    x: Tensor, quantize: bool = False, num_warps: int | None = None, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Activations as e4m3 codes of one scale per row.

    Args:
        x: bf16 ``[rows, k]``; rows may be strided.
        quantize: round by Q8 in groups of 32 first (``k`` is a multiple of 32).
        num_warps: of a row, by default one for every 1,024 columns. No influence on the result.
        out: uint8 ``[rows, k]`` and float32 ``[rows]``, dense, get the result.
    Returns:
        e4m3 ``[rows, k]`` and float32 ``[rows]``, the smallest power of two under which no code exceeds 448, at least
        that of the largest magnitude 1e-4, as in Q8.
    """
    rows, k = x.shape
    assert x.stride(1) == 1
    assert not quantize or k % 32 == 0
    if out is None:
        out = RowCodes.empty(1, rows, k, x.device).of_group(0)
    codes, scales = out[0].view(torch.uint8), out[1]
    groups = triton.next_power_of_2(triton.cdiv(k, 32))
    _row_codes_kernel[(rows,)](
        x, codes, scales, k, x.stride(0), QUANTIZE=quantize, GROUPS=groups,
        num_warps=num_warps or min(16, max(1, groups // 32)),
    )  # fmt: skip
    return codes.view(torch.float8_e4m3fn), scales


@dataclass(frozen=True, slots=True)
class RowCodes:
    """Activations that their maker leaves as :func:`row_codes` would make them, for every group of a product."""

    codes: Tensor
    """uint8 ``[groups, rows, k]``, e4m3."""
    scales: Tensor
    """float32 ``[groups, rows]``, each group's aligned to 16 bytes."""

    @classmethod
    def empty(cls, groups: int, rows: int, k: int, device: torch.device) -> RowCodes:
        """Room for them."""
        codes = torch.empty(groups, rows, k, dtype=torch.uint8, device=device)
        scales = torch.empty(groups, -(-rows // 4) * 4, dtype=torch.float32, device=device)
        return cls(codes, scales[:, :rows])

    @classmethod
    def of(cls, x: Tensor, groups: int = 1) -> RowCodes:
        """Of bf16 ``[rows, groups * k]``, where whoever made it could not leave codes."""
        parts = x.chunk(groups, dim=1)
        made = cls.empty(groups, len(x), parts[0].shape[1], x.device)
        for group, part in enumerate(parts):
            row_codes(part, out=(made.codes[group], made.scales[group]))
        return made

    def __len__(self) -> int:
        return self.scales.shape[1]

    def of_group(self, group: int) -> tuple[Tensor, Tensor]:
        """e4m3 ``[rows, k]`` and float32 ``[rows]``, as :func:`row_codes` returns them."""
        return self.codes[group].view(torch.float8_e4m3fn), self.scales[group]

    def of_rows(self, rows: Tensor) -> RowCodes:
        """The same for some rows, ``[kept]`` int64."""
        made = RowCodes.empty(len(self.codes), len(rows), self.codes.shape[2], rows.device)
        made.codes.copy_(self.codes[:, rows])
        made.scales.copy_(self.scales[:, rows])
        return made


def product(x: tuple[Tensor, Tensor], weight: tuple[Tensor, Tensor], out: Tensor) -> None:
    """``out = x @ weight.T`` of codes with scales of rows, rounded once.

    Args:
        x: e4m3 ``[rows, K]`` and float32 ``[rows]``.
        weight: e4m3 ``[N, K]`` and float32 ``[N]``.
        out: bf16 or float32 ``[rows, N]``; rows may be strided.
    """
    if out.is_cuda:
        library_product(x, weight, out)
    else:
        (codes, scales), (weight_codes, weight_scales) = x, weight
        out.copy_((codes.float() * scales[:, None]) @ (weight_codes.float() * weight_scales[:, None]).t())


def library_product(x: tuple[Tensor, Tensor], weight: tuple[Tensor, Tensor], out: Tensor) -> None:
    """:func:`product` by cuBLAS, which on Hopper multiplies its sums by the scales of both rows."""
    torch._scaled_mm(
        x[0],
        weight[0].t(),
        scale_a=x[1][:, None],
        scale_b=weight[1][None],
        out_dtype=out.dtype,
        use_fast_accum=FAST_ACCUMULATION,
        out=out,
    )
