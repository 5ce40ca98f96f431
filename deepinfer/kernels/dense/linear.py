"""Products with stored weights on the GPU: FP8 (spec 0.2 ``FP8LIN``) and bf16 (``BF16LIN``), chosen by rows.

Meaning: :func:`deepinfer.ops.linear.linear` and ``grouped_linear`` for inputs that Q8 has rounded already. FP8 weights
times powers of two and rounded activations are exact in bf16, so every path multiplies exact values on bf16 tensor
cores, sums in float32 and rounds once.

- few rows: reads the packed weights once, activations in registers and shared memory (``dense_skinny.cu``);
- tens to hundreds, and up to 2,048 in some shapes: decodes the weights on the way into ``wgmma`` (``dense_wgmma.cu``);
- more: FP8 weights are widened into a scratch matrix and multiplied by cuBLAS; with ``is_fast`` they stay FP8 there,
  and cuBLAS multiplies in FP8 (:mod:`deepinfer.kernels.dense.row_scaled`);
- other devices and the interpreter: Triton.

:mod:`deepinfer.kernels.dense.plans` has the limits between them. Within one of its steps, and in Triton, a row's
result does not depend on the other rows, nor on their number; between steps the order of summation may change. cuBLAS
may choose its order by the number of rows. With ``invariant`` the path is the same for every number of rows: ``wgmma``
where it takes the shape, the few-row kernel (in passes) elsewhere.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from deepinfer.kernels import nvrtc
from deepinfer.kernels.dense import linear_triton, packing, plans, row_scaled
from deepinfer.kernels.dense.row_scaled import RowCodes
from deepinfer.kernels.dense.skinny_cuda import PASSES_OF_64, Geometry, SkinnyProduct
from deepinfer.kernels.dense.wgmma_cuda import WgmmaProduct

BESIDE_ROWS = 4
"""Above, the shared expert's second product and the index weights run beside the kernel before them, since their input
is older: measured on an H200, it saves 3 us per layer at 8 rows and costs 2 at 1 row, where that kernel leaves no room
beside it."""
_MB = 2**20
FEW_ROWS = 16
"""Up to here bf16 weights take the few-row kernel in its usual tiles, above in passes of 64 rows."""
PASSES = ((2 * _MB, 512), (32 * _MB, 32))
"""(most bytes of a weight, most rows) of bf16 products in passes. Above, cuBLAS is faster; below, it needs a second
kernel for the sums of its slices, and neither overlaps the kernels around it."""


def stack_fp8(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Codes and scales of matrices that share an input, one below the other (each with a multiple of 32 rows)."""
    assert all(codes.shape[0] % 32 == 0 for codes, _ in parts), "a tile would straddle two matrices"
    return torch.cat([codes for codes, _ in parts]), torch.cat([scales for _, scales in parts])


class Fp8Linear:
    """An FP8 weight on the device, ready to multiply.

    Args:
        codes: ``[N, K]`` uint8 (or float8_e4m3fn) on the target device. With ``groups`` the rows of each group follow
            each other, and group ``g`` multiplies the ``g``-th part of the input.
        scales: ``[ceil(N / 32), ceil(K / 32)]`` uint8, one ue8m0 byte per 32x32 tile.
        groups: 1, or the output groups of ``wo_a``; ``N / groups`` is a multiple of 32.
        plan: kernels by number of rows, default by shape.
        is_fast: many rows may be multiplied in FP8.
    """

    _row_scaled: row_scaled.RowScaledWeight | row_scaled.StoredRowScaledWeight | None = None
    """Where many rows are multiplied in FP8."""

    def __init__(
        self,
        codes: Tensor,
        scales: Tensor,
        *,
        groups: int = 1,
        plan: Sequence[plans.Step] | None = None,
        is_fast: bool = False,
    ) -> None:
        self.num_outputs, self.num_inputs = codes.shape
        self.groups = groups
        assert groups == 1 or self.num_outputs % (32 * groups) == 0, (codes.shape, groups)
        codes, scales = codes.view(torch.uint8).contiguous(), scales.view(torch.uint8).contiguous()
        self._packed: tuple[Tensor, Tensor] | None = None
        self._stored: tuple[Tensor, Tensor] | None = None
        if nvrtc.is_available(codes.device) and int(scales.max()) <= packing.MAX_SCALE_BYTE:
            self._use_packed(packing.pack_fp8(codes), packing.pack_scales(scales), plan)
            torch.cuda.synchronize(codes.device)  # overlapped launches read the weights without waiting for anything
        else:
            self._stored = codes, scales
        self.use_fast(is_fast)

    def use_fast(self, is_fast: bool) -> None:
        """Whether many rows may be multiplied in FP8 from now on; ``invariant`` products never are."""
        self._row_scaled = None
        if not is_fast or not row_scaled.accepts(self.num_outputs, self.num_inputs, self.groups):
            return
        if self._stored is not None:
            self._row_scaled = row_scaled.StoredRowScaledWeight(*self._stored)
        else:
            assert self._packed is not None
            self._row_scaled = row_scaled.RowScaledWeight(*self._packed, (self.num_outputs, self.num_inputs))

    def _use_packed(self, packed: Tensor, words: Tensor, plan: Sequence[plans.Step] | None) -> None:
        self._packed = packed, words
        shape = self.num_outputs, self.num_inputs
        steps = plans.plan(*shape, self.groups) if plan is None else plan
        self._steps: list[tuple[int, SkinnyProduct | WgmmaProduct]] = []
        self._partial: dict[int, WgmmaProduct] = {}  # by max_rows of its step
        takes_wgmma = WgmmaProduct.accepts(shape, self.groups)
        slices = [step.slices for step in steps if isinstance(step, plans.Many)]
        for step in steps:
            if isinstance(step, plans.Few):
                few = SkinnyProduct(packed, words, shape, self.groups, step.geometry, step.pipelines)
                self._steps.append((step.max_rows, few))
            elif takes_wgmma:
                many = WgmmaProduct(packed, words, shape, self.groups, step.slices, step.tiles)
                self._steps.append((step.max_rows, many))
                if step.leaves_partial:
                    apart = WgmmaProduct(packed, words, shape, self.groups, step.slices, step.tiles, partial=True)
                    self._partial[step.max_rows] = apart
        self._invariant: SkinnyProduct | WgmmaProduct
        if takes_wgmma:
            self._invariant = WgmmaProduct(packed, words, shape, self.groups, slices[0] if slices else None)
        else:
            self._invariant = SkinnyProduct(packed, words, shape, self.groups)

    @property
    def num_bytes(self) -> int:
        """Device memory that the weight holds."""
        tensors = self._stored or self._packed or ()
        return sum(t.numel() * t.element_size() for t in tensors)

    def forward(
        self,
        xq: Tensor | RowCodes,
        out: Tensor | None = None,
        *,
        quantize_input: bool = False,
        quantize_output: bool = False,
        dtype: torch.dtype = torch.bfloat16,
        invariant: bool = False,
        overlap: bool = False,
        beside: bool = False,
    ) -> Tensor:
        """``xq @ weight.T``, rounded once.

        Args:
            xq: bf16 ``[rows, K]``, or ``[rows, groups, K]`` (also flat); rows may be strided (a multiple of 8), aligned
                to 16 bytes. Or its codes, where :meth:`takes_codes`.
            out: ``[rows, N]`` contiguous, optional; its dtype wins over ``dtype``.
            quantize_input: round ``xq`` by Q8 in groups of 32 along K first, where :meth:`can_quantize_input`.
            quantize_output: round the bf16 result by Q8 in groups of 32 along N; bf16 values.
            dtype: bf16 or float32.
            invariant: the same order of summation for every number of rows.
            overlap: programmatic dependent launch: the weight loads begin before the preceding kernel has ended. By
                the rule in :mod:`deepinfer.kernels.nvrtc` that is safe after any kernel that did not make the weights.
            beside: with ``overlap``: multiply while the preceding kernel runs. What made ``xq`` must have ended when
                this one begins: see :mod:`deepinfer.kernels.nvrtc`.
        """
        rows = len(xq)
        if out is None:
            device = xq.codes.device if isinstance(xq, RowCodes) else xq.device
            out = torch.empty(rows, self.num_outputs, dtype=dtype, device=device)
        is_fast = self.takes_codes(rows, invariant=invariant)
        assert is_fast or not quantize_input
        if rows == 0:
            return out
        if isinstance(xq, RowCodes):
            assert is_fast, f"{rows} rows are not multiplied in FP8"
            assert not quantize_input
            assert xq.codes.shape == (self.groups, rows, self.num_inputs), xq.codes.shape
            self._multiply_codes(map(xq.of_group, range(self.groups)), out, quantize_output)
            return out
        x = xq.flatten(1) if xq.dim() > 2 else xq
        assert x.shape[1] == self.groups * self.num_inputs, (x.shape, self.groups, self.num_inputs)
        beside &= overlap
        if is_fast:
            # One group at a time: the L2 may still hold the codes that were made last.
            parts = (x[:, columns] for _, columns in self._group_parts())
            self._multiply_codes((row_scaled.row_codes(part, quantize_input) for part in parts), out, quantize_output)
        elif self._stored is not None:
            linear_triton.product(x, *self._stored, out, self.groups, quantize_output)
        elif invariant:
            self._invariant(x, out, quantize_output, overlap, beside)
        elif (product := self._product(rows)) is not None:
            product(x, out, quantize_output, overlap, beside)
        else:
            self._many_rows(x, out, quantize_output)
        return out

    __call__ = forward

    def can_quantize_input(self, rows: int, *, invariant: bool = False) -> bool:
        """Whether the product of ``rows`` rows converts its input anyway, so that it can round it for nothing."""
        return self.takes_codes(rows, invariant=invariant) and self.num_inputs % 32 == 0

    def takes_codes(self, rows: int, *, invariant: bool = False) -> bool:
        """Whether ``rows`` rows are multiplied in FP8, so that their input may be given as codes."""
        return self._row_scaled is not None and not invariant and rows >= row_scaled.min_rows(self.groups)

    def partial_sums(self, xq: Tensor, *, overlap: bool = False) -> Tensor | None:
        """``[slices, rows, N]`` float32, where the plan finds it faster to leave their addition to the reader.

        Added in this order and rounded once to bf16 they are what :meth:`forward` returns.

        Args:
            xq, overlap: as of :meth:`forward`.
        """
        if self._packed is None or not self._partial:
            return None
        rows = xq.shape[0]
        product = self._partial.get(next((most for most, _ in self._steps if rows <= most), 0)) if rows else None
        if product is None:
            return None
        x = xq.flatten(1) if xq.dim() > 2 else xq
        assert x.shape[1] == self.groups * self.num_inputs, (x.shape, self.groups, self.num_inputs)
        sums = torch.empty(product.slices, rows, self.num_outputs, dtype=torch.float32, device=x.device)
        product(x, sums, False, overlap)
        return sums

    def _product(self, rows: int) -> SkinnyProduct | WgmmaProduct | None:
        """The kernel that reads packed weights, None for widening."""
        return next((product for max_rows, product in self._steps if rows <= max_rows), None)

    def _many_rows(self, x: Tensor, out: Tensor, quantize_output: bool) -> None:
        wide = self.widen()
        for part, columns in self._group_parts():
            _cublas(x[:, columns], wide[part], out[:, part])
        if quantize_output:
            linear_triton.q8_round_(out)

    def _multiply_codes(self, inputs: Iterable[tuple[Tensor, Tensor]], out: Tensor, quantize_output: bool) -> None:
        """Codes and scales of every group's input."""
        assert self._row_scaled is not None
        codes, scales = self._row_scaled.codes(), self._row_scaled.row_scales
        for x, (part, _) in zip(inputs, self._group_parts(), strict=True):
            row_scaled.product(x, (codes[part], scales[part]), out[:, part])
        if quantize_output:
            linear_triton.q8_round_(out)

    def _group_parts(self) -> Iterator[tuple[slice, slice]]:
        """Rows of the weight and columns of the input of every group."""
        outputs, inputs = self.num_outputs // self.groups, self.num_inputs
        for group in range(self.groups):
            yield slice(group * outputs, (group + 1) * outputs), slice(group * inputs, (group + 1) * inputs)

    def widen(self) -> Tensor:
        """The exact weight as a new bf16 ``[N, K]``."""
        if self._stored is not None:
            return _widen_stored(*self._stored)
        assert self._packed is not None
        packed, words = self._packed
        num_blocks = packed.shape[0] * packed.shape[1]
        wide = torch.empty(32 * packed.shape[0], self.num_inputs, dtype=torch.bfloat16, device=packed.device)
        defines = {"K": self.num_inputs, "ROW_SCALED": 0}
        kernel = nvrtc.load_kernel("dense_unpack.cu", "dense_unpack", defines, packed.device)
        kernel.launch((-(-num_blocks // 4), 1, 1), 128, (packed, words, wide, num_blocks, ctypes.c_void_p()))
        return wide[: self.num_outputs]


class GroupedFp8Linear(Fp8Linear):
    """One FP8 product per output group (spec 4.8, ``wo_a``): ``[rows, groups, K]`` to ``[rows, groups * n]``.

    Args:
        codes: ``[groups * n, K]`` as stored.
    """

    def __init__(
        self,
        codes: Tensor,
        scales: Tensor,
        groups: int,
        *,
        plan: Sequence[plans.Step] | None = None,
        is_fast: bool = False,
    ) -> None:
        super().__init__(codes, scales, groups=groups, plan=plan, is_fast=is_fast)


class Bf16Linear:
    """A bf16 weight on the device. cuBLAS for many rows; for few, where it is slow on small weights, our kernel.

    Args:
        weight: ``[N, K]`` bf16; kept as it is (a view stays a view).
        skinny: keep a packed copy for the few-row kernel; default where the weight is below 32 MB.
    """

    def __init__(self, weight: Tensor, *, skinny: bool | None = None, geometry: Geometry | None = None) -> None:
        self.num_outputs, self.num_inputs = weight.shape
        self.weight = weight
        self._skinny: SkinnyProduct | None = None
        num_bytes = weight.numel() * 2
        self._max_rows = next((rows for most, rows in PASSES if num_bytes <= most), 0)
        if skinny is None:
            skinny = num_bytes < 32 * _MB
        if skinny and nvrtc.is_available(weight.device) and weight.shape[1] % 8 == 0:
            packed, shape = packing.pack_bf16(weight), (self.num_outputs, self.num_inputs)
            self._skinny = SkinnyProduct(packed, None, shape, geometry=geometry)
            self._passes = SkinnyProduct(
                packed, None, shape, geometry=self._skinny.geometry.of_passes(packed.shape[0]), pipelines=PASSES_OF_64
            )
            torch.cuda.synchronize(weight.device)  # see Fp8Linear

    def forward(
        self,
        x: Tensor,
        out: Tensor | None = None,
        *,
        dtype: torch.dtype = torch.bfloat16,
        invariant: bool = False,
        overlap: bool = False,
        beside: bool = False,
    ) -> Tensor:
        """``x @ weight.T`` for bf16 ``[rows, K]``, summed in float32; arguments as :meth:`Fp8Linear.forward`.

        ``invariant`` holds where the few-row kernel exists; cuBLAS chooses its own order by shape.
        """
        rows = x.shape[0]
        if out is None:
            out = torch.empty(rows, self.num_outputs, dtype=dtype, device=x.device)
        if rows == 0:
            return out
        if self._skinny is not None and (rows <= self._max_rows or invariant):
            product = self._skinny if rows <= FEW_ROWS else self._passes  # the same bits
            product(x, out, False, overlap, beside and overlap)
        elif x.is_cuda:
            _cublas(x, self.weight, out)
        else:
            linear_triton.product(x, self.weight, None, out)
        return out

    __call__ = forward


def _cublas(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """``out = x @ weight.T`` with one rounding: cuBLAS must not add partial sums in bf16."""
    with _full_precision_reduction():
        if out.dtype == torch.float32:
            torch.mm(x, weight.t(), out_dtype=torch.float32, out=out)
        else:
            torch.mm(x, weight.t(), out=out)


class _full_precision_reduction:  # noqa: N801
    def __enter__(self) -> None:
        self._before = torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False

    def __exit__(self, *_: object) -> None:
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = self._before


@functools.cache
def _e4m3_values(device: torch.device) -> Tensor:
    return torch.arange(256, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn).to(torch.bfloat16)


def _widen_stored(codes: Tensor, scales: Tensor) -> Tensor:
    rows, columns = codes.shape
    factors = torch.exp2(scales.to(torch.float32) - 127).to(torch.bfloat16)
    factors = factors.repeat_interleave(32, 0)[:rows].repeat_interleave(32, 1)[:, :columns]
    return _e4m3_values(codes.device)[codes.int()] * factors
