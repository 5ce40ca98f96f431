"""Dense products on a GPU: bits and errors against float64, times over floor, candidates for the plans.

    python bench/gpu/check_dense.py [--json FILE] [--only few,many,bf16,times]

By default it checks every kernel and times the plans of deepinfer/kernels/dense/plans.py. ``--only compare`` measures
the candidates of dense_candidates.py instead, to write those plans from, ``--only long`` products of 513 to 2,048 rows.

Times are medians of 5 replays of a CUDA graph whose launches rotate over more weights than L2 holds, per launch. Each
part runs in a process of its own, so that one that breaks the CUDA context does not take the others along.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import functools
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.gpu import dense_compare, dense_long
from bench.gpu.dense_cases import (
    BF16_SHAPES,
    COLD_US,
    LAYER,
    SHAPES,
    Job,
    compile_one,
    exact_product,
    exact_wide,
    floor_us,
    guarded,
    linear_of,
    packed_copies,
    random_fp8,
    random_x,
    report,
    results,
    time_us,
)
from deepinfer.kernels import nvrtc
from deepinfer.kernels.dense import plans, skinny_cuda, wgmma_cuda
from deepinfer.kernels.dense.linear import Bf16Linear, Fp8Linear, _cublas
from deepinfer.kernels.dense.linear_triton import q8_round_

G = skinny_cuda.Geometry
P = skinny_cuda.Pipeline
T = wgmma_cuda.Tile
WIDE_TILES = (T(32, 5, 1, 4, 1), T(64, 4, 1, 4, 1), T(96, 3, 1, 7, 1), T(128, 2, 2, 5, 1))
APART_TILES = (T(48, 2, 1, 7, 1), T(96, 3, 1, 7, 1), T(192, 2, 1, 6, 1), T(256, 2, 1, 5, 1))
WGMMA = {"wgmma": (None, wgmma_cuda.TILES), "wide": (2, WIDE_TILES), "apart": (3, APART_TILES)}
"""Slices and tiles."""


def kernel_of(kind: str, packed: tuple, shape: tuple[int, int, int]):
    """A kernel that takes any number of rows: ``skinny``, ``ring``, ``wgmma``, the same with other tiles (``wide``) or
    with sums left apart, added here (``apart``).

    None where it refuses the shape.
    """
    n, k, groups = shape
    if kind in WGMMA:
        if not wgmma_cuda.WgmmaProduct.accepts((n, k), groups):
            return None
        many = wgmma_cuda.WgmmaProduct(*packed, (n, k), groups, *WGMMA[kind], partial=kind == "apart")
        if not many.tiles:
            return None
        return functools.partial(add_apart, many) if kind == "apart" else many
    if kind == "skinny":
        return skinny_cuda.SkinnyProduct(*packed, (n, k), groups)
    geometry, pipelines = ring_check(n, k, groups)
    return skinny_cuda.SkinnyProduct(*packed, (n, k), groups, geometry, pipelines)


def add_apart(product: wgmma_cuda.WgmmaProduct, x: Tensor, out: Tensor, quantize: bool, overlap: bool) -> None:
    sums = torch.full((product.slices, *out.shape), torch.nan, device="cuda")
    product(x, sums, False, overlap)
    out.copy_(functools.reduce(torch.add, sums))
    if quantize:
        q8_round_(out)


def ring_check(n: int, k: int, groups: int) -> tuple[skinny_cuda.Geometry, tuple[skinny_cuda.Pipeline, ...]]:
    blocks, chunks = -(-n // 32), -(-k // 64)
    geometries = skinny_cuda.equal_shares(blocks, chunks, blocks // groups)
    geometry = geometries[0] if geometries else G(1, 2, 1)
    return geometry, tuple(P(tiles, 3, 1, ring=True, early=tiles == 2) for tiles in (1, 2, 4))


def check(name: str, n: int, k: int, groups: int, all_rows: tuple[int, ...], kind: str) -> None:
    """Every output kind of one kernel (see ``kernel_of``) or of the whole (``default``) against float64."""
    from deepinfer.ops.number_formats import q8_round

    for integers in (True, False):
        codes, scales = random_fp8(n, k, integers)
        linear = Fp8Linear(codes, scales, groups=groups)
        assert linear._packed is not None
        kernel = linear if kind == "default" else kernel_of(kind, linear._packed, (n, k, groups))
        if kernel is None:
            return
        wide = exact_wide(codes, scales)
        if integers and kind == "default":
            report(f"{name} widen", torch.equal(linear.widen().double(), wide))
        bad, worst = [], 0.0

        def product(x: Tensor, dtype: torch.dtype, quantize: bool, overlap: bool) -> Tensor:
            out = torch.full((x.shape[0], n), torch.nan, dtype=dtype, device="cuda")
            if kernel is linear:  # noqa: B023
                return linear(x, out, quantize_output=quantize, overlap=overlap)  # noqa: B023
            kernel(x, out, quantize, overlap)  # noqa: B023
            return out

        for rows in all_rows:
            x = random_x(rows, groups * k, integers)
            expected = exact_product(x, wide, groups)
            magnitude = exact_product(x.abs(), wide.abs(), groups)
            for overlap in (False, True):
                for dtype in (torch.float32, torch.bfloat16):
                    out = product(x, dtype, False, overlap)
                    error = ((out.double() - expected).abs() / magnitude).max().item()
                    if integers:
                        ok = torch.equal(out, expected.to(dtype))
                    else:
                        worst = max(worst, error if dtype == torch.float32 else 0.0)
                        ok = error < (2**-16 if dtype == torch.float32 else 2**-8)
                    if not ok:
                        bad.append(f"rows {rows} overlap {overlap} {str(dtype)[6:]} {error:.1e}")
                rounded = q8_round(expected.bfloat16()).bfloat16()
                differ = (product(x, torch.bfloat16, True, overlap) != rounded).double().mean().item()
                if differ > (0 if integers else 0.01):
                    bad.append(f"rows {rows} overlap {overlap} q8 differ {differ:.4f}")
        what = "integers bit-equal" if integers else f"random, fp32 error / magnitude {worst:.1e}"
        report(f"{kind} {name}: {what}", not bad, f"{len(bad)} bad: " + "; ".join(bad[:6]) if bad else "")
    if kind != "default":
        x = random_x(256, groups * k, False)
        whole = product(x, torch.bfloat16, False, False)
        same = all(
            torch.equal(product(x[:rows], torch.bfloat16, False, False), whole[:rows]) for rows in (1, 7, 17, 100)
        )
        report(f"{kind} {name}: a row's bits are the same in every batch", same)
    if kind == "apart":
        together = wgmma_cuda.WgmmaProduct(*linear._packed, (n, k), groups, *WGMMA[kind])
        out = torch.empty(256, n, dtype=torch.float32, device="cuda")
        together(x, out, False, False)
        report(f"{kind} {name}: the bits of clusters", torch.equal(product(x, torch.float32, False, False), out))


def times(all_rows: tuple[int, ...]) -> None:
    """The planned kernels by rows: plain, overlapped with the kernel before, and with an earlier start of the next."""
    sums: dict[int, dict[str, float]] = {}
    for name, (n, k, groups) in SHAPES.items():
        copies = packed_copies(n, k)
        linears = [linear_of(copy, n, k, groups, plans.plan(n, k, groups)) for copy in copies]
        early = [linear_of(copy, n, k, groups, early_plan(n, k, groups)) for copy in copies]
        for rows in all_rows:
            x = random_x(rows, groups * k, False)
            outs = [torch.empty(rows, n, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
            paths: dict[str, Callable] = {}
            product = linears[0]._product(rows)
            if product is not None:
                kind = "few" if isinstance(product, skinny_cuda.SkinnyProduct) else "wgmma"
                paths["plain"] = lambda i, x=x, outs=outs: linears[i](x, outs[i % 2])  # noqa: B023
                paths["overlapped"] = lambda i, x=x, outs=outs: linears[i](x, outs[i % 2], overlap=True)  # noqa: B023
                if kind == "few":
                    paths["early"] = lambda i, x=x, outs=outs: early[i](x, outs[i % 2], overlap=True)  # noqa: B023
            if linears[0].partial_sums(x) is not None:  # as in the model; the reader's additions come on top
                paths["apart"] = lambda i, x=x: linears[i].partial_sums(x, overlap=True)  # noqa: B023
            if rows >= 256:
                paths["widen + cuBLAS"] = lambda i, x=x, outs=outs: linears[i]._many_rows(x, outs[i % 2], False)  # noqa: B023
            num = len(linears) * 2 if rows <= 256 else len(linears) if rows <= 1024 else 2
            row = {"shape": name, "rows": rows, "floor": floor_us(n, k, groups, rows)}
            for label, path in paths.items():
                try:
                    row[label] = time_us(lambda i, path=path: path(i % len(copies)), num)  # noqa: B023
                except Exception as error:
                    print(f"FAIL {name} rows {rows} {label}: {str(error)[:200]}")
            shown = "  ".join(f"{key} {row[key]:.2f}" for key in ("floor", *paths) if key in row)
            path = "widen" if product is None else kind
            print(
                f"{name:11} rows {rows:5} {path:5} cold read {COLD_US.get(name, float('nan')):5.1f} | {shown} us",
                flush=True,
            )
            results.append(row)
            if name in LAYER:
                entry = sums.setdefault(rows, {})
                best = min((row[key] for key in paths if key in row), default=float("nan"))
                planned = row.get("overlapped", row.get("widen + cuBLAS", float("nan")))
                planned = row.get("apart", planned)
                plain = row.get("plain", row.get("widen + cuBLAS", float("nan")))
                for key, value in (("floor", row["floor"]), ("plain", plain), ("overlapped", planned), ("best", best)):
                    entry[key] = entry.get(key, 0.0) + value
    for rows, entry in sums.items():
        print(f"layer       rows {rows:5} | " + "  ".join(f"{key} {value:.1f}" for key, value in entry.items()) + " us")
        results.append({"layer": rows, **entry})


def active_clusters() -> None:
    """How many clusters run at once when each CTA takes an SM for itself: a grid with more needs a second wave."""
    found = {}
    for size in (1, 2, 3, 4, 6, 8):
        geometry, pipeline = G(1, 4, size), P(1, 8, 1, ring=True)
        packed = torch.zeros(1, 64, 1, device="cuda")
        product = skinny_cuda.SkinnyProduct(packed, packed, (32, 4096), 1, geometry, (pipeline,))
        shared = 200 * 1024
        defines = product.defines(pipeline, False, False)
        kernel = nvrtc.load_kernel("dense_skinny.cu", "dense_skinny", defines, packed.device, shared_bytes=shared)
        attribute = (nvrtc._Attribute * 1)()
        attribute[0].id = nvrtc._CLUSTER_DIMENSION
        attribute[0].value[0:3] = (size, 1, 1)
        config = nvrtc._LaunchConfig((size, 1, 1), (128, 1, 1), shared, None, attribute, 1)
        count = ctypes.c_int()
        function = kernel._function
        result = nvrtc._driver().cuOccupancyMaxActiveClusters(ctypes.byref(count), function, ctypes.byref(config))
        found[size] = count.value if result == 0 else -result
    print("clusters at once, one CTA per SM, by size: " + "  ".join(f"{size}: {n}" for size, n in found.items()))
    results.append({"active_clusters": found})


def early_plan(n: int, k: int, groups: int) -> tuple[plans.Step, ...]:
    """The plan with the other moment at which the few-row kernel lets the next kernel start."""
    steps: list[plans.Step] = []
    for step in plans.plan(n, k, groups):
        if isinstance(step, plans.Few):
            pipelines = tuple(dataclasses.replace(p, early=not p.early) for p in step.pipelines)
            step = dataclasses.replace(step, pipelines=pipelines)
        steps.append(step)
    return tuple(steps)


def bf16_times() -> None:
    for name, (n, k) in BF16_SHAPES.items():
        for dtype in (torch.bfloat16, torch.float32):
            weight = torch.randint(-8, 9, (n, k), device="cuda").bfloat16()
            linear = Bf16Linear(weight)
            bad = []
            for rows in (1, 5, 16, 31, 64):
                x = random_x(rows, k, True)
                for options in ({}, {"overlap": True}, {"invariant": True}):
                    if not torch.equal(linear(x, dtype=dtype, **options), (x.double() @ weight.double().T).to(dtype)):
                        bad.append((rows, options))
            report(f"bf16 {name} {str(dtype)[6:]}", not bad, str(bad[:4]) if bad else "")
        copies = packed_copies(n, k, fp8=False)
        plain = [torch.randn(n, k, device="cuda").bfloat16() for _ in copies]
        products = [skinny_cuda.SkinnyProduct(packed, None, (n, k)) for packed, _ in copies]
        for rows in (1, 8, 16, 32, 64):
            x, out = random_x(rows, k, False), torch.empty(rows, n, dtype=torch.float32, device="cuda")
            num = 2 * len(copies)
            row = {
                "bf16": name, "rows": rows, "floor_us": floor_us(n, k, 1, rows, 2),
                "ours": time_us(lambda i: products[i % len(products)](x, out, False, False), num),  # noqa: B023
                "overlap": time_us(lambda i: products[i % len(products)](x, out, False, True), num),  # noqa: B023
                "cublas": time_us(lambda i: _cublas(x, plain[i % len(plain)], out), num),  # noqa: B023
            }  # fmt: skip
            results.append(row)
            print("bf16 " + "  ".join(f"{k} {v:.2f}" if isinstance(v, float) else f"{v}" for k, v in row.items()))


def compile_ahead(parts: set[str]) -> None:
    """Everything that will be launched, on all cores, before CUDA is touched."""
    jobs: list[Job] = []
    every, plain = ((False, False), (False, True), (True, False)), ((False, False),)

    def few(shape: tuple, geometry: skinny_cuda.Geometry | None, pipelines: tuple, outputs: tuple) -> None:
        n, k, groups, fp8 = shape
        packed = torch.empty(-(-n // 32), -(-k // (64 if fp8 else 32)), 1)
        product = skinny_cuda.SkinnyProduct(packed, packed if fp8 else None, (n, k), groups, geometry, pipelines)
        for p in product.pipelines:
            jobs.extend(("dense_skinny", product.defines(p, *output)) for output in outputs)

    def many(shape: tuple, slices: int | None, tiles: tuple, outputs: tuple, partial: bool = False) -> None:
        n, k, groups = shape
        packed = torch.empty(-(-n // 32), -(-k // 64), 1)
        if wgmma_cuda.WgmmaProduct.accepts((n, k), groups):
            product = wgmma_cuda.WgmmaProduct(packed, packed, (n, k), groups, slices, tiles, partial)
            for t in product.tiles:
                jobs.extend(("dense_wgmma", product.defines(t, *output)) for output in outputs)

    def planned(shape: tuple, plan: tuple[plans.Step, ...], outputs: tuple) -> None:
        for step in plan:
            if isinstance(step, plans.Few):
                few((*shape, True), step.geometry, step.pipelines, outputs)
            else:
                many(shape, step.slices, step.tiles, outputs)
                if step.leaves_partial:
                    many(shape, step.slices, step.tiles, ((True, False),), True)

    if "few" in parts:
        for shape in CHECKED.values():
            few((*shape, True), None, skinny_cuda.PIPELINES, every)
            few((*shape, True), *ring_check(*shape), every)
    if "many" in parts:
        for shape in CHECKED.values():
            for kind, (slices, tiles) in WGMMA.items():
                many(shape, slices, tiles, every if kind != "apart" else ((True, False),))
            many(shape, *WGMMA["apart"], ((True, False),), True)
            planned(shape, plans.plan(*shape), every)
    if "times" in parts:
        for shape in SHAPES.values():
            planned(shape, plans.plan(*shape), plain)
            planned(shape, early_plan(*shape), plain)
    if "compare" in parts:
        jobs += dense_compare.jobs()
    if "long" in parts:
        jobs += dense_long.jobs()
    if "bf16" in parts:
        for n, k in BF16_SHAPES.values():
            few((n, k, 1, False), None, skinny_cuda.PIPELINES, (plain[0], (True, False)))
    unique = list({(name, *sorted(job.items())): (name, job) for name, job in jobs}.values())
    start = time.perf_counter()
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("fork")) as pool:
        failures = [text for text in pool.map(compile_one, unique, chunksize=2) if text]
    print(f"compiled {len(unique)} kernels in {time.perf_counter() - start:.1f} s, {len(failures)} failed", flush=True)
    print(*failures[:3])


CHECKED = {
    "tiny": (64, 96, 1),
    "tiny groups": (128, 256, 2),
    "odd": (160, 320, 1),
    "wq_a+wkv": (1792, 5120, 1),
    "wo_a": (8192, 4096, 8),
    "down": (5120, 2304, 1),
    "wq_b": (32768, 1280, 1),
    "wo_b": (5120, 8192, 1),
}


def check_all(kinds: tuple[str, ...], small_rows: tuple[int, ...], large_rows: tuple[int, ...]) -> None:
    for kind in kinds:
        for name, (n, k, groups) in CHECKED.items():
            rows = small_rows if n * k < 10_000_000 else large_rows
            guarded(f"{kind} {name}", lambda: check(name, n, k, groups, rows, kind))  # noqa: B023


def run_part(part: str) -> None:
    print(f"== {part}: {torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    if part == "few":
        check_all(("skinny", "ring"), (1, 3, 8, 9, 16, 17, 32, 33, 64, 70), (1, 8, 16, 30))
    elif part == "bf16":
        guarded("bf16", bf16_times)
    elif part == "many":
        check_all(("wgmma", "wide", "apart"), (1, 17, 33, 64, 70, 129, 256, 300), (33, 70, 256))
        check_all(("default",), (1, 17, 64, 129, 300), (1, 8, 16, 32, 70, 256))
    elif part == "times":
        guarded("active clusters", active_clusters)
        guarded("times", lambda: times((1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 8192)))
    elif part == "compare":
        guarded("active clusters", active_clusters)
        guarded("compare", dense_compare.compare)
    elif part == "long":
        guarded("long", dense_long.compare)


PARTS = ("few", "bf16", "many", "times", "compare", "long")
USUAL = PARTS[:4]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default=",".join(USUAL))
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        run_part(arguments.part)
        if arguments.json:
            arguments.json.write_text(json.dumps(results))
        return
    wanted = [part for part in PARTS if part in arguments.only.split(",")]
    guarded("compile ahead", lambda: compile_ahead(set(wanted)))
    everything = []
    for part in wanted:
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            try:
                command = [sys.executable, __file__, "--part", part, "--json", file.name]
                status = subprocess.run(command, timeout=100).returncode
                print(f"== {part} ended with {status}", flush=True)
                everything += json.loads(Path(file.name).read_text() or "[]")
            except (subprocess.TimeoutExpired, json.JSONDecodeError) as error:
                print(f"FAIL {part}: {error}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(everything, indent=1))


if __name__ == "__main__":
    main()
