"""Launcher of ``dense_skinny.cu``: products with few activation rows, bound by reading the weights once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.kernels import nvrtc
from deepinfer.kernels.dense import packing

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

    def of_passes(self, block_rows: int) -> Geometry:
        """The same order of summation with two warps of weight rows instead of one, if ``block_rows`` are enough: for
        tens of activation rows, which weigh as much as the weights."""
        return Geometry(min(2, block_rows) if self.row_warps == 1 else self.row_warps, self.k_warps, self.cluster)


@dataclass(frozen=True, slots=True)
class Pipeline:
    """What may differ by the number of rows without changing a result."""

    row_tiles: int
    """Tiles of 8 activation rows per pass."""
    depth: int
    """Packed blocks that each warp has in flight, at least 2 with ``ring``."""
    min_ctas: int
    """CTAs per SM that the compiler leaves registers for."""
    load_hint: int = 0
    """0: no hint; 1: prefetch 256 bytes into L2; 2: evict first."""
    ring: bool = False
    """Blocks in flight are in shared memory, not in registers."""
    early: bool = False
    """The next kernel may start beside this one, not only when it has read its weights."""


PIPELINES = (Pipeline(1, 4, 4), Pipeline(2, 4, 4), Pipeline(4, 3, 3), Pipeline(8, 2, 2))
PASSES_OF_64 = (Pipeline(4, 3, 2), Pipeline(8, 3, 1))


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


def equal_shares(block_rows: int, chunks: int, group_block_rows: int, num_ctas: int = _NUM_SMS) -> list[Geometry]:
    """Geometries for :attr:`Pipeline.ring` with at most ``num_ctas`` CTAs, one per SM, by the largest share of a CTA.

    A CTA's share is a rectangle of packed blocks. With the released shapes 128 of 132 SMs get equal rectangles.
    """
    found: list[tuple[int, int, Geometry]] = []
    for cluster in (1, 2, 4, 8):
        for row_warps in range(1, 17):
            if group_block_rows != block_rows and group_block_rows % row_warps:
                continue
            if -(-block_rows // row_warps) * cluster > num_ctas:
                continue
            share = row_warps * -(-chunks // cluster)
            for k_warps in range(1, 9):
                if 4 <= row_warps * k_warps <= 20 and chunks >= 2 * cluster * k_warps:
                    found.append((share, cluster, Geometry(row_warps, k_warps, cluster)))
                    break
    return [geometry for _, _, geometry in sorted(found, key=lambda entry: entry[:2])]


class SkinnyProduct:
    """The few-row kernel for one packed weight.

    Args:
        packed: ``[block rows, chunks, ...]`` of :mod:`deepinfer.kernels.dense.packing`.
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
        self.block_k = packing.FP8_COLUMNS if scales is not None else packing.BF16_COLUMNS
        group_block_rows = packed.shape[0] // groups
        self.geometry = geometry or choose_geometry(
            packed.shape[0], self.chunks, group_block_rows, 1280 // self.block_k
        )
        barriers = 8 * self.geometry.row_warps * self.geometry.k_warps  # of a ring, per stage
        self.pipelines = [p for p in pipelines if self.shared_bytes(p) + barriers * p.depth <= nvrtc.MAX_SHARED_BYTES]
        assert self.pipelines, f"{shape}: the input slice of a CTA does not fit shared memory with {self.geometry}"

    def shared_bytes(self, pipeline: Pipeline) -> int:
        g, rows = self.geometry, 8 * pipeline.row_tiles
        units = -(-rows * g.row_warps // g.cluster)
        max_chunks = -(-self.chunks // g.cluster)
        ring = g.row_warps * g.k_warps * pipeline.depth * packing.BLOCK_BYTES if pipeline.ring else 0
        return ring + g.cluster * g.k_warps * units * 128 + rows * (max_chunks * self.block_k * 2 + 16)

    def defines(self, pipeline: Pipeline, float32: bool, quantize: bool, beside: bool = False) -> dict[str, int]:
        """Compile-time constants of ``dense_skinny.cu``."""
        g, padded = self.geometry, 32 * self.packed.shape[0]
        return {
            "N": padded, "OUT_N": self.rows_out, "K": self.columns, "GROUP_N": padded // self.groups,
            "WM": g.row_warps, "WK": g.k_warps, "CLUSTER": g.cluster,
            "NT": pipeline.row_tiles, "DEPTH": pipeline.depth, "MIN_CTAS": pipeline.min_ctas,
            "LOAD_HINT": pipeline.load_hint, "RING": int(pipeline.ring), "EARLY": int(pipeline.early),
            "FP8": int(self.scales is not None),
            "OUT_F32": int(float32), "QUANTIZE": int(quantize), "BESIDE": int(beside),
        }  # fmt: skip

    def kernel(self, pipeline: Pipeline, float32: bool, quantize: bool, beside: bool = False) -> nvrtc.Kernel:
        defines, shared = self.defines(pipeline, float32, quantize, beside), self.shared_bytes(pipeline)
        return nvrtc.load_kernel("dense_skinny.cu", "dense_skinny", defines, self.packed.device, shared_bytes=shared)

    def __call__(self, x: Tensor, out: Tensor, quantize: bool, overlap: bool, beside: bool = False) -> None:
        rows, g = x.shape[0], self.geometry
        pipeline = next((p for p in self.pipelines if rows <= 8 * p.row_tiles), self.pipelines[-1])
        tiles = -(-self.packed.shape[0] // g.row_warps)
        grid = (tiles * g.cluster, -(-rows // (8 * pipeline.row_tiles)), 1)
        scales = self.packed if self.scales is None else self.scales
        arguments = (self.packed, scales, x, out, rows, nvrtc.int64(x.stride(0)))
        self.kernel(pipeline, out.dtype == torch.float32, quantize, beside).launch(
            grid, g.threads, arguments, shared_bytes=self.shared_bytes(pipeline), cluster=g.cluster, overlap=overlap
        )
