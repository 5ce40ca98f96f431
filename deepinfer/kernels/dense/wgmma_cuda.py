"""Launcher of ``dense_wgmma.cu``: products of FP8 weights with tens to hundreds of activation rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.kernels import nvrtc

_SM_SHARED_BYTES = 228 * 1024
_NUM_SMS = 132
_MAX_CLUSTER = 8
_CLUSTERS_AT_ONCE = {1: 132, 2: 66, 3: 39, 4: 30, 6: 17, 8: 15}
"""Of CTAs that take a whole SM, by CTAs per cluster (``bench/results/h200_dense.json``). Other sizes are guessed."""
_CTA_ROWS = 32
"""What a CTA costs beside its rows, in activation rows of arithmetic; a guess."""
_NEARLY = 1.05
"""Costs within this count as equal, and the larger tile wins."""
ROW_TILE = 128
"""Weight rows of the default tiles."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Size and pipeline of a CTA. May differ by the number of rows without changing a result."""

    rows: int
    """Activation rows: 16, 32, 48, 64, 96, 128, 192, 256 or 384."""
    warpgroups: int
    """At most 5."""
    fragments: int
    """Tiles of 64 weight rows per warpgroup: 1 or 2, 1 with 4 warpgroups and more."""
    stages: int
    min_ctas: int

    @property
    def weight_rows(self) -> int:
        return 64 * self.warpgroups * self.fragments

    @property
    def parts(self) -> int:
        """Products that its activation rows take."""
        return 2 if self.rows > 256 else 1

    @property
    def is_register_bound(self) -> bool:
        """Whether a whole warpgroup produces, to give its registers away."""
        return self.warpgroups >= 4 or self.fragments * self.rows >= 256

    @property
    def threads(self) -> int:
        return 128 * self.warpgroups + (128 if self.is_register_bound else 32)


TILES = (
    Tile(16, 2, 1, 8, 2),
    Tile(32, 2, 1, 8, 2),
    Tile(64, 2, 1, 6, 2),
    Tile(128, 2, 1, 8, 1),
    Tile(256, 2, 1, 5, 1),
)


def choose_slices(num_outputs: int, chunks: int) -> int:
    """CTAs along the columns: enough to give nearly every SM one. Depends on the shape alone."""
    tiles = -(-num_outputs // ROW_TILE)
    slices = 1
    while slices < 8 and tiles * slices < 0.9 * _NUM_SMS and chunks >= 4 * (slices + 1):
        slices += 1
    return slices


class WgmmaProduct:
    """The kernel for one packed FP8 weight.

    Args:
        packed, scales: of :mod:`deepinfer.kernels.dense.packing`.
        shape: rows and columns of the weight that exist.
        slices: CTAs along the columns, default by shape; fixes the order of summation.
        tiles: by rising number of rows.
        partial: leave the sums of the slices apart, ``out`` being ``[slices, rows, N]`` float32. Added in this order
            they are the result. Then slices are independent CTAs, of which all SMs run some.
    """

    def __init__(
        self,
        packed: Tensor,
        scales: Tensor,
        shape: tuple[int, int],
        groups: int = 1,
        slices: int | None = None,
        tiles: Sequence[Tile] = TILES,
        partial: bool = False,
    ) -> None:
        self.partial = partial
        self.packed, self.scales, self.groups = packed, scales, groups
        self.rows_out, self.columns = shape
        self.slices = slices or choose_slices(self.rows_out, packed.shape[1])
        self.tiles = [tile for tile in tiles if self._takes(tile)]

    @staticmethod
    def accepts(shape: tuple[int, int], groups: int) -> bool:
        """Whether the shape suits: vectors of outputs, and no CTA of the default tiles across two groups."""
        return shape[0] % 4 == 0 and (groups == 1 or shape[0] // groups % ROW_TILE == 0)

    def _takes(self, tile: Tile) -> bool:
        within_group = self.groups == 1 or self.rows_out // self.groups % tile.weight_rows == 0
        return within_group and self.shared_bytes(tile) <= nvrtc.MAX_SHARED_BYTES and self.cluster <= _MAX_CLUSTER

    @property
    def cluster(self) -> int:
        """CTAs that add their sums."""
        return 1 if self.partial else self.slices

    def shared_bytes(self, tile: Tile) -> int:
        """With the sums of a CTA, which take the place of its ring where they are added up or rounded in groups."""
        ring = tile.stages * (tile.rows * 128 + tile.weight_rows * 64)
        return 1024 + (ring if self.partial else max(ring, tile.rows * (tile.weight_rows + 4) * 4))

    def defines(self, tile: Tile, float32: bool, quantize: bool, beside: bool = False) -> dict[str, int]:
        """Compile-time constants of ``dense_wgmma.cu``."""
        padded = 32 * self.packed.shape[0]
        return {
            "N": padded, "OUT_N": self.rows_out, "K": self.columns, "GROUP_N": padded // self.groups,
            "WGS": tile.warpgroups, "MF": tile.fragments, "NB": tile.rows, "SLICES": self.slices,
            "PARTIAL": int(self.partial), "STAGES": tile.stages, "MIN_CTAS": tile.min_ctas,
            "OUT_F32": int(float32), "QUANTIZE": int(quantize), "BESIDE": int(beside),
        }  # fmt: skip

    def kernel(self, tile: Tile, float32: bool, quantize: bool, beside: bool = False) -> nvrtc.Kernel:
        defines, shared = self.defines(tile, float32, quantize, beside), self.shared_bytes(tile)
        return nvrtc.load_kernel("dense_wgmma.cu", "dense_wgmma", defines, self.packed.device, shared_bytes=shared)

    def tile(self, rows: int) -> Tile:
        """The first that takes all rows in one pass; past the last, the one whose waves of CTAs cost least."""
        once = next((t for t in self.tiles if rows <= t.rows), None)
        if once is not None:
            return once
        costs = {tile: self._cost(tile, rows) for tile in self.tiles}
        return max((t for t in self.tiles if costs[t] <= _NEARLY * min(costs.values())), key=lambda t: t.rows)

    def num_pieces(self, tile: Tile, rows: int) -> int:
        """Of work: weight rows, activation rows and a slice."""
        return -(-32 * self.packed.shape[0] // tile.weight_rows) * -(-rows // tile.rows) * self.slices

    def _cost(self, tile: Tile, rows: int) -> int:
        at_once = _CLUSTERS_AT_ONCE.get(self.cluster, _NUM_SMS // (self.cluster + 1)) * tile.min_ctas
        waves = -(-self.num_pieces(tile, rows) // (self.cluster * at_once))
        return waves * tile.min_ctas * tile.weight_rows * (tile.rows + _CTA_ROWS)

    def __call__(self, x: Tensor, out: Tensor, quantize: bool, overlap: bool, beside: bool = False) -> None:
        rows = x.shape[0]
        tile = self.tile(rows)
        assert not self.partial or (out.shape == (self.slices, rows, self.rows_out) and out.is_contiguous())
        w_map = nvrtc.block_map(self.packed, tile.weight_rows // 32)
        x_map = nvrtc.tensor_map(x, tile.rows // tile.parts, 64)
        shared, ctas = self.shared_bytes(tile), self.num_pieces(tile, rows)
        if self.cluster == 1 and not quantize:  # a CTA may have several
            at_once = max(tile.min_ctas, min(2, _SM_SHARED_BYTES // (shared + 1024)))
            ctas = min(ctas, at_once * nvrtc.num_multiprocessors(x.device))
        self.kernel(tile, out.dtype == torch.float32, quantize, beside).launch(
            (ctas, 1, 1), tile.threads, (w_map, self.scales, x_map, out, rows),
            shared_bytes=shared, cluster=self.cluster, overlap=overlap,
        )  # fmt: skip
