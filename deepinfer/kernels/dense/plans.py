"""Which kernel multiplies how many rows, per shape of an FP8 weight, and how it cuts the weight.

A step fixes the order of summation of all its row counts; from one step to the next a row's last bits may change. The
tables hold what was fastest on an H200 with weights in memory, not in L2 (``bench/gpu/check_dense.py``): its search
over few-row geometries at 1 and 16 rows, over clusters and tiles of ``wgmma`` at 1 to 256 rows, and its times of
``wgmma`` against widening with cuBLAS up to 8192 rows. In microseconds, best of each (few rows / ``wgmma``, which
programmatic dependent launch shortens by 2 to 4 more / widening):

    shape         1 row         16 rows        64 rows    128 rows   256 rows     512 rows
    wq_a + wkv    5.9 /  8.4     6.9 /  8.6    10.0       12.4       17.8 / 18.6   34.9 / 23.2
    wq_b         13.9 / 17.4    17.3 / 17.5    19.7       28.3       46.1 / 65.9   89.5 / 92.2
    wq_b + index 15.3 / 22.9    22.5 / 22.9    28.8       41.1       66.1 / 75.0  110.8 / 102.9
    wo_a         11.8 / 18.5    14.7 / 19.0    20.4       23.5       34.9 / 103.6  69.7 / 110.6
    wo_b         15.3 / 20.6    18.4 / 20.9    28.4       33.7       54.2 / 67.2  127.2 / 86.4
    gate_up      10.3 / 13.6    12.5 / 14.1    16.8       19.6       30.0 / 39.1   72.9 / 49.3
    down          6.5 /  9.4     8.1 / 10.3    12.1       14.8       21.6 / 21.7   50.2 / 28.3
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
    cluster: int | None = None
    """None: by shape."""
    tiles: tuple[Tile, ...] = TILES


Step = Few | Many

DEFAULT: tuple[Step, ...] = (Few(16), Many(256))
"""For shapes that were not measured. Above the last step weights are widened for cuBLAS."""

_THIN = Tile(16, 2, 1, 5, 4), Tile(32, 2, 1, 4, 3), Tile(64, 2, 1, 6, 2)
_PAIR = Tile(128, 2, 1, 4, 2)
_ALONE = Tile(128, 2, 1, 8, 1)
_G, _P = Geometry, Pipeline

# (rows, columns, groups) of the weight
_MEASURED: dict[tuple[int, int, int], tuple[Step, ...]] = {
    # wq_a + wkv
    (1792, 5120, 1): (
        Few(8, _G(1, 2, 8), (_P(1, 2, 10),)),
        Many(64, 8),
        Many(256, 8, (_PAIR,)),
    ),
    # wq_b: the few-row kernel loses 0.8 us per row
    (32768, 1280, 1): (
        Few(2, _G(2, 2, 1), (_P(1, 2, 5),)),
        Many(512, 1, (Tile(16, 2, 2, 5, 2), *TILES[1:])),
    ),
    # wq_b + index
    (36864, 1280, 1): (
        Few(4, _G(1, 4, 1), (_P(1, 2, 5),)),
        Many(384, 1, (*_THIN, *TILES[3:])),
    ),
    # wo_a
    (8192, 4096, 8): (
        Few(16, _G(2, 4, 2), (_P(1, 2, 2), _P(2, 2, 2))),
        Many(64, 2, (*_THIN[:2], Tile(64, 2, 1, 8, 1))),
        Many(128, 2, (_ALONE,)),
        Many(1024, 2, (_PAIR,)),
    ),
    # wo_b
    (5120, 8192, 1): (
        Few(16, _G(4, 1, 8), (_P(1, 3, 4), _P(2, 3, 4))),
        Many(32, 8, _THIN[:2]),
        Many(256, 4, (_THIN[2], _PAIR)),
    ),
    # gate and up projections of the shared expert
    (4608, 5120, 1): (
        Few(8, _G(4, 1, 8), (_P(1, 3, 4),)),
        Many(64, 6, (*_THIN[:2], Tile(64, 2, 1, 4, 2))),
        Many(256, 3, (_ALONE, Tile(256, 2, 1, 5, 1))),
    ),
    # down projection of the shared expert
    (5120, 2304, 1): (
        Few(8, _G(1, 4, 2), (_P(1, 2, 5),)),
        Many(64, 4),
        Many(256, 2, (_ALONE, Tile(256, 2, 1, 5, 1))),
    ),
}


def plan(num_outputs: int, num_inputs: int, groups: int) -> tuple[Step, ...]:
    """Steps by rising number of rows."""
    return _MEASURED.get((num_outputs, num_inputs, groups), DEFAULT)
