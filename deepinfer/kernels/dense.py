"""Products with stored weights on the GPU: FP8 (spec 0.2 ``FP8LIN``) and bf16 (``BF16LIN``), chosen by rows.

Meaning: :func:`deepinfer.ops.linear.linear` and ``grouped_linear`` for inputs that Q8 has rounded already. FP8 weights
times powers of two and rounded activations are exact in bf16, so every path multiplies exact values on bf16 tensor
cores, sums in float32 and rounds once.

- up to ``MAX_SKINNY_ROWS``: CUDA C++ that reads the packed weights once (``dense_skinny.cu``);
- more: FP8 weights are widened into a scratch matrix and multiplied by cuBLAS;
- other devices and the interpreter: Triton.

A row's result depends on the path and not on the other rows. With ``invariant`` the path is the same for every number
of rows: the few-row kernel, in passes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.kernels import dense_packing, dense_triton, nvrtc

MAX_SKINNY_ROWS = 32
"""Most rows that go to the few-row kernel by default: above it is no longer bound by reading the weights."""
_MAX_SHARED_BYTES = 227 * 1024
_NUM_SMS = 132
_MAX_SLICE = 1536
"""Most columns of one CTA: 8 activation rows take 24 KB of shared memory, so several CTAs fit an SM."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """How the few-row kernel cuts a weight. Depends on the shape alone: it fixes the order of summation."""

    row_warps: int
    """Warps along the weight rows, 32 rows each."""
    k_warps: int
    """Warps along the columns within a CTA."""
    cluster: int
    """CTAs along the columns."""

    @property
    def threads(self) -> int:
        return 32 * self.row_warps * self.k_warps


@dataclass(frozen=True, slots=True)
class Pipeline:
    """What may differ by the number of rows without changing a result."""

    row_tiles: int
    """Tiles of 8 activation rows per pass."""
    depth: int
    """Packed blocks that each warp has in flight."""
    min_ctas: int
    """CTAs per SM that the compiler leaves registers for."""
    load_hint: int = 0
    """0: no hint; 1: prefetch 256 bytes into L2; 2: evict first."""


PIPELINES = (Pipeline(1, 4, 4), Pipeline(2, 4, 4), Pipeline(4, 3, 3), Pipeline(8, 2, 2))


def choose_geometry(block_rows: int, chunks: int, group_block_rows: int, max_chunks: int) -> Geometry:
    """Enough CTAs to cover the GPU twice, at least four chunks for each, and an input slice that fits shared memory.

    Args:
        block_rows: rows of 32 weight rows.
        chunks: packed blocks along the columns.
        group_block_rows: block rows that share an input.
        max_chunks: most chunks per CTA.
    """
    row_warps = 2 if group_block_rows % 2 == 0 and block_rows >= 2 * _NUM_SMS // 8 else 1
    tiles = -(-block_rows // row_warps)
    cluster = 1
    while cluster < 8 and (chunks > max_chunks * cluster or (tiles * cluster < 2 * _NUM_SMS and chunks >= 8 * cluster)):
        cluster *= 2
    num_ctas = tiles * cluster
    k_warps = 2 if num_ctas >= 2 * _NUM_SMS or row_warps == 2 else 4
    return Geometry(row_warps, k_warps, cluster)


class SkinnyProduct:
    """The few-row kernel for one packed weight.

    Args:
        packed: ``[block rows, chunks, ...]`` of :mod:`deepinfer.kernels.dense_packing`.
        scales: packed scales of FP8 weights, None for bf16.
        shape: rows and columns of the weight that exist.
        pipelines: by rising number of rows.
    """

    def __init__(
        self,
        packed: Tensor,
        scales: Tensor | None,
        shape: tuple[int, int],
        groups: int = 1,
        geometry: Geometry | None = None,
        pipelines: Sequence[Pipeline] = PIPELINES,
    ) -> None:
        self.packed, self.scales = packed, scales
        self.rows_out, self.columns = shape
        self.groups = groups
        self.chunks = packed.shape[1]
        self.block_k = dense_packing.FP8_COLUMNS if scales is not None else dense_packing.BF16_COLUMNS
        group_block_rows = packed.shape[0] // groups
        self.geometry = geometry or choose_geometry(
            packed.shape[0], self.chunks, group_block_rows, 1280 // self.block_k
        )
        self.pipelines = [p for p in pipelines if self.shared_bytes(p) <= _MAX_SHARED_BYTES]
        assert self.pipelines, f"{shape}: the input slice of a CTA does not fit shared memory with {self.geometry}"

    def shared_bytes(self, pipeline: Pipeline) -> int:
        g, rows = self.geometry, 8 * pipeline.row_tiles
        units = -(-rows * g.row_warps // g.cluster)
        max_chunks = -(-self.chunks // g.cluster)
        return g.cluster * g.k_warps * units * 128 + rows * (max_chunks * self.block_k * 2 + 16)

    def defines(self, pipeline: Pipeline, float32: bool, quantize: bool, overlap: bool) -> dict[str, int]:
        """Compile-time constants of ``dense_skinny.cu``."""
        g, padded = self.geometry, 32 * self.packed.shape[0]
        return {
            "N": padded, "OUT_N": self.rows_out, "K": self.columns, "GROUP_N": padded // self.groups,
            "WM": g.row_warps, "WK": g.k_warps, "CLUSTER": g.cluster,
            "NT": pipeline.row_tiles, "DEPTH": pipeline.depth, "MIN_CTAS": pipeline.min_ctas,
            "LOAD_HINT": pipeline.load_hint, "FP8": int(self.scales is not None),
            "OUT_F32": int(float32), "QUANTIZE": int(quantize), "PDL": int(overlap),
        }  # fmt: skip

    def kernel(self, pipeline: Pipeline, float32: bool, quantize: bool, overlap: bool) -> nvrtc.Kernel:
        defines, shared = self.defines(pipeline, float32, quantize, overlap), self.shared_bytes(pipeline)
        return nvrtc.load_kernel("dense_skinny.cu", "dense_skinny", defines, self.packed.device, shared_bytes=shared)

    def __call__(self, x: Tensor, out: Tensor, quantize: bool, overlap: bool) -> None:
        rows, g = x.shape[0], self.geometry
        pipeline = next((p for p in self.pipelines if rows <= 8 * p.row_tiles), self.pipelines[-1])
        tiles = -(-self.packed.shape[0] // g.row_warps)
        grid = (tiles * g.cluster, -(-rows // (8 * pipeline.row_tiles)), 1)
        scales = self.packed if self.scales is None else self.scales
        arguments = (self.packed, scales, x, out, rows, nvrtc.int64(x.stride(0)))
        self.kernel(pipeline, out.dtype == torch.float32, quantize, overlap).launch(
            grid, g.threads, arguments, shared_bytes=self.shared_bytes(pipeline), cluster=g.cluster, overlap=overlap
        )


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
        geometry: of the few-row kernel, default by shape.
    """

    def __init__(self, codes: Tensor, scales: Tensor, *, groups: int = 1, geometry: Geometry | None = None) -> None:
        self.num_outputs, self.num_inputs = codes.shape
        self.groups = groups
        assert groups == 1 or self.num_outputs % (32 * groups) == 0, (codes.shape, groups)
        codes, scales = codes.view(torch.uint8).contiguous(), scales.view(torch.uint8).contiguous()
        self._skinny: SkinnyProduct | None = None
        self._stored: tuple[Tensor, Tensor] | None = None
        if nvrtc.is_available(codes.device) and int(scales.max()) <= dense_packing.MAX_SCALE_BYTE:
            packed, words = dense_packing.pack_fp8(codes), dense_packing.pack_scales(scales)
            self._skinny = SkinnyProduct(packed, words, (self.num_outputs, self.num_inputs), groups, geometry)
        else:
            self._stored = codes, scales

    @property
    def num_bytes(self) -> int:
        """Device memory that the weight holds."""
        tensors = self._stored or (self._skinny.packed, self._skinny.scales)  # type: ignore[union-attr]
        return sum(t.numel() * t.element_size() for t in tensors if t is not None)

    def forward(
        self,
        xq: Tensor,
        out: Tensor | None = None,
        *,
        quantize_output: bool = False,
        dtype: torch.dtype = torch.bfloat16,
        invariant: bool = False,
        overlap: bool = False,
    ) -> Tensor:
        """``xq @ weight.T``, rounded once.

        Args:
            xq: bf16 ``[rows, K]``, or ``[rows, groups, K]`` (also flat); rows may be strided (a multiple of 8), aligned
                to 16 bytes.
            out: ``[rows, N]`` contiguous, optional; its dtype wins over ``dtype``.
            quantize_output: round the bf16 result by Q8 in groups of 32 along N; bf16 values.
            dtype: bf16 or float32.
            invariant: the same order of summation for every number of rows.
            overlap: programmatic dependent launch of the few-row kernel: its weight loads begin before the preceding
                kernel has ended.
        """
        rows = xq.shape[0]
        x = xq.flatten(1) if xq.dim() > 2 else xq
        assert x.shape[1] == self.groups * self.num_inputs, (x.shape, self.groups, self.num_inputs)
        if out is None:
            out = torch.empty(rows, self.num_outputs, dtype=dtype, device=x.device)
        if rows == 0:
            return out
        if self._stored is not None:
            dense_triton.product(x, *self._stored, out, self.groups, quantize_output)
        elif rows <= MAX_SKINNY_ROWS or invariant:
            assert self._skinny is not None
            self._skinny(x, out, quantize_output, overlap)
        else:
            self._many_rows(x, out, quantize_output)
        return out

    __call__ = forward

    def _many_rows(self, x: Tensor, out: Tensor, quantize_output: bool) -> None:
        wide = self.widen()
        group_n = self.num_outputs // self.groups
        for group in range(self.groups):
            part = slice(group * group_n, (group + 1) * group_n)
            columns = slice(group * self.num_inputs, (group + 1) * self.num_inputs)
            _cublas(x[:, columns], wide[part], out[:, part])
        if quantize_output:
            dense_triton.q8_round_(out)

    def widen(self) -> Tensor:
        """The exact weight as a new bf16 ``[N, K]``."""
        if self._stored is not None:
            return _widen_stored(*self._stored)
        assert self._skinny is not None
        packed, words = self._skinny.packed, self._skinny.scales
        num_blocks = packed.shape[0] * packed.shape[1]
        wide = torch.empty(32 * packed.shape[0], self.num_inputs, dtype=torch.bfloat16, device=packed.device)
        kernel = nvrtc.load_kernel("dense_unpack.cu", "dense_unpack", {"K": self.num_inputs}, packed.device)
        kernel.launch((-(-num_blocks // 4), 1, 1), 128, (packed, words, wide, num_blocks))
        return wide[: self.num_outputs]

    def prepare(self, *, quantize_output: bool = False, dtype: torch.dtype = torch.bfloat16) -> None:
        """Compile and load what :meth:`forward` may launch, ahead of graph capture."""
        if self._skinny is not None:
            for pipeline in self._skinny.pipelines:
                for overlap in (False, True):
                    self._skinny.kernel(pipeline, dtype == torch.float32, quantize_output, overlap)
            nvrtc.load_kernel("dense_unpack.cu", "dense_unpack", {"K": self.num_inputs}, self._skinny.packed.device)


class GroupedFp8Linear(Fp8Linear):
    """One FP8 product per output group (spec 4.8, ``wo_a``): ``[rows, groups, K]`` to ``[rows, groups * n]``.

    Args:
        codes: ``[groups * n, K]`` as stored.
    """

    def __init__(self, codes: Tensor, scales: Tensor, groups: int, *, geometry: Geometry | None = None) -> None:
        super().__init__(codes, scales, groups=groups, geometry=geometry)


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
        if skinny is None:
            skinny = weight.numel() * 2 < 32 * 2**20
        if skinny and nvrtc.is_available(weight.device) and weight.shape[1] % 8 == 0:
            packed = dense_packing.pack_bf16(weight)
            self._skinny = SkinnyProduct(packed, None, (self.num_outputs, self.num_inputs), geometry=geometry)

    def forward(
        self,
        x: Tensor,
        out: Tensor | None = None,
        *,
        dtype: torch.dtype = torch.bfloat16,
        invariant: bool = False,
        overlap: bool = False,
    ) -> Tensor:
        """``x @ weight.T`` for bf16 ``[rows, K]``, summed in float32; arguments as :meth:`Fp8Linear.forward`.

        ``invariant`` holds where the few-row kernel exists; cuBLAS chooses its own order by shape.
        """
        rows = x.shape[0]
        if out is None:
            out = torch.empty(rows, self.num_outputs, dtype=dtype, device=x.device)
        if rows == 0:
            return out
        if self._skinny is not None and (rows <= MAX_SKINNY_ROWS or invariant):
            self._skinny(x, out, False, overlap)
        elif x.is_cuda:
            _cublas(x, self.weight, out)
        else:
            dense_triton.product(x, self.weight, None, out)
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
