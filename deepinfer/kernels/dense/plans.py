"""Which kernel multiplies how many rows, per shape of an FP8 weight, and how it cuts the weight.

A step fixes the order of summation of all its row counts; from one step to the next a row's last bits may change. The
tables hold what was fastest on an H200 with weights in memory, not in L2, each launch overlapping the one before as in
the model (``bench/gpu/check_dense.py --only compare`` tries the candidates). Microseconds of the few-row kernel:

    rows   wq_a + wkv    wq_b   wq_b + index    wo_a    wo_b   gate_up    down
     1         4.7       11.9       14.1        10.2    13.6      8.3      5.8
     8         5.4       13.0       15.3        11.4    14.4      9.1      6.6
    16         6.2       14.3       17.3        12.9    15.0     10.5      7.1
    32         8.2       17.5       20.9        16.0    19.0     12.0      9.3

The steps of ``wgmma`` are not measured yet.

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


Step = Few | Many

DEFAULT: tuple[Step, ...] = (Few(16), Many(256))
"""For shapes that were not measured. Above the last step weights are widened for cuBLAS."""


def _ring(row_warps: int, k_warps: int, cluster: int, depths: tuple[int, ...], ctas: int = 1) -> Few:
    """The few-row kernel with rings in shared memory, for up to 8, 16, 24 and 32 rows as there are ``depths``."""
    pipelines = tuple(Pipeline(i + 1, depth, ctas, ring=True, early=True) for i, depth in enumerate(depths))
    return Few(8 * len(depths), Geometry(row_warps, k_warps, cluster), pipelines)


# Up to 64 rows a CTA should leave registers and shared memory for one of the next kernel, hence mostly two or three
# warpgroups. Clusters stay within a group of 14 to 18 SMs: 15 of eight CTAs run at once, 31 of four.
# (rows, columns, groups) of the weight
_MEASURED: dict[tuple[int, int, int], tuple[Step, ...]] = {
    # wq_a + wkv
    (1792, 5120, 1): (
        _ring(4, 2, 8, (3, 3, 3, 3)),
        Many(64, 8, (Tile(48, 2, 1, 7, 1), Tile(64, 2, 1, 6, 1))),
        Many(
            256,
            4,
            (Tile(48, 2, 1, 7, 1, 2), Tile(64, 2, 1, 6, 1, 2), Tile(96, 2, 1, 8, 1, 2), Tile(128, 2, 1, 8, 1, 2)),
        ),
        Many(1024, 4, (Tile(128, 3, 1, 7, 1, 2), Tile(256, 2, 1, 5, 1, 2))),
    ),
    # wq_b
    (32768, 1280, 1): (
        _ring(8, 2, 1, (4, 3, 2, 2)),
        Many(64, 1, (Tile(48, 2, 2, 5, 1, 2), Tile(64, 2, 2, 4, 1, 2))),
        Many(1024, 1, (Tile(96, 4, 1, 7, 1, 2), Tile(128, 4, 1, 6, 1, 2), Tile(192, 2, 1, 6, 1, 2))),
    ),
    # wq_b + index
    (36864, 1280, 1): (
        _ring(9, 2, 1, (2, 2, 2, 2)),
        Many(64, 1, (Tile(48, 5, 1, 4, 1, 2), Tile(64, 5, 1, 3, 1, 2))),
        Many(1024, 1, (Tile(96, 3, 1, 8, 1, 4), Tile(128, 3, 1, 7, 1, 2))),
    ),
    # wo_a
    (8192, 4096, 8): (
        _ring(4, 3, 2, (4, 4, 2, 2)),
        Many(64, 3, (Tile(48, 2, 2, 5, 1, 2), Tile(64, 2, 2, 4, 1, 2))),
        Many(128, 2, (Tile(96, 2, 1, 8, 1), Tile(128, 2, 1, 8, 1))),
        Many(1024, 1, (Tile(96, 2, 1, 8, 1, 2), Tile(128, 2, 1, 8, 1, 2))),
    ),
    # wo_b
    (5120, 8192, 1): (
        _ring(11, 1, 8, (4, 4, 4, 4)),
        Many(
            128,
            4,
            (Tile(48, 3, 1, 6, 1, 2), Tile(64, 3, 1, 5, 1, 2), Tile(96, 3, 1, 8, 1, 2), Tile(128, 3, 1, 7, 1, 2)),
        ),
        Many(256, 2, (Tile(96, 3, 1, 8, 1, 4), Tile(128, 3, 1, 7, 1, 2))),
        Many(1024, 1, (Tile(128, 2, 1, 8, 1, 4),)),
    ),
    # gate and up projections of the shared expert
    (4608, 5120, 1): (
        _ring(5, 3, 4, (3, 2, 2)),
        Few(32, Geometry(10, 1, 8), (Pipeline(4, 2, 1, ring=True, early=True),)),
        Many(
            256,
            3,
            (
                Tile(48, 2, 1, 7, 1, 2),
                Tile(64, 2, 1, 6, 1, 2),
                Tile(96, 2, 1, 8, 1, 2),
                Tile(128, 2, 1, 8, 1, 2),
                Tile(192, 2, 1, 6, 1, 2),
                Tile(256, 2, 1, 5, 1, 2),
            ),
        ),
        Many(1024, 1, (Tile(128, 2, 1, 8, 1, 4),)),
    ),
    # down projection of the shared expert
    (5120, 2304, 1): (
        _ring(3, 2, 4, (2, 2, 2, 2), 2),
        Many(
            128,
            4,
            (Tile(48, 3, 1, 6, 1, 2), Tile(64, 3, 1, 5, 1, 2), Tile(96, 3, 1, 8, 1, 2), Tile(128, 3, 1, 7, 1, 2)),
        ),
        Many(1024, 1, (Tile(64, 2, 1, 6, 1, 4), Tile(96, 2, 1, 8, 1, 4), Tile(128, 2, 1, 8, 1, 4))),
    ),
    # projection of the features for drafts
    (5120, 15360, 1): (
        _ring(11, 1, 8, (4, 4, 4, 2)),
        Many(
            128,
            4,
            (Tile(48, 3, 1, 6, 1, 2), Tile(64, 3, 1, 5, 1, 2), Tile(96, 3, 1, 8, 1, 2), Tile(128, 3, 1, 7, 1, 2)),
        ),
        Many(256, 2, (Tile(96, 3, 1, 8, 1, 4), Tile(128, 3, 1, 7, 1, 2))),
        Many(1024, 1, (Tile(128, 2, 1, 8, 1, 4),)),
    ),
    # projection of the engram
    (25600, 6144, 1): (
        _ring(13, 1, 2, (4, 3)),
        Many(64, 1, (Tile(32, 2, 2, 5, 1, 4), Tile(48, 2, 2, 5, 1, 2), Tile(64, 2, 2, 4, 1, 4))),
        Many(1024, 1, (Tile(96, 2, 2, 7, 1, 4), Tile(128, 2, 2, 6, 1, 2), Tile(192, 2, 1, 6, 1, 2))),
    ),
}


def plan(num_outputs: int, num_inputs: int, groups: int) -> tuple[Step, ...]:
    """Steps by rising number of rows."""
    return _MEASURED.get((num_outputs, num_inputs, groups), DEFAULT)
