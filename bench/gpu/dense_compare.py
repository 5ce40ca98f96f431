"""The candidates for plans.py against each other: exact sums first, then times by shape and rows, then the winners.

Part ``compare`` of check_dense.py. Every time is of launches in a CUDA graph: ``overlap`` with programmatic dependent
launch, as in the model, ``plain`` without. cuBLAS multiplies by a widened copy of the weights, which costs it twice the
memory and here nothing to make. ``apart`` are kernels that leave the sums of slices to their reader, whose additions
are not in the time.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from bench.gpu import dense_candidates as candidates
from bench.gpu import dense_cases as cases
from bench.gpu.dense_candidates import Candidate, Shape
from deepinfer.kernels import nvrtc
from deepinfer.kernels.dense import packing

FEW_ROWS = (1, 2, 4, 8, 16, 24, 32)
MANY_ROWS = (32, 48, 64, 96, 128, 192, 256, 384, 512)
RARE_ROWS = (1, 4, 8, 16, 32, 64, 128, 256)
"""For shapes that a layer does not have."""
NUM_THIN, NUM_MANY, NUM_APART = 2, 8, 4
"""Candidates of ``wgmma`` per shape: for few rows, for many, and of those that leave sums apart."""
SHOWN = 3
STEPS = ((48, 64), (96, 128), (192, 256), (384, 512))
"""Rows that one step of a plan could serve: its tiles may differ, its K slices must not."""
Table = list[tuple[float, Candidate]]


def entries(name: str, shape: Shape, rows: int) -> list[Candidate]:
    """What is measured, the plan's choice first."""
    found = [c] if (c := candidates.planned(shape, rows)) is not None else []
    if rows in FEW_ROWS:
        found += candidates.few(name, rows)
    found += candidates.many(shape, rows, NUM_MANY if rows in MANY_ROWS else NUM_THIN)
    found += candidates.apart(shape, rows, NUM_APART)
    return list(dict.fromkeys(found))


def all_rows(name: str) -> list[int]:
    every = sorted({*FEW_ROWS, *MANY_ROWS})
    return every if name in cases.COLD_US else list(RARE_ROWS)


def jobs() -> list[cases.Job]:
    """All kernels, for compilation ahead."""
    found: list[cases.Job] = []
    for name, shape in cases.SHAPES.items():
        for rows in all_rows(name):
            for candidate in entries(name, shape, rows):
                try:
                    found.append(candidate.job(shape))
                except AssertionError:  # too large for shared memory
                    continue
    return found


def compare() -> None:
    winners: dict[tuple[str, int], dict] = {}
    for name, shape in cases.SHAPES.items():
        cases.guarded(f"compare {name}", lambda: compare_shape(name, shape, winners))  # noqa: B023
    for rows in all_rows(cases.LAYER[0]):
        found = [winners[name, rows] for name in cases.LAYER if (name, rows) in winners]
        if len(found) == len(cases.LAYER):
            columns = ("floor", "planned", "best", "plain best", "pair", "few", "cublas")
            sums = {column: sum(row.get(column, float("nan")) for row in found) for column in columns}
            shown = "  ".join(f"{key} {us:.1f}" for key, us in sums.items())
            print(f"layer rows {rows:4} | {shown} us", flush=True)
            cases.results.append({"layer": rows, **sums})


def compare_shape(name: str, shape: Shape, winners: dict[tuple[str, int], dict]) -> None:
    n, k, groups = shape
    copies = cases.packed_copies(n, k)
    codes, scales = cases.random_fp8(n, k, integers=True)
    exact = packing.pack_fp8(codes), packing.pack_scales(scales)
    wide = cases.exact_wide(codes, scales)
    bf16 = [torch.randn(groups, n // groups, k, device="cuda").bfloat16() for _ in range(max(2, len(copies) // 2))]
    num_bad = num_checked = 0
    tables: dict[int, Table] = {}
    for rows in all_rows(name):
        x, out = cases.random_x(rows, groups * k, False), torch.empty(rows, n, dtype=torch.bfloat16, device="cuda")
        integers = cases.random_x(rows, groups * k, True)
        expected = cases.exact_product(integers, wide, groups).bfloat16()
        table: Table = []
        for candidate in entries(name, shape, rows):
            try:
                num_checked += 1
                if not is_exact(candidate, exact, shape, integers, expected):
                    num_bad += 1
                    print(f"FAIL {name} rows {rows} {candidate}: wrong bits", flush=True)
                    continue
                table.append((measure(candidate, copies, shape, x, True), candidate))
            except (nvrtc.KernelError, AssertionError) as error:
                print(f"FAIL {name} rows {rows} {candidate}: {str(error)[:150]}", flush=True)
        planned = candidates.planned(shape, rows)
        row: dict = {"shape": name, "rows": rows, "floor": cases.floor_us(n, k, groups, rows)}
        row |= next(({"planned": us} for us, candidate in table if candidate == planned), {})
        table.sort(key=lambda entry: entry[0])
        tables[rows] = table
        row |= {"best": table[0][0], "winner": str(table[0][1])}
        row["plain best"] = measure(table[0][1], copies, shape, x, False)
        for label, wanted in (("few", is_few), ("wgmma", is_wgmma), ("pair", is_pair), ("apart", is_apart)):
            row |= next(({label: us} for us, candidate in table if wanted(candidate)), {})
        num = 2 * len(bf16)
        row["cublas"] = cases.time_us(lambda i: cublas(x, bf16[i % len(bf16)], out), num)  # noqa: B023
        winners[name, rows] = row
        keys = ("floor", "planned", "best", "plain best", "few", "wgmma", "pair", "apart", "cublas")
        print(f"{name:10} {rows:3} | " + " ".join(f"{key} {row[key]:.1f}" for key in keys if key in row), flush=True)
        print("        " + " ; ".join(f"{us:.2f} {candidate}" for us, candidate in table[:SHOWN]), flush=True)
        cases.results.append(row | {"table": [(round(us, 3), str(candidate)) for us, candidate in table]})
    suggest_steps(name, tables)
    cases.report(f"compare {name}: {num_checked} kernels, integers bit-equal", num_bad == 0)


def suggest_steps(name: str, tables: dict[int, Table]) -> None:
    """The fastest tiles of ``wgmma`` with the K slices that suit all rows of a step, and the cost of other slices."""
    for step in STEPS:
        measured = [tables[rows] for rows in step if rows in tables]
        best: list[tuple[float, int, list[str]]] = []
        for slices in range(1, 9):
            same = [
                [entry for entry in table if is_wgmma(entry[1]) and entry[1].slices == slices] for table in measured
            ]
            if measured and all(same):
                tiles = [str(entries[0][1]) for entries in same]
                best.append((sum(entries[0][0] for entries in same), slices, tiles))
        best.sort()
        if best:
            others = " ".join(f"{slices}: {us:.1f}" for us, slices, _ in best)
            print(f"        step {step}: {best[0][2]} | us by slices {others}", flush=True)
            cases.results.append({"step": step, "shape": name, "tiles": best[0][2], "us": best[0][0]})


def is_few(candidate: Candidate) -> bool:
    return candidate.tile is None


def is_wgmma(candidate: Candidate) -> bool:
    return candidate.tile is not None and not candidate.partial


def is_pair(candidate: Candidate) -> bool:
    return is_wgmma(candidate) and candidates.is_pair(candidate)


def is_apart(candidate: Candidate) -> bool:
    return candidate.partial


def is_exact(candidate: Candidate, packed: tuple, shape: Shape, x: Tensor, expected: Tensor) -> bool:
    """All rows, and fewer than a tile, both ways to launch."""
    product = candidate.product(packed, shape)
    for rows in (x.shape[0], max(1, x.shape[0] - 3)):
        for overlap in (False, True):
            out = new_output(candidate, rows, shape[0]).fill_(torch.nan)
            product(x[:rows], out, False, overlap)
            if candidate.partial:
                out = functools.reduce(torch.add, out).bfloat16()
            if not torch.equal(out, expected[:rows]):
                return False
    return True


def new_output(candidate: Candidate, rows: int, n: int) -> Tensor:
    if candidate.partial:
        return torch.empty(candidate.slices, rows, n, device="cuda")
    return torch.empty(rows, n, dtype=torch.bfloat16, device="cuda")


def measure(candidate: Candidate, copies: list, shape: Shape, x: Tensor, overlap: bool) -> float:
    out = new_output(candidate, x.shape[0], shape[0])
    products = [candidate.product(copy, shape) for copy in copies]
    num = 2 * len(products)
    return cases.time_us(lambda i: products[i % len(products)](x, out, False, overlap), num)


def cublas(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """``[groups, n, k]`` weights: one product, or one per group in a batch."""
    groups, n, k = weight.shape
    if groups == 1:
        torch.mm(x, weight[0].t(), out=out)
    else:
        parts = x.view(x.shape[0], groups, k).transpose(0, 1)
        out.view(x.shape[0], groups, n).copy_(torch.bmm(parts, weight.transpose(1, 2)).transpose(0, 1))
