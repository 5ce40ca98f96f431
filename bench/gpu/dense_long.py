"""Products of 513 to 2,048 rows: the plans against a widened copy for cuBLAS, and against FP8 on both sides.

Part ``long`` of check_dense.py. ``planned`` is what ``faithful`` takes, ``widened`` what it takes without a plan for so
many rows, ``fast`` the product in FP8 with the conversion of its input, even where the policy of that name has a higher
limit (several groups). ``tiles`` are others of one slice, ``codes`` is ``fast`` where the input comes as codes. Where
sums are exact, ``planned`` and ``widened`` have to be.
"""

from __future__ import annotations

import torch

from bench.gpu import dense_cases as cases
from bench.gpu.dense_candidates import Candidate, Shape, planned
from deepinfer.kernels.dense import packing, row_scaled
from deepinfer.kernels.dense.linear import Fp8Linear
from deepinfer.kernels.dense.plans import plan
from deepinfer.kernels.dense.row_scaled import RowCodes
from deepinfer.kernels.dense.wgmma_cuda import Tile

ROWS = (513, 640, 768, 1024, 1536, 2048)
TILES = (Tile(192, 2, 1, 6, 1), Tile(256, 2, 1, 5, 1), Tile(384, 2, 1, 4, 1))
SHAPES = (*cases.LAYER, "wq_b+index")


def candidates() -> list[Candidate]:
    return [Candidate("wgmma", slices=1, tile=tile) for tile in TILES]


def jobs() -> list[cases.Job]:
    """All kernels, for compilation ahead."""
    return [candidate.job(cases.SHAPES[name]) for name in SHAPES for candidate in candidates()]


def compare() -> None:
    row_scaled.MIN_ROWS_OF_GROUPS = row_scaled.MIN_ROWS  # to see what that limit spares
    times: dict[tuple[int, str], dict[str, float]] = {}
    for name in SHAPES:
        cases.guarded(f"long {name}", lambda: compare_shape(name, cases.SHAPES[name], times))  # noqa: B023
    for rows in ROWS:
        found = [times[rows, name] for name in cases.LAYER if (rows, name) in times]
        sums = {way: sum(row[way] for row in found) for way in ("planned", "widened", "fast")}
        print(f"layer rows {rows:4} | " + "  ".join(f"{way} {us:.0f}" for way, us in sums.items()) + " us", flush=True)
        cases.results.append({"layer": rows, **sums})


def operators(packed: list, shape: Shape) -> dict[str, list[Fp8Linear]]:
    n, k, groups = shape
    ways = {way: [cases.linear_of(p, n, k, groups, steps) for p in packed] for way, steps in
            (("planned", plan(*shape)), ("widened", ()), ("fast", ()))}  # fmt: skip
    for linear in ways["fast"]:
        linear.use_fast(True)
    return ways


def compare_shape(name: str, shape: Shape, times: dict[tuple[int, str], dict[str, float]]) -> None:
    n, k, groups = shape
    copies = cases.packed_copies(n, k)
    ways = operators(copies, shape)
    codes, scales = cases.random_fp8(n, k, integers=True)
    exact = operators([(packing.pack_fp8(codes), packing.pack_scales(scales))], shape)
    wide, num_bad = cases.exact_wide(codes, scales), 0
    for rows in ROWS:
        x, out = cases.random_x(rows, groups * k, False), torch.empty(rows, n, dtype=torch.bfloat16, device="cuda")
        integers = cases.random_x(rows, groups * k, True)
        expected = cases.exact_product(integers, wide, groups).bfloat16()
        num_bad += sum(not torch.equal(exact[way][0](integers), expected) for way in ("planned", "widened"))
        num = 2 * len(copies)
        row = {
            way: cases.time_us(lambda i: linears[i % len(linears)](x, out, overlap=True), num)  # noqa: B023
            for way, linears in ways.items()
        }
        if exact["fast"][0].takes_codes(rows):
            of_x = RowCodes.of(x, groups)
            row["codes"] = cases.time_us(lambda i: ways["fast"][i % len(copies)](of_x, out), num)  # noqa: B023
        tiles = {}
        for candidate in candidates():
            products = [candidate.product(copy, shape) for copy in copies]
            if products[0].tiles:
                us = cases.time_us(lambda i: products[i % len(products)](x, out, False, True), num)  # noqa: B023
                tiles[candidate.tile.rows] = us
        times[rows, name] = row
        chosen = planned(shape, rows)
        print(f"{name:10} {rows:4} | " + " ".join(f"{way} {us:.1f}" for way, us in row.items())
              + " | " + " ".join(f"{size}: {us:.1f}" for size, us in tiles.items())
              + f" | plan {chosen}", flush=True)  # fmt: skip
        floor = cases.floor_us(n, k, groups, rows)
        cases.results.append({"long": name, "rows": rows, "floor": floor, **row, "tiles": tiles, "plan": str(chosen)})
    cases.report(f"long {name}: integers bit-equal", num_bad == 0)
