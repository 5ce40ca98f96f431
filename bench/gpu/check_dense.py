"""Dense products on a GPU: bits and errors against float64, times over floor, a search over configurations.

    python bench/gpu/check_dense.py [--json FILE] [--only few,many,bf16]

By default it checks every kernel and times the plans of deepinfer/kernels/dense/plans.py. ``--only`` also takes
``search_ring``, ``search_few`` and ``search_many``, which try other configurations.

Times are medians of 5 replays of a CUDA graph whose launches rotate over more weights than L2 holds, per launch. Each
part runs in a process of its own, so that one that breaks the CUDA context does not take the others along.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from deepinfer.kernels import nvrtc
from deepinfer.kernels.dense import packing, plans, skinny_cuda, wgmma_cuda
from deepinfer.kernels.dense.linear import Bf16Linear, Fp8Linear, _cublas

BYTES_PER_S, BF16_FLOPS = 4.2e12, 770e12
ROTATION_BYTES = 240e6
# name -> (N, K, groups); the cold read of a buffer of that size, measured with a plain kernel
SHAPES = {
    "wq_a+wkv": (1792, 5120, 1),
    "wq_b": (32768, 1280, 1),
    "wq_b+index": (36864, 1280, 1),
    "wo_a": (8192, 4096, 8),
    "wo_b": (5120, 8192, 1),
    "gate_up": (4608, 5120, 1),
    "down": (5120, 2304, 1),
}
LAYER = ("wq_a+wkv", "wq_b", "wo_a", "wo_b", "gate_up", "down")
COLD_US = {
    "wq_a+wkv": 4.0,
    "wq_b": 11.3,
    "wq_b+index": 12.6,
    "wo_a": 9.4,
    "wo_b": 11.3,
    "gate_up": 7.1,
    "down": 4.5,
}
BF16_SHAPES = {"compressor": (1024, 5120), "router": (384, 5120), "weights_proj": (32, 5120), "index wk": (128, 512)}
G = skinny_cuda.Geometry
P = skinny_cuda.Pipeline
results: list[dict] = []


def guarded(name: str, action: Callable[[], None]) -> None:
    try:
        action()
    except Exception:
        lines = traceback.format_exc().strip().splitlines()
        print(f"FAIL {name}: raised\n    " + "\n    ".join(lines[-6:]), flush=True)
        results.append({"case": name, "error": lines[-1]})


def random_fp8(n: int, k: int, integers: bool, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator(device="cuda").manual_seed(seed)
    if integers:
        values = torch.randint(-8, 9, (n, k), generator=g, device="cuda").float()
        codes = values.to(torch.float8_e4m3fn).view(torch.uint8)
        scales = torch.randint(126, 129, (-(-n // 32), -(-k // 32)), generator=g, device="cuda").to(torch.uint8)
        return codes, scales
    codes = torch.randint(0, 254, (n, k), generator=g, device="cuda", dtype=torch.int16)
    codes = (codes + (codes >= 0x7F)).to(torch.uint8)
    return codes, torch.randint(114, 124, (-(-n // 32), -(-k // 32)), generator=g, device="cuda").to(torch.uint8)


def random_x(rows: int, k: int, integers: bool, seed: int = 1) -> Tensor:
    g = torch.Generator(device="cuda").manual_seed(seed)
    if integers:
        return torch.randint(-2, 3, (rows, k), generator=g, device="cuda").bfloat16()
    from deepinfer.ops.number_formats import q8_round

    return q8_round(torch.randn(rows, k, generator=g, device="cuda").bfloat16()).bfloat16()


def exact_wide(codes: Tensor, scales: Tensor) -> Tensor:
    n, k = codes.shape
    factors = torch.exp2(scales.double() - 127).repeat_interleave(32, 0)[:n].repeat_interleave(32, 1)[:, :k]
    return codes.view(torch.float8_e4m3fn).float().double() * factors


def exact_product(x: Tensor, wide: Tensor, groups: int) -> Tensor:
    rows, n = x.shape[0], wide.shape[0]
    parts = wide.view(groups, n // groups, -1)
    return torch.einsum("rgk,gnk->rgn", x.double().view(rows, groups, -1), parts).flatten(1)


def report(name: str, ok: bool, detail: str = "") -> None:
    print(f"{'PASS' if ok else 'FAIL'} {name} {detail}", flush=True)
    results.append({"case": name, "pass": ok, "detail": detail})


def kernel_of(kind: str, packed: tuple, shape: tuple[int, int, int]):
    """A kernel that takes any number of rows: ``skinny``, ``ring`` or ``wgmma``; None where it refuses the shape."""
    n, k, groups = shape
    if kind == "wgmma":
        accepted = wgmma_cuda.WgmmaProduct.accepts((n, k), groups)
        return wgmma_cuda.WgmmaProduct(*packed, (n, k), groups) if accepted else None
    if kind == "skinny":
        return skinny_cuda.SkinnyProduct(*packed, (n, k), groups)
    geometry, pipelines = ring_check(n, k, groups)
    return skinny_cuda.SkinnyProduct(*packed, (n, k), groups, geometry, pipelines)


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


def time_us(launch: Callable[[int], None], num: int) -> float:
    """Microseconds per launch; ``launch(i)`` queues number ``i`` of ``num``."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        launch(0)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for i in range(num):
                launch(i)
        graph.replay()
        times = []
        for _ in range(5):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3 / num)
    return statistics.median(times)


def packed_copies(n: int, k: int, fp8: bool = True) -> list[tuple[Tensor, Tensor | None]]:
    """Random packed weights, more than L2 holds."""
    count = max(2, -(-int(ROTATION_BYTES) // (n * k * (1 if fp8 else 2))))
    count = min(count, 96)
    blocks, chunks = -(-n // 32), -(-k // (64 if fp8 else 32))
    copies: list[tuple[Tensor, Tensor | None]] = []
    for _ in range(count):
        if fp8:
            packed = torch.randint(0, 256, (blocks, chunks, 2048), device="cuda", dtype=torch.uint8)
            scales = packing.pack_scales(
                torch.randint(114, 124, (blocks, 2 * chunks), device="cuda", dtype=torch.uint8)
            )
            copies.append((packed, scales))
        else:
            copies.append((torch.randn(blocks, chunks, 1024, device="cuda").bfloat16(), None))
    return copies


def floor_us(n: int, k: int, groups: int, rows: int, weight_bytes: float = 1.001) -> float:
    moved = n * k * weight_bytes + rows * (groups * k + n) * 2
    return max(moved / BYTES_PER_S, 2 * n * k * rows / BF16_FLOPS) * 1e6


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
            print(f"{name:11} rows {rows:5} {path:5} cold read {COLD_US[name]:5.1f} | {shown} us", flush=True)
            results.append(row)
            if name in LAYER:
                entry = sums.setdefault(rows, {})
                best = min((row[key] for key in paths if key in row), default=float("nan"))
                planned = row.get("overlapped", row.get("widen + cuBLAS", float("nan")))
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


def linear_of(packed: tuple, n: int, k: int, groups: int, plan: tuple[plans.Step, ...]) -> Fp8Linear:
    """An operator over weights that are packed already."""
    linear = Fp8Linear.__new__(Fp8Linear)
    linear.num_outputs, linear.num_inputs, linear.groups, linear._stored = n, k, groups, None
    linear._use_packed(*packed, plan)
    return linear


def early_plan(n: int, k: int, groups: int) -> tuple[plans.Step, ...]:
    """The plan with the other moment at which the few-row kernel lets the next kernel start."""
    steps: list[plans.Step] = []
    for step in plans.plan(n, k, groups):
        if isinstance(step, plans.Few):
            pipelines = tuple(dataclasses.replace(p, early=not p.early) for p in step.pipelines)
            step = dataclasses.replace(step, pipelines=pipelines)
        steps.append(step)
    return tuple(steps)


def ring_candidates(n: int, k: int, groups: int, rows: int) -> list[tuple[skinny_cuda.Geometry, skinny_cuda.Pipeline]]:
    """Geometries with equal shares for one or two CTAs per SM, and rings of several sizes."""
    found, row_tiles = [], 1 if rows <= 8 else 2 if rows <= 16 else 4
    chunks, blocks = -(-k // 64), n // 32
    for per_sm in (1, 2):
        geometries = skinny_cuda.equal_shares(blocks, chunks, blocks // groups, 132 * per_sm)
        shares = [g.row_warps * -(-chunks // g.cluster) for g in geometries]
        kept = [g for g, share in zip(geometries, shares, strict=True) if share <= 1.16 * shares[0]][:4]
        for base in kept:
            for factor in (1, 2, 3, 4):
                g = dataclasses.replace(base, k_warps=base.k_warps * factor)
                warps, per_warp = g.row_warps * g.k_warps, -(-chunks // (g.cluster * g.k_warps))
                if warps > 20 or per_warp < 2:
                    continue
                depths = {max(2, min(per_warp, kb * 1024 // per_sm // (2048 * warps))) for kb in (56, 96, 150)}
                for depth in sorted(depths):
                    pipeline = P(row_tiles, depth, per_sm, ring=True, early=True)
                    packed = torch.empty(blocks, chunks, 1)
                    try:
                        product = skinny_cuda.SkinnyProduct(packed, packed, (n, k), groups, g, (pipeline,))
                    except AssertionError:
                        continue
                    if (product.shared_bytes(pipeline) + 1280) * per_sm <= 227 * 1024:
                        found.append((g, pipeline))
    return found


RING_ROWS = (1, 8, 16, 32)


def search_ring() -> None:
    for name, shape in SHAPES.items():
        guarded(f"search ring {name}", lambda: search_ring_shape(name, *shape))  # noqa: B023


def search_ring_shape(name: str, n: int, k: int, groups: int) -> None:
    copies = packed_copies(n, k)
    by_geometry: dict[skinny_cuda.Geometry, dict[int, float]] = {}
    for rows in RING_ROWS:
        x, out = random_x(rows, groups * k, False), torch.empty(rows, n, dtype=torch.bfloat16, device="cuda")

        def measure(g: skinny_cuda.Geometry, p: skinny_cuda.Pipeline, overlap: bool) -> float:
            try:
                products = [skinny_cuda.SkinnyProduct(*copy, (n, k), groups, g, (p,)) for copy in copies]
                count = len(products)
                return time_us(lambda i: products[i % count](x, out, False, overlap), 2 * count)  # noqa: B023
            except nvrtc.KernelError as error:
                print(f"FAIL {name} {g} {p}: {str(error)[:150]}")
                return float("inf")

        table = []
        for g, p in ring_candidates(n, k, groups, rows):
            plain, early = measure(g, p, False), measure(g, p, True)
            table.append((min(plain, early), plain, early, g, p))
            fastest = by_geometry.setdefault(g, {})
            fastest[rows] = min(fastest.get(rows, float("inf")), plain, early)
            results.append({"ring": name, "rows": rows, "plain": plain, "early": early, "g": str(g), "p": str(p)})
        print(f"search ring {name} rows {rows}: floor {floor_us(n, k, groups, rows):.2f}, {len(table)} tried")
        by_plain = sorted(table, key=lambda entry: entry[1])[:3]
        for _, plain, early, g, p in sorted(table, key=lambda entry: entry[0])[:4] + by_plain:
            print(f"    plain {plain:6.2f} early {early:6.2f} us  wm {g.row_warps} wk {g.k_warps} cluster {g.cluster} "
                  f"depth {p.depth} per SM {p.min_ctas}")  # fmt: skip
    common = [
        (sum(us[r] for r in RING_ROWS[:3]), g, us) for g, us in by_geometry.items() if set(RING_ROWS[:3]) <= set(us)
    ]
    for total, g, us in sorted(common, key=lambda entry: entry[0])[:3]:
        shown = "  ".join(f"{r}: {t:.2f}" for r, t in us.items())
        print(f"    common {total:6.2f} wm {g.row_warps} wk {g.k_warps} cluster {g.cluster} | {shown}", flush=True)


def candidates(n: int, k: int, groups: int) -> list[skinny_cuda.Geometry]:
    """Geometries worth a try: 100 to 1400 CTAs, two to ten chunks per warp and pass."""
    found = []
    chunks, blocks = -(-k // 64), n // 32
    for row_warps, k_warps in ((1, 2), (1, 4), (2, 1), (2, 2), (2, 4), (4, 1), (4, 2)):
        if blocks // groups % row_warps != 0:
            continue
        for cluster in (1, 2, 4, 8):
            ctas, per_warp = -(-blocks // row_warps) * cluster, chunks / cluster / k_warps
            if 100 <= ctas <= 1400 and 2 <= per_warp <= 20 and chunks / cluster <= 64:
                found.append(G(row_warps, k_warps, cluster))
    return found


def ctas_for(geometry: skinny_cuda.Geometry, registers: int) -> int:
    return max(1, min(2048 // geometry.threads, 65536 // (registers * geometry.threads)))


def search(rows_list: tuple[int, ...] = (1, 16)) -> None:
    for name, (n, k, groups) in SHAPES.items():
        guarded(f"search {name}", lambda: search_shape(name, n, k, groups, rows_list))  # noqa: B023


def search_shape(name: str, n: int, k: int, groups: int, rows_list: tuple[int, ...]) -> None:
    copies = packed_copies(n, k)
    for rows in rows_list:
        x, out = random_x(rows, groups * k, False), torch.empty(rows, n, dtype=torch.bfloat16, device="cuda")

        def measure(geometry: skinny_cuda.Geometry, pipeline: skinny_cuda.Pipeline, overlap: bool = False) -> float:
            try:
                products = [skinny_cuda.SkinnyProduct(*copy, (n, k), groups, geometry, (pipeline,)) for copy in copies]
                num = len(products) * 2
                return time_us(lambda i: products[i % len(products)](x, out, False, overlap), num)  # noqa: B023
            except (nvrtc.KernelError, AssertionError):
                return float("inf")

        table = []
        for geometry in candidates(n, k, groups):
            pipeline = search_pipeline(geometry, rows)
            table.append((measure(geometry, pipeline), geometry, pipeline))
        table.sort(key=lambda entry: entry[0])
        best = table[0]
        pipelines = [P(best[2].row_tiles, d, ctas_for(best[1], r), hint) for d, r, hint in search_steps(rows)]
        product = skinny_cuda.SkinnyProduct(*copies[0], (n, k), groups, best[1], pipelines)
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(compile_one, [("dense_skinny", product.defines(p, False, False)) for p in pipelines]))
        tuned = [(measure(best[1], pipeline), best[1], pipeline) for pipeline in pipelines]
        overlapped = measure(best[1], best[2], True)
        default = skinny_cuda.choose_geometry(n // 32, -(-k // 64), n // 32 // groups, 24)
        at_default = [t for t, g, _ in table if g == default]
        print(f"search {name} rows {rows}: default {default} {at_default} best overlapped {overlapped:.2f}")
        for t, g, p in table[:5] + sorted(tuned, key=lambda entry: entry[0])[:4]:
            print(f"    {t:6.2f} us  wm {g.row_warps} wk {g.k_warps} cluster {g.cluster}  depth {p.depth} "
                  f"ctas {p.min_ctas} hint {p.load_hint}")  # fmt: skip
        sys.stdout.flush()
        for t, g, p in table + tuned:
            results.append({"search": name, "rows": rows, "us": t, "geometry": str(g), "pipeline": str(p)})


def search_pipeline(geometry: skinny_cuda.Geometry, rows: int) -> skinny_cuda.Pipeline:
    tiles = 1 if rows <= 8 else 2 if rows <= 16 else 4
    return P(tiles, 4 if tiles < 4 else 3, ctas_for(geometry, 128 if tiles < 4 else 168))


def search_steps(rows: int) -> tuple[tuple[int, int, int], ...]:
    """(depth, registers, load hint) to try at the best geometry."""
    return ((2, 96, 0), (3, 96, 0), (3, 128, 0), (5, 168, 0), (6, 168, 0), (4, 128, 1), (4, 128, 2))


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


def wgmma_tiles(rows: int) -> list[wgmma_cuda.Tile]:
    """Tiles worth a try for a number of rows."""
    T = wgmma_cuda.Tile  # noqa: N806
    return {
        1: [T(16, 2, 1, 8, 2), T(16, 2, 1, 5, 4), T(16, 2, 2, 5, 2)],
        16: [T(16, 2, 1, 8, 2), T(16, 2, 1, 5, 4), T(16, 2, 2, 5, 2)],
        32: [T(32, 2, 1, 8, 2), T(32, 2, 1, 4, 3), T(32, 2, 2, 5, 2)],
        64: [T(64, 2, 1, 6, 2), T(64, 2, 1, 4, 2), T(64, 2, 1, 8, 1), T(64, 2, 2, 8, 1)],
        128: [T(128, 2, 1, 8, 1), T(128, 2, 1, 4, 2), T(128, 2, 2, 6, 1), T(64, 2, 2, 8, 1)],
        256: [T(256, 2, 1, 5, 1), T(128, 2, 2, 6, 1), T(128, 2, 1, 4, 2)],
    }[rows]


SEARCH_ROWS = (1, 16, 32, 64, 128, 256)


def wgmma_clusters(n: int, k: int) -> list[int]:
    tiles, chunks = n // 128, -(-k // 64)
    return [c for c in (1, 2, 3, 4, 6, 8) if 100 <= tiles * c <= 330 and chunks / c >= 4]


def search_many() -> None:
    for name, (n, k, groups) in SHAPES.items():
        copies = packed_copies(n, k)
        for rows in SEARCH_ROWS:
            x, out = random_x(rows, groups * k, False), torch.empty(rows, n, dtype=torch.bfloat16, device="cuda")
            table = []
            for cluster in wgmma_clusters(n, k):
                for tile in wgmma_tiles(rows):
                    try:
                        products = [wgmma_cuda.WgmmaProduct(*c, (n, k), groups, cluster, (tile,)) for c in copies]
                        if not products[0].tiles:
                            continue
                        us = time_us(
                            lambda i, all=products, x=x, y=out: all[i % len(all)](x, y, False, True), 2 * len(copies)
                        )
                    except nvrtc.KernelError as error:
                        print(f"FAIL {name} {cluster} {tile}: {str(error)[:150]}")
                        continue
                    table.append((us, cluster, tile))
                    results.append({"search": name, "rows": rows, "us": us, "cluster": cluster, "tile": str(tile)})
            table.sort(key=lambda entry: entry[0])
            default = wgmma_cuda.choose_cluster(n, -(-k // 64))
            print(
                f"search wgmma {name} rows {rows}: default cluster {default}, floor {floor_us(n, k, groups, rows):.2f}"
            )
            for us, cluster, t in table[:4]:
                print(
                    f"    {us:6.2f} us  cluster {cluster} {t.weight_rows} x {t.rows} {t.stages} stages {t.min_ctas}/SM"
                )
            sys.stdout.flush()


def compile_one(job: tuple[str, dict[str, int]]) -> str:
    try:
        nvrtc.compile_cubin(job[0] + ".cu", job[1], "sm_90a")
        return ""
    except Exception as error:
        return str(error)[:400]


def compile_ahead(parts: set[str]) -> None:
    """Everything that will be launched, on all cores, before CUDA is touched."""
    jobs: list[tuple[str, dict[str, int]]] = []
    every, plain = ((False, False), (False, True), (True, False)), ((False, False),)

    def few(shape: tuple, geometry: skinny_cuda.Geometry | None, pipelines: tuple, outputs: tuple) -> None:
        n, k, groups, fp8 = shape
        packed = torch.empty(-(-n // 32), -(-k // (64 if fp8 else 32)), 1)
        product = skinny_cuda.SkinnyProduct(packed, packed if fp8 else None, (n, k), groups, geometry, pipelines)
        for p in product.pipelines:
            jobs.extend(("dense_skinny", product.defines(p, *output)) for output in outputs)

    def many(shape: tuple, cluster: int | None, tiles: tuple, outputs: tuple) -> None:
        n, k, groups = shape
        packed = torch.empty(-(-n // 32), -(-k // 64), 1)
        if wgmma_cuda.WgmmaProduct.accepts((n, k), groups):
            product = wgmma_cuda.WgmmaProduct(packed, packed, (n, k), groups, cluster, tiles)
            for t in product.tiles:
                jobs.extend(("dense_wgmma", product.defines(t, *output)) for output in outputs)

    def planned(shape: tuple, plan: tuple[plans.Step, ...], outputs: tuple) -> None:
        for step in plan:
            if isinstance(step, plans.Few):
                few((*shape, True), step.geometry, step.pipelines, outputs)
            else:
                many(shape, step.cluster, step.tiles, outputs)

    if "few" in parts:
        for shape in CHECKED.values():
            few((*shape, True), None, skinny_cuda.PIPELINES, every)
            few((*shape, True), *ring_check(*shape), every)
    if "many" in parts:
        for shape in CHECKED.values():
            many(shape, None, wgmma_cuda.TILES, every)
            planned(shape, plans.plan(*shape), every)
    if "times" in parts:
        for shape in SHAPES.values():
            planned(shape, plans.plan(*shape), plain)
            planned(shape, early_plan(*shape), plain)
    if "search_ring" in parts:
        for shape in SHAPES.values():
            for rows in RING_ROWS:
                for geometry, pipeline in ring_candidates(*shape, rows):
                    few((*shape, True), geometry, (pipeline,), plain)
    if "search_few" in parts:
        for shape in SHAPES.values():
            for geometry in candidates(*shape):
                for rows in (1, 16):
                    few((*shape, True), geometry, (search_pipeline(geometry, rows),), plain)
    if "search_many" in parts:
        for shape in SHAPES.values():
            for cluster in wgmma_clusters(*shape[:2]):
                for rows in SEARCH_ROWS:
                    many(shape, cluster, tuple(wgmma_tiles(rows)), plain)
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
    elif part == "search_few":
        guarded("search", search)
    elif part == "many":
        check_all(("wgmma",), (1, 17, 33, 64, 70, 129, 256, 300), (33, 70, 256))
        check_all(("default",), (1, 17, 64, 129, 300), (1, 8, 16, 32, 70, 256))
    elif part == "times":
        guarded("active clusters", active_clusters)
        guarded("times", lambda: times((1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 8192)))
    elif part == "search_ring":
        guarded("search ring", search_ring)
    elif part == "search_many":
        guarded("search", search_many)


PARTS = ("few", "bf16", "many", "times", "search_ring", "search_few", "search_many")
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
                status = subprocess.run(command, timeout=90).returncode
                print(f"== {part} ended with {status}", flush=True)
                everything += json.loads(Path(file.name).read_text() or "[]")
            except (subprocess.TimeoutExpired, json.JSONDecodeError) as error:
                print(f"FAIL {part}: {error}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(everything, indent=1))


if __name__ == "__main__":
    main()
