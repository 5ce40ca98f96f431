"""Which kernel multiplies how many rows, per shape of an FP8 weight, and how it cuts the weight.

A step fixes the order of summation of all its row counts; from one step to the next a row's last bits may change. The
tables hold what was fastest on an H200 with weights in memory, not in L2, each launch overlapping the one before as in
the model (``bench/gpu/check_dense.py --only compare`` tries the candidates). Microseconds of the kernels chosen here:

    rows   wq_a + wkv    wq_b   wq_b + index    wo_a    wo_b   gate_up    down   layer   cuBLAS on bf16
     1         4.9       11.5       14.7         9.9    13.1      8.0      5.5    53           104
     8         5.4       12.5       14.8        11.3    13.9      9.1      6.1    58           107
    16         6.2       13.7       17.1        12.9    15.1     10.1      7.2    65           108
    32         6.4       14.4       16.7        14.7    18.7     12.1      8.1    74           107
    64         8.8       16.2       19.9        15.3    18.6     13.2      8.8    81           117
   128        10.4       19.4       28.8        19.1    22.1     17.5     11.3   100           116
   256        13.8       31.6       42.4        26.3    31.6     24.1     16.3   144           149
   384        17.2       45.3       62.4        37.1    45.9     33.0     18.3   197           190
   512        19.5       59.8       74.0        42.9    59.7     44.2     21.7   248           238

(From 33 rows on wo_b leaves its sums apart, whose addition is not in its time.)

Up to 1,536 or 2,048 rows one slice beats a widened copy and cuBLAS, but for wq_a + wkv (``--only long``): a layer takes
336 us for 640 rows against 474, 469 against 578 for 1,024, 906 against 968 for 2,048. (down ends where the routed
experts' kernel for few pairs does, beside which it may run: so a start meets both.)

Slices of the columns work as clusters, which have to fit groups of 14 to 18 SMs: 39 of three, 30 of four and 15 of
eight run at once. Three slices of the 40 tiles of wo_b would run in two waves: they work apart, in one, and the
hyper-connection adds their sums.

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
            2048,
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
        Many(2048, 1, (_192, _256)),
    ),
    # wo_a
    (8192, 4096, 8): (
        _ring(4, 3, 2, {1: 4, 2: 4, 3: 2}),
        Many(256, 2, (_32, _48, _64, _96, _128, _192, _256)),
        Many(512, 1, (_192, _256)),
        Many(2048, 1, (_256, _384)),
    ),
    # wo_b
    (5120, 8192, 1): (
        _ring(11, 1, 8, {1: 4, 2: 4, 3: 4, 4: 4}),
        Many(512, 3, (_48, _64, _96, _128, _192, _256, _384), leaves_partial=True),
        Many(1536, 1, (_192, _256, _384)),
    ),
    # gate and up projections of the shared expert
    (4608, 5120, 1): (
        _ring(10, 2, 8, {1: 2}),
        _ring(10, 1, 8, {2: 2, 3: 2, 4: 2}),
        Many(384, 3, (_48, Tile(64, 2, 1, 8, 1), _96, _128, _192, _256, _384)),
        Many(1536, 1, (_192, _256, _384)),
    ),
    # down projection of the shared expert
    (5120, 2304, 1): (
        _ring(5, 2, 4, {1: 4}),
        _ring(3, 2, 4, {2: 2}, 2),
        Many(256, 2, (_32, _48, _64, _96, _128, _192, _256)),
        Many(512, 1, (_128, _192)),
        Many(1024, 1, (_192, _256, _384)),
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
