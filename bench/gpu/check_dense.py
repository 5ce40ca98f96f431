"""Dense products on a GPU: bits and errors against float64, then times over floor, then a search over geometries.

    python bench/gpu/check_dense.py [--json FILE] [--only check,times,search,bf16]

Times are medians of 5 replays of a CUDA graph whose launches rotate over more weights than L2 holds, per launch.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from deepinfer.kernels import dense, dense_packing, nvrtc

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
G = dense.Geometry
P = dense.Pipeline
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
    return codes.view(torch.float8_e4m3fn).to(torch.float64) * factors


def exact_product(x: Tensor, wide: Tensor, groups: int) -> Tensor:
    rows, n = x.shape[0], wide.shape[0]
    parts = wide.view(groups, n // groups, -1)
    return torch.einsum("rgk,gnk->rgn", x.double().view(rows, groups, -1), parts).flatten(1)


def report(name: str, ok: bool, detail: str = "") -> None:
    print(f"{'PASS' if ok else 'FAIL'} {name} {detail}", flush=True)
    results.append({"case": name, "pass": ok, "detail": detail})


def check(name: str, n: int, k: int, groups: int, all_rows: tuple[int, ...]) -> None:
    from deepinfer.ops.number_formats import q8_round

    for integers in (True, False):
        codes, scales = random_fp8(n, k, integers)
        linear = dense.Fp8Linear(codes, scales, groups=groups)
        wide = exact_wide(codes, scales)
        if integers:
            report(f"{name} widen", torch.equal(linear.widen().double(), wide))
        bad, worst = [], 0.0
        for rows in all_rows:
            x = random_x(rows, groups * k, integers)
            expected = exact_product(x, wide, groups)
            magnitude = exact_product(x.abs(), wide.abs(), groups)
            for options in ({}, {"overlap": True}, {"invariant": True}):
                for dtype in (torch.float32, torch.bfloat16):
                    out = torch.full((rows, n), torch.nan, dtype=dtype, device="cuda")
                    linear(x, out, **options)
                    if integers:
                        ok = torch.equal(out, expected.to(dtype))
                    else:
                        error = ((out.double() - expected).abs() / magnitude).max().item()
                        worst = max(worst, error if dtype == torch.float32 else 0.0)
                        ok = error < (2**-16 if dtype == torch.float32 else 2**-8)
                    if not ok:
                        bad.append(f"rows {rows} {options} {str(dtype)[6:]}")
                if groups > 1 or n % 32 == 0:
                    out = linear(x, quantize_output=True, **options)
                    rounded = q8_round(expected.bfloat16()).bfloat16()
                    differ = (out != rounded).double().mean().item()
                    if differ > (0 if integers else 0.01):
                        bad.append(f"rows {rows} {options} q8 differ {differ:.4f}")
        kind = "integers, bit-equal" if integers else f"random, worst fp32 error / magnitude {worst:.1e}"
        report(f"{name} {kind}", not bad, f"{len(bad)} bad: " + "; ".join(bad[:6]) if bad else "")
    x = random_x(256, groups * k, False)
    whole = linear(x, invariant=True)
    same = all(torch.equal(linear(x[:rows], invariant=True), whole[:rows]) for rows in (1, 7, 32, 100))
    small = all(torch.equal(linear(x[:rows]), whole[:rows]) for rows in (1, 7, 16, 32))
    report(f"{name} invariant", same, f"(the default up to 32 rows has the same bits: {small})")


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
            scales = dense_packing.pack_scales(
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
    """The default path of :class:`dense.Fp8Linear`, and programmatic launch where it exists."""
    sums: dict[int, list[float]] = {}
    for name, (n, k, groups) in SHAPES.items():
        linears = []
        for packed, scales in packed_copies(n, k):
            linear = dense.Fp8Linear.__new__(dense.Fp8Linear)
            linear.num_outputs, linear.num_inputs, linear.groups, linear._stored = n, k, groups, None
            linear._skinny = dense.SkinnyProduct(packed, scales, (n, k), groups)
            linears.append(linear)
        for rows in all_rows:
            x = random_x(rows, groups * k, False)
            outs = [torch.empty(rows, n, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
            num = len(linears) * (2 if rows <= 256 else 1)
            num = num if rows <= 1024 else 2
            row = {"shape": name, "rows": rows, "floor_us": floor_us(n, k, groups, rows)}

            def launch(i: int, options: dict, x: Tensor = x, linears: list = linears, outs: list = outs) -> None:
                linears[i % len(linears)](x, outs[i % 2], **options)

            variants = {"default": {}, "overlap": {"overlap": True}, "invariant": {"invariant": True}}
            for label, options in variants.items():
                if label == "overlap" and rows > dense.MAX_SKINNY_ROWS:
                    continue
                if label == "invariant" and not dense.MAX_SKINNY_ROWS < rows <= 256:
                    continue
                row[label] = time_us(lambda i, options=options: launch(i, options), num)
            if name in LAYER:
                entry = sums.setdefault(rows, [0.0, 0.0, 0.0])
                entry[0] += row["floor_us"]
                entry[1] += row["default"]
                entry[2] += row.get("overlap", row["default"])
            results.append(row)
            shown = "  ".join(f"{key} {row[key]:7.2f}" for key in variants if key in row)
            print(
                f"{name:11} rows {rows:5} floor {row['floor_us']:7.2f} cold {COLD_US[name]:5.1f} | {shown} us",
                flush=True,
            )
        del linears
    for rows, (floor, default, overlap) in sums.items():
        print(f"layer sum    rows {rows:5} floor {floor:7.2f} | default {default:7.2f} overlap {overlap:7.2f} us")
        results.append({"sum_rows": rows, "floor_us": floor, "default_us": default, "overlap_us": overlap})


def candidates(n: int, k: int, groups: int) -> list[dense.Geometry]:
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


def ctas_for(geometry: dense.Geometry, registers: int) -> int:
    return max(1, min(2048 // geometry.threads, 65536 // (registers * geometry.threads)))


def search(rows_list: tuple[int, ...] = (1, 16)) -> None:
    for name, (n, k, groups) in SHAPES.items():
        guarded(f"search {name}", lambda: search_shape(name, n, k, groups, rows_list))  # noqa: B023


def search_shape(name: str, n: int, k: int, groups: int, rows_list: tuple[int, ...]) -> None:
    copies = packed_copies(n, k)
    for rows in rows_list:
        x, out = random_x(rows, groups * k, False), torch.empty(rows, n, dtype=torch.bfloat16, device="cuda")

        def measure(geometry: dense.Geometry, pipeline: dense.Pipeline, overlap: bool = False) -> float:
            try:
                products = [dense.SkinnyProduct(*copy, (n, k), groups, geometry, (pipeline,)) for copy in copies]
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
        product = dense.SkinnyProduct(*copies[0], (n, k), groups, best[1], pipelines)
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(compile_one, [product.defines(p, False, False, False) for p in pipelines]))
        tuned = [(measure(best[1], pipeline), best[1], pipeline) for pipeline in pipelines]
        overlapped = measure(best[1], best[2], True)
        default = dense.choose_geometry(n // 32, -(-k // 64), n // 32 // groups, 24)
        at_default = [t for t, g, _ in table if g == default]
        print(f"search {name} rows {rows}: default {default} {at_default} best overlapped {overlapped:.2f}")
        for t, g, p in table[:5] + sorted(tuned, key=lambda entry: entry[0])[:4]:
            print(f"    {t:6.2f} us  wm {g.row_warps} wk {g.k_warps} cluster {g.cluster}  depth {p.depth} "
                  f"ctas {p.min_ctas} hint {p.load_hint}")  # fmt: skip
        sys.stdout.flush()
        for t, g, p in table + tuned:
            results.append({"search": name, "rows": rows, "us": t, "geometry": str(g), "pipeline": str(p)})


def search_pipeline(geometry: dense.Geometry, rows: int) -> dense.Pipeline:
    tiles = 1 if rows <= 8 else 2 if rows <= 16 else 4
    return P(tiles, 4 if tiles < 4 else 3, ctas_for(geometry, 128 if tiles < 4 else 168))


def search_steps(rows: int) -> tuple[tuple[int, int, int], ...]:
    """(depth, registers, load hint) to try at the best geometry."""
    return ((2, 96, 0), (3, 96, 0), (3, 128, 0), (5, 168, 0), (6, 168, 0), (4, 128, 1), (4, 128, 2))


def bf16_times() -> None:
    for name, (n, k) in BF16_SHAPES.items():
        for dtype in (torch.bfloat16, torch.float32):
            weight = torch.randint(-8, 9, (n, k), device="cuda").bfloat16()
            linear = dense.Bf16Linear(weight)
            bad = []
            for rows in (1, 5, 16, 31, 64):
                x = random_x(rows, k, True)
                for options in ({}, {"overlap": True}, {"invariant": True}):
                    if not torch.equal(linear(x, dtype=dtype, **options), (x.double() @ weight.double().T).to(dtype)):
                        bad.append((rows, options))
            report(f"bf16 {name} {str(dtype)[6:]}", not bad, str(bad[:4]) if bad else "")
        copies = packed_copies(n, k, fp8=False)
        plain = [torch.randn(n, k, device="cuda").bfloat16() for _ in copies]
        products = [dense.SkinnyProduct(packed, None, (n, k)) for packed, _ in copies]
        for rows in (1, 8, 16, 32, 64):
            x, out = random_x(rows, k, False), torch.empty(rows, n, dtype=torch.float32, device="cuda")
            num = 2 * len(copies)
            row = {
                "bf16": name, "rows": rows, "floor_us": floor_us(n, k, 1, rows, 2),
                "ours": time_us(lambda i: products[i % len(products)](x, out, False, False), num),  # noqa: B023
                "overlap": time_us(lambda i: products[i % len(products)](x, out, False, True), num),  # noqa: B023
                "cublas": time_us(lambda i: dense._cublas(x, plain[i % len(plain)], out), num),  # noqa: B023
            }  # fmt: skip
            results.append(row)
            print("bf16 " + "  ".join(f"{k} {v:.2f}" if isinstance(v, float) else f"{v}" for k, v in row.items()))


def compile_one(defines: dict[str, int]) -> str:
    try:
        nvrtc.compile_cubin("dense_skinny.cu", defines, "sm_90a")
        return ""
    except Exception as error:
        return str(error)[:400]


def compile_ahead(parts: set[str]) -> None:
    """Everything that will be launched, on all cores, before CUDA is touched."""
    jobs: list[dict[str, int]] = []

    def add(shape: tuple, geometry: dense.Geometry | None, pipelines: tuple, outputs: tuple, overlaps: tuple) -> None:
        n, k, groups, fp8 = shape
        packed = torch.empty(-(-n // 32), -(-k // (64 if fp8 else 32)), 1)
        product = dense.SkinnyProduct(packed, packed if fp8 else None, (n, k), groups, geometry, pipelines)
        for pipeline in product.pipelines:
            jobs.extend(product.defines(pipeline, *output, overlap) for output in outputs for overlap in overlaps)

    if "check" in parts:
        every = ((False, False), (False, True), (True, False))
        for n, k, groups in [*CHECKED.values()]:
            add((n, k, groups, True), None, dense.PIPELINES, every, (False, True))
    if "times" in parts:
        for n, k, groups in SHAPES.values():
            add((n, k, groups, True), None, dense.PIPELINES, ((False, False),), (False, True))
    if "search" in parts:
        for n, k, groups in SHAPES.values():
            for geometry in candidates(n, k, groups):
                for rows in (1, 16):
                    pipeline = search_pipeline(geometry, rows)
                    add((n, k, groups, True), geometry, (pipeline,), ((False, False),), (False,))
    if "bf16" in parts:
        for n, k in BF16_SHAPES.values():
            add((n, k, 1, False), None, dense.PIPELINES, ((False, False), (True, False)), (False, True))
    unique = list({tuple(sorted(job.items())): job for job in jobs}.values())
    start = time.perf_counter()
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("fork")) as pool:
        failures = [text for text in pool.map(compile_one, unique, chunksize=2) if text]
    print(
        f"compiled {len(unique)} kernels in {time.perf_counter() - start:.1f} s, {len(failures)} failed", *failures[:3]
    )


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default="check,times,search,bf16")
    arguments = parser.parse_args()
    parts = set(arguments.only.split(","))
    guarded("compile ahead", lambda: compile_ahead(parts))
    print(torch.cuda.get_device_name(), torch.__version__)
    if "check" in parts:
        for name, (n, k, groups) in CHECKED.items():
            small = n * k < 10_000_000
            rows = (1, 3, 8, 9, 16, 17, 32, 33, 64, 70, 256) if small else (1, 8, 16, 30, 70)
            guarded(f"check {name}", lambda: check(name, n, k, groups, rows))  # noqa: B023
    if "times" in parts:
        guarded("times", lambda: times((1, 8, 16, 32, 64, 128, 256, 8192)))
    if "bf16" in parts:
        guarded("bf16", bf16_times)
    if "search" in parts:
        guarded("search", search)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
