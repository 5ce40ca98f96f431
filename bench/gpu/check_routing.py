"""The router in one launch or apart, the product beside it, and small bf16 products: bits first, then microseconds.

    python bench/gpu/check_routing.py [--json FILE]

Times are medians of 7 replays of a CUDA graph, per launch, with weights that L2 cannot hold. Sizes of the released
model: 384 experts, 6 per row, hidden 5120; gate-up of the shared expert [4608, 5120], its down product [5120, 2304].
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.gpu.check_moe import same_order
from deepinfer.kernels.dense.linear import Bf16Linear, Fp8Linear, _cublas
from deepinfer.kernels.moe import router_cuda
from deepinfer.kernels.moe.router import Router
from deepinfer.kernels.moe.router_cuda import LogitsTile
from deepinfer.ops.moe import route

DEVICE = torch.device("cuda")
EXPERTS, HIDDEN, WIDTH, TOP, BLOCK = 384, 5120, 2304, 6, 8
TILES = ((1, 1), (2, 1), (4, 1), (8, 1), (8, 2), (8, 4))
ROWS = (1, 6, 8, 32, 64, 128, 256, 384)
BF16_SHAPES = {"head weights": (32, 5120), "index key": (128, 512), "ratio 1": (512, 5120), "ratio 2": (1024, 5120)}
START = time.time()
results: list[dict[str, Any]] = []
failed: list[str] = []


def say(*parts: object) -> None:
    print(f"[{time.time() - START:5.1f}]", *parts, flush=True)


def report(name: str, ok: bool, detail: str = "") -> None:
    say("PASS" if ok else "FAIL", name, detail)
    results.append({"case": name, "ok": ok, "detail": detail})
    if not ok:
        failed.append(name)


def graph_of(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def time_us(action: Callable[[int], object], count: int) -> float:
    """Median over replays of the time of ``action(0)`` to ``action(count - 1)``, each."""
    graph = graph_of(lambda: [action(i) for i in range(count)])
    graph.replay()
    times = []
    for _ in range(7):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / count)
    return statistics.median(times)


def random_fp8(n: int, k: int) -> Fp8Linear:
    codes = (torch.randn(n, k, device=DEVICE) * 0.3).to(torch.float8_e4m3fn)
    return Fp8Linear(codes, torch.randint(118, 122, (n // 32, k // 32), dtype=torch.uint8, device=DEVICE))


def random_gate() -> Tensor:
    return (torch.randn(EXPERTS, HIDDEN, device=DEVICE) * 2 / HIDDEN**0.5).bfloat16()


def poisoned(rows: int) -> tuple[Tensor, Tensor]:
    experts = torch.full((rows, TOP), -7, dtype=torch.int32, device=DEVICE)
    return experts, torch.full((rows, TOP), torch.nan, device=DEVICE)


def check_router(routers: list[Router], whole: Tensor) -> None:
    """One launch against launches apart (bits) and float64, for every tile, and 200 replays back to back."""
    first = routers[0]
    bias, image_bias = first.bias, first.image_bias
    assert image_bias is not None
    arrivals = torch.zeros(router_cuda.num_counters(), dtype=torch.int32, device=DEVICE)
    for rows in (1, 2, 7, 9, 33, 64, 65, 127, 200, 256, 383, 512):
        x = whole[:rows]
        is_image = torch.arange(rows, device=DEVICE) % 5 == 1
        positions = torch.arange(rows, device=DEVICE, dtype=torch.int32)
        positions[rows // 2 + 1 :: 7] = -1
        rest = (bias, image_bias, is_image.view(torch.uint8), positions, 1.5)
        expected, weights = poisoned(rows)
        router_cuda.select(router_cuda.logits(x, first.gate), *rest, expected, weights, None, 0)
        biases = torch.where(is_image[:, None], image_bias, bias).double()
        exact, exact_weights = route(x, first.gate.double(), biases, TOP, 1.5)
        exact[positions < 0], exact_weights[positions < 0] = -1, 0
        same = bool((expected == exact).all())
        error = float((weights - exact_weights).abs().max())
        report(f"apart, {rows} rows, float64", same and error < 1e-5, f"error {error:.1e}")
        wrong = []
        for tiles, groups in TILES:
            tile = LogitsTile(tiles, groups)
            if tiles * 8 >= 2 * rows + 8 or not router_cuda.can_route(rows, tile, DEVICE):
                continue
            for _ in range(3):
                found, found_weights = poisoned(rows)
                blocks = first.forward(x, block=BLOCK, way="cuda apart").blocks
                assert blocks is not None
                for buffer in blocks.buffers:
                    buffer.fill_(-9)
                router_cuda.route(
                    x, first.gate, *rest, found, found_weights, blocks.buffers, BLOCK, arrivals=arrivals, tile=tile
                )
                is_right = torch.equal(found, expected) and torch.equal(found_weights, weights)
                if not is_right or not same_order(blocks, expected) or bool(arrivals.any()):
                    wrong.append((tiles, groups))
        report(f"one launch, {rows} rows, every tile", not wrong, str(wrong[:6]) if wrong else "")
    for rows in (1, 64, 256):
        x = whole[:rows]
        expected_bits = [r.forward(x, block=BLOCK, way="cuda apart", invariant=True) for r in routers[:8]]
        found_bits: list[Any] = []

        def step(x: Tensor = x, found_bits: list[Any] = found_bits) -> None:
            found_bits[:] = [r.forward(x, block=BLOCK) for r in (*routers[:8], *routers[:8])]

        graph = graph_of(step)
        wrong_replays = 0
        for _ in range(200):
            for found in found_bits:
                found.experts.fill_(-7)
            graph.replay()
            pairs = zip(found_bits, expected_bits * 2, strict=True)
            wrong_replays += not all(
                torch.equal(a.experts, b.experts) and torch.equal(a.weights, b.weights) for a, b in pairs
            )
        report(f"200 replays of 16 launches, {rows} rows", wrong_replays == 0, f"{wrong_replays} differ")


def check_beside(routers: list[Router], gate_ups: list[Fp8Linear], downs: list[Fp8Linear]) -> None:
    """A chain of overlapped launches in which the input changes at every turn, in the same memory."""
    for rows in (1, 8, 33, 64, 128, 256, 384):
        inner = [torch.randn(rows, WIDTH, device=DEVICE).bfloat16() for _ in range(12)]
        x = torch.empty(rows, HIDDEN, dtype=torch.bfloat16, device=DEVICE)
        outputs = [torch.full((rows, 2 * WIDTH), torch.nan, device=DEVICE) for _ in inner]

        def turn(i: int, overlap: bool, beside: bool) -> Tensor:
            downs[i % len(downs)].forward(inner[i], out=x, overlap=overlap)  # noqa: B023
            routing = routers[i].forward(x, block=BLOCK)  # noqa: B023
            gate_ups[i % len(gate_ups)].forward(x, out=outputs[i], overlap=overlap, beside=beside)  # noqa: B023
            return routing.experts

        expected = []
        for i in range(len(inner)):
            chosen = turn(i, False, False)
            expected.append((chosen.clone(), outputs[i].clone()))
        for beside in (False, True):
            chosen_now: list[Tensor] = []

            def step(beside: bool = beside, chosen_now: list[Tensor] = chosen_now) -> None:
                chosen_now[:] = [turn(i, True, beside) for i in range(12)]

            graph, wrong = graph_of(step), 0
            for _ in range(20):
                for out in outputs:
                    out.fill_(torch.nan)
                graph.replay()
                found = zip(chosen_now, outputs, strict=True)
                same = [torch.equal(a, c) and torch.equal(b, d) for (a, b), (c, d) in zip(found, expected, strict=True)]
                wrong += same.count(False)
            report(f"gate-up {'beside' if beside else 'behind'} the router, {rows} rows", wrong == 0, f"{wrong} wrong")


def time_router(routers: list[Router], gate_ups: list[Fp8Linear], whole: Tensor) -> None:
    count = len(routers)
    for rows in ROWS:
        x = whole[:rows]
        row: dict[str, Any] = {"case": "times", "rows": rows}
        for name, way in (("one launch", "cuda"), ("apart", "cuda apart")):
            row[name] = time_us(lambda i, w=way: routers[i].forward(x, block=BLOCK, way=w), count)  # noqa: B023
        row["logits"] = time_us(lambda i: router_cuda.logits(x, routers[i].gate), count)  # noqa: B023

        def product(i: int, beside: bool = False) -> Tensor:
            return gate_ups[i % 4].forward(x, dtype=torch.float32, overlap=True, beside=beside)  # noqa: B023

        row["gate-up"] = time_us(product, count)

        def both(i: int, beside: bool) -> None:
            routers[i].forward(x, block=BLOCK)  # noqa: B023
            product(i, beside=beside)

        row["behind"] = time_us(lambda i: both(i, False), count)
        row["beside"] = time_us(lambda i: both(i, True), count)
        results.append(row)
    for rows in (64, 128, 256):
        x = whole[:rows]
        row = {"case": "tiles", "rows": rows}
        for tile in (LogitsTile(*size) for size in TILES[1:]):
            if not router_cuda.can_route(rows, tile, DEVICE):
                continue
            choice = poisoned(rows)
            blocks = routers[0].forward(x, block=BLOCK).blocks
            assert blocks is not None

            def launch(i: int, tile: LogitsTile = tile, choice: Any = choice, blocks: Any = blocks) -> None:
                r = routers[i]
                router_cuda.route(
                    x, r.gate, r.bias, None, None, None, 1.5, *choice, blocks.buffers, BLOCK,  # noqa: B023
                    arrivals=r._counters, tile=tile,
                )  # fmt: skip

            row[f"{tile.row_tiles} x {tile.groups}"] = time_us(launch, count)
        results.append(row)


def time_bf16() -> None:
    for name, (n, k) in BF16_SHAPES.items():
        num = int(min(200, 1 + 100e6 // (2 * n * k)))
        linears = [Bf16Linear(torch.randn(n, k, device=DEVICE).bfloat16()) for _ in range(num)]
        for rows in (1, 16, 32, 64, 128, 256, 512):
            x = torch.randn(rows, k, device=DEVICE).bfloat16()
            out = torch.empty(rows, n, device=DEVICE)
            first = linears[0]
            assert first._skinny is not None
            first._skinny(x, out.fill_(torch.nan), False, True)
            by_few = out.clone()
            first._passes(x, out.fill_(torch.nan), False, True)
            scale = x.double().abs() @ first.weight.double().abs().T
            error = float(((out - x.double() @ first.weight.double().T).abs() / scale).max())
            report(f"bf16 {name}, {rows} rows", torch.equal(out, by_few) and error < 2**-20, f"error {error:.1e}")
            results.append({
                "case": f"bf16 {name}", "rows": rows, "used": "ours" if rows <= first._max_rows else "cublas",
                "few": time_us(lambda i: linears[i % num]._skinny(x, out, False, True), max(24, num)),  # noqa: B023
                "passes": time_us(lambda i: linears[i % num]._passes(x, out, False, True), max(24, num)),  # noqa: B023
                "cublas": time_us(lambda i: _cublas(x, linears[i % num].weight, out), max(24, num)),  # noqa: B023
            })  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    bias, image_bias = torch.randn(2, EXPERTS, device=DEVICE) * 0.1
    routers = [Router(random_gate(), bias, image_bias, TOP, 1.5) for _ in range(40)]
    gate_ups = [random_fp8(2 * WIDTH, HIDDEN) for _ in range(4)]
    downs = [random_fp8(HIDDEN, WIDTH) for _ in range(4)]
    whole = torch.randn(512, HIDDEN, device=DEVICE).bfloat16()
    parts: tuple[Callable[[], None], ...] = (
        lambda: check_router(routers, whole),
        lambda: check_beside(routers, gate_ups, downs),
        lambda: time_router(routers, gate_ups, whole),
        time_bf16,
    )
    for part in parts:
        part()
        if arguments.json:
            arguments.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    for row in results:
        if "rows" in row:
            print("  ".join(f"{k} {v:.2f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()))
    say(f"{len(failed)} failed:", failed)


if __name__ == "__main__":
    main()
