"""Which kernel multiplies how many rows, per shape of an FP8 weight, and how it cuts the weight.

A step fixes the order of summation of all its row counts; from one step to the next a row's last bits may change. The
tables hold what was fastest on an H200 with weights in memory, not in L2, each launch overlapping the one before as in
the model (``bench/gpu/check_dense.py --only compare`` tries the candidates). Microseconds of the kernels chosen here:

    rows   wq_a + wkv    wq_b   wq_b + index    wo_a    wo_b   gate_up    down   layer   cuBLAS on bf16
     1         5.0       11.8       14.3        10.0    14.0      8.4      5.6    55           106
     8         5.4       12.8       15.2        11.2    14.8      9.4      6.1    59           109
    16         6.2       14.1       17.0        13.0    15.4     10.3      7.2    66           109
    32         6.8       14.9       20.2        15.9    19.4     12.5      9.0    78           109
    64         9.1       16.6       23.6        18.5    27.8     16.5     10.3    99           119
   128        10.7       21.6       36.2        22.4    31.1     20.1     12.5   118           119
   256        14.9       34.6       49.5        28.8     ~62     26.2     18.1   185           155
   512        21.0       67.0       82.3        44.8    71.8     45.4     22.5   273           242

Slices of the columns work as clusters, which have to fit groups of 14 to 18 SMs: 39 of three, 30 of four and 15 of
eight run at once. Three slices of the 40 tiles of wo_b would run in two waves: for 129 to 256 rows they work apart, in
one, and the hyper-connection adds their sums. (The time of wo_b at 256 rows is still that of clusters.)

A kernel starts its loads of weights beside the one before it where both fit an SM: 227 KB of shared memory. The tiles
for tens of rows and the shallow rings leave about half of it free, those for hundreds leave none.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer.kernels.dense.skinny_cuda import PIPELINES, Geometry, Pipeline
from deepinfer.kernels.dense.wgmma_cuda import TILES, Tile


@dataclass(frozen=True, slots=True)
class Few:
    """The few-row kernel (``dense_skinny.cu``), up to ``max_rows``."""

    max_rows: int
    geometry: Geometry | None = None
    """None: by shape."""
    pipelines: tuple[Pipeline, ...] = PIPELINES


@dataclass(frozen=True, slots=True)
class Many:
    """The ``wgmma`` kernel (``dense_wgmma.cu``), up to ``max_rows``."""

    max_rows: int
    slices: int | None = None
    """CTAs along the columns; None: by shape."""
    tiles: tuple[Tile, ...] = TILES
    leaves_partial: bool = False
    """A reader that adds the sums of the slices itself gets them apart: they then need no clusters."""


Step = Few | Many

DEFAULT: tuple[Step, ...] = (Few(16), Many(256))
"""For shapes that were not measured. Above the last step weights are widened for cuBLAS."""


def _ring(row_warps: int, k_warps: int, cluster: int, depths: dict[int, int], ctas: int = 1) -> Few:
    """The few-row kernel with rings in shared memory; ``depths``: of the ring, by tiles of 8 activation rows.

    With few rows the weights leave L2 first: what the kernels between hand on stays there, and loads of it are what
    those wait for.
    """
    pipelines = tuple(
        Pipeline(tiles, depth, ctas, load_hint=2 if tiles == 1 else 0, ring=True, early=True)
        for tiles, depth in depths.items()
    )
    return Few(8 * max(depths), Geometry(row_warps, k_warps, cluster), pipelines)


# 128 weight rows and one CTA per SM
_16, _32, _48, _64 = Tile(16, 2, 1, 8, 1), Tile(32, 2, 1, 8, 1), Tile(48, 2, 1, 7, 1), Tile(64, 2, 1, 6, 1)
_96, _128, _192, _256 = Tile(96, 2, 1, 8, 1), Tile(128, 2, 1, 8, 1), Tile(192, 2, 1, 6, 1), Tile(256, 2, 1, 5, 1)
_384 = Tile(384, 2, 1, 4, 1)

# (rows, columns, groups) of the weight
_MEASURED: dict[tuple[int, int, int], tuple[Step, ...]] = {
    # wq_a + wkv
    (1792, 5120, 1): (
        _ring(4, 2, 8, {1: 3, 2: 3}),
        Many(128, 8, (_32, _48, _64, _96, _128)),
        Many(256, 4, (_96, _128)),
        Many(512, 4, (_192, _256)),
    ),
    # wq_b
    (32768, 1280, 1): (
        _ring(8, 2, 1, {1: 4}),
        Many(
            512,
            1,
            (_16, _32, _48, Tile(64, 2, 1, 6, 2), Tile(96, 4, 1, 7, 1), Tile(128, 4, 1, 6, 1), _192, _256, _384),
        ),
    ),
    # wq_b + index
    (36864, 1280, 1): (
        _ring(9, 2, 1, {1: 2, 2: 2, 3: 2}),
        Many(
            256,
            1,
            (
                Tile(32, 5, 1, 4, 1),
                Tile(48, 5, 1, 4, 1),
                Tile(64, 5, 1, 3, 1),
                Tile(96, 3, 1, 8, 1),
                Tile(128, 3, 1, 7, 1),
            ),
        ),
        Many(512, 1, (_192, _256)),
    ),
    # wo_a
    (8192, 4096, 8): (
        _ring(4, 3, 2, {1: 4, 2: 4, 3: 2}),
        Many(256, 2, (_32, _48, _64, _96, _128, _192, _256)),
        Many(512, 1, (_192, _256)),
    ),
    # wo_b
    (5120, 8192, 1): (
        _ring(11, 1, 8, {1: 4, 2: 4, 3: 4, 4: 4}),
        Many(512, 3, (_48, _64, _96, _128, _192, _256, _384), leaves_partial=True),
    ),
    # gate and up projections of the shared expert
    (4608, 5120, 1): (
        _ring(10, 2, 8, {1: 2}),
        _ring(10, 1, 8, {2: 2, 3: 2, 4: 2}),
        Many(384, 3, (_48, Tile(64, 2, 1, 8, 1), _96, _128, _192, _256, _384)),
        Many(512, 1, (_192,)),
    ),
    # down projection of the shared expert
    (5120, 2304, 1): (
        _ring(5, 2, 4, {1: 4}),
        _ring(3, 2, 4, {2: 2}, 2),
        Many(256, 2, (_32, _48, _64, _96, _128, _192, _256)),
        Many(512, 1, (_128, _192)),
    ),
    # projection of the features for drafts
    (5120, 15360, 1): (
        _ring(11, 1, 8, {1: 4, 2: 4, 3: 4}),
        Many(64, 5, (Tile(32, 4, 1, 5, 1), Tile(64, 4, 1, 4, 1))),
        Many(128, 4, (Tile(128, 3, 1, 7, 1),)),
        Many(256, 8, (_256,)),
    ),
    # projection of the engram
    (25600, 6144, 1): (
        _ring(13, 1, 2, {1: 4, 2: 3}),
        Many(256, 1, (Tile(32, 4, 1, 5, 1), Tile(64, 4, 1, 4, 1), Tile(128, 4, 1, 6, 1), _256)),
    ),
}


def plan(num_outputs: int, num_inputs: int, groups: int) -> tuple[Step, ...]:
    """Steps by rising number of rows."""
    return _MEASURED.get((num_outputs, num_inputs, groups), DEFAULT)
