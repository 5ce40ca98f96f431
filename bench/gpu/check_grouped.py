"""The routed experts' own kernel for many pairs on a GPU: bits and errors against float64, times of tiles, the whole.

    python bench/gpu/check_grouped.py [--json FILE] [--rows 512,8192] [--only exact,tiles,whole]

Sizes of the released model: 384 experts, 6 per row, gate-up [4608, 5120], down [5120, 2304]. The weights are random
bytes in the packed layout, a hundred times L2. TFLOP/s count the pairs that exist, not the padding. Times are medians
of repeated launches; rows are routed at random (pairs per expert spread as by chance), ``even`` (all alike: what
padding and the spread cost) or ``skewed`` (some experts have several times the mean, as trained routers have them).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from deepinfer.kernels import nvrtc
from deepinfer.kernels.moe import grouped_wgmma, packing
from deepinfer.kernels.moe.expert_blocks import ExpertBlocks, order_pairs
from deepinfer.kernels.moe.expert_sum import sum_experts
from deepinfer.kernels.moe.grouped_wgmma import FEW, MANY, GroupedExperts, GroupedProduct, Tile, gather
from deepinfer.ops.number_formats import q4u_decode, q8_round

START = time.time()
DEVICE = torch.device("cuda")
EXPERTS, HIDDEN, WIDTH, TOP, LIMIT = 384, 5120, 2304, 6, 10.0
ROWS = (512, 1024, 2048, 4096, 8192, 16384)
BYTES_PER_S = 4.2e12
VARIANTS: dict[str, tuple[Tile, int]] = {  # with the order's block
    "160": (MANY, 16),  # 256 weight rows x 160 pairs, 2 warpgroups
    "160b8": (MANY, 8),
    "128": (Tile(128, 2, 2, 1, 7), 16),
    "4x80": (Tile(80, 4, 1, 2, 4), 16),  # 256 weight rows, 4 warpgroups: more warps that decode
    "4x64": (FEW, 16),
    "4x64b8": (FEW, 8),
    "2x64k2": (Tile(64, 2, 2, 2, 6), 16),
    "2cta64": (Tile(64, 2, 1, 2, 3, 2), 16),  # 128 weight rows, two CTAs per SM: one's end under the other's products
    "3x160": (Tile(160, 3, 1, 2, 2), 16),
}
results: list[dict] = []


def say(*parts: object) -> None:
    print(f"[{time.time() - START:5.1f}]", *parts, flush=True)


def guarded(name: str, action: Callable[[], object]) -> None:
    try:
        action()
    except Exception:
        lines = traceback.format_exc().strip().splitlines()
        say(f"FAIL {name}: raised", " | ".join(line.strip() for line in lines[-6:])[-700:])
        results.append({"case": name, "error": lines[-1]})


def report(name: str, ok: bool, detail: str) -> None:
    say("PASS" if ok else "FAIL", name, detail)
    results.append({"case": name, "ok": ok, "detail": detail})


def median_us(action: Callable[[], object], launches: int = 3, repeats: int = 3) -> float:
    action()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(launches):
            action()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / launches)
    return statistics.median(times)


def random_packed(n: int, k: int) -> Tensor:
    packed = torch.empty(EXPERTS, k // 64, n // 64, packing.TILE_BYTES, dtype=torch.uint8, device=DEVICE)
    packed.random_(0, 256)
    packed[..., packing.CODE_BYTES :].random_(114 + 126, 122 + 126)
    return packed


def random_x(rows: int) -> Tensor:
    return q8_round(torch.randn(rows, HIDDEN, device=DEVICE).bfloat16()).bfloat16()


def routing(rows: int, kind: str = "random") -> tuple[Tensor, Tensor]:
    if kind == "even":
        chosen = torch.arange(rows * TOP, device=DEVICE).view(rows, TOP) % EXPERTS
    else:
        scores = torch.rand(rows, EXPERTS, device=DEVICE)
        if kind == "skewed":
            scores = scores.log().neg().log().neg() + 0.7 * torch.randn(EXPERTS, device=DEVICE)  # Gumbel and a bias
        chosen = scores.topk(TOP, 1).indices
    return chosen.int(), torch.rand(rows, TOP, device=DEVICE) * 0.5


def tflops(pairs: int, parameters: int, us: float) -> float:
    return 2 * pairs * parameters / us / 1e6


class Weights:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.gate_up, self.down = random_packed(2 * WIDTH, HIDDEN), random_packed(HIDDEN, WIDTH)
        self.products = {
            "gate_up": GroupedProduct(self.gate_up, True, LIMIT),
            "down": GroupedProduct(self.down, False),
        }

    def engine(self) -> GroupedExperts:
        return GroupedExperts(self.gate_up, self.down, HIDDEN, WIDTH, EXPERTS, LIMIT)

    def wide(self, name: str, expert: int) -> Tensor:
        """float64 ``[N, K]``, gate rows first."""
        rows = q4u_decode(*packing.unpack(self.products[name].packed[expert])).double()
        if name == "down":
            return rows
        back = torch.empty_like(rows)
        back[packing.pair_gate_and_up(torch.arange(2 * WIDTH, device=DEVICE)[:, None])[:, 0]] = rows
        return back


def compile_all(weights: Weights) -> None:
    """Into the cache, several at a time; the compiler works outside of Python's lock."""
    wanted = [p.defines(t, block) for p in weights.products.values() for t, block in VARIANTS.values() if p.accepts(t)]

    def compile_one(defines: dict[str, int]) -> None:
        guarded(f"compile {defines}", lambda: nvrtc.compile_cubin("moe_wgmma.cu", defines, "sm_90a"))

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(compile_one, wanted))
    say(f"{len(wanted)} kernels compiled")


class Step:
    """Operands of both products for one routing."""

    def __init__(self, x: Tensor, chosen: Tensor, weights: Tensor, block: int) -> None:
        self.blocks = order_pairs(chosen, EXPERTS, block)
        self.counters = torch.zeros(2, dtype=torch.int32, device=DEVICE)
        self.lines, self.weights = gather(x, weights, self.blocks, self.counters)
        capacity = self.lines.shape[1]
        self.inner = torch.empty(WIDTH // 64, capacity, 64, dtype=torch.bfloat16, device=DEVICE)
        self.values = torch.empty(capacity, HIDDEN, dtype=torch.bfloat16, device=DEVICE)

    def run(self, product: GroupedProduct, tile: Tile) -> Tensor:
        source, out = (self.lines, self.inner) if product.swiglu else (self.inner, self.values)
        self.counters.zero_()
        ctas = tile.min_ctas * nvrtc.num_multiprocessors(DEVICE)
        product(source, self.weights, out, self.blocks, self.counters[:1], tile, ctas)
        return out


def rows_of(lines: Tensor) -> Tensor:
    """Rows ``[capacity, K]`` of the kernel's lines: pieces in order again, then columns."""
    tiles, capacity, _ = lines.shape
    pieces = torch.arange(8, device=DEVICE) ^ (torch.arange(capacity, device=DEVICE) % 8)[:, None]
    words = lines.view(tiles, capacity, 8, 8).gather(2, pieces[None, :, :, None].expand(tiles, -1, -1, 8))
    rows = words.view(tiles, capacity, 2, 4, 4, 2).transpose(3, 4).reshape(tiles, capacity, 64)
    return rows.transpose(0, 1).flatten(1)


def check_exact(weights: Weights) -> None:
    torch.manual_seed(1)
    counts = {0: 299, 5: 137, 77: 33, 200: 1, 317: 8, 383: 160}  # expert: pairs
    rows = 300
    x, chosen = random_x(rows), torch.full((rows, TOP), -1, dtype=torch.int32, device=DEVICE)
    for column, (expert, count) in enumerate(counts.items()):
        chosen[torch.randperm(rows, device=DEVICE)[:count], column] = expert
    route_weights = torch.rand(rows, TOP, device=DEVICE) * 0.5
    first: dict[str, Tensor] = {}
    for name, (tile, block) in VARIANTS.items():
        step = Step(x, chosen, route_weights, block)
        for part, product in weights.products.items():
            if not product.accepts(tile):
                say(f"tile {name} does not fit {part}")
                continue
            found = step.run(product, tile)
            found = (rows_of(found) if product.swiglu else found)[step.blocks.place.clamp_min(0).long()]
            found = torch.where(step.blocks.place[:, None] >= 0, found, 0)
            if part not in first:
                first[part] = found
                guarded(f"exact {part}", lambda: compare(weights, part, x, chosen, route_weights, first))  # noqa: B023
            report(f"bits of tile {name} {part}", torch.equal(found, first[part]), "those of the first tile")
    engine = weights.engine()
    values, place = engine.forward(x, chosen, route_weights)
    there = place >= 0
    same = torch.equal(values[place[there].long()], first["down"][there])
    report("forward", same, "the bits of the products one by one")
    alone, place = engine.forward(x[:40].contiguous(), chosen[:40].contiguous(), route_weights[:40].contiguous())
    there = place >= 0
    same = torch.equal(alone[place[there].long()], first["down"][: 40 * TOP][there])
    report("rows in a smaller batch", same, "have the same bits")


def compare(
    weights: Weights, part: str, x: Tensor, chosen: Tensor, route_weights: Tensor, first: dict[str, Tensor]
) -> None:
    errors, sizes, wrong, number = 0.0, 0.0, 0, 0
    for expert in chosen[chosen >= 0].unique().tolist():
        pairs = (chosen.flatten() == expert).nonzero().flatten()
        inputs = x[pairs // TOP] if part == "gate_up" else first["gate_up"][pairs]
        exact = inputs.double() @ weights.wide(part, expert).T
        if part == "gate_up":
            gate, up = exact.chunk(2, 1)
            exact = torch.nn.functional.silu(gate.clamp_max(LIMIT)) * up.clamp(-LIMIT, LIMIT)
            exact = q8_round((exact * route_weights.flatten()[pairs, None].double()).float()).double()
        found = first[part][pairs].double()
        wrong += int((found != exact.bfloat16().double()).sum())
        errors += float((found - exact).square().sum())
        sizes, number = sizes + float(exact.square().sum()), number + found.numel()
    share, rms = wrong / number, (errors / sizes) ** 0.5
    # Q8 and bf16 round once; float32 sums move few values to the other neighbour, which for Q8 is 1/16 or more away.
    bounds = (2e-3, 5e-3) if part == "gate_up" else (0.03, 2.3e-3)
    detail = f"not the rounded exact value {share:.2e} (<= {bounds[0]}), rms error / rms {rms:.2e} (<= {bounds[1]})"
    report(f"exact {part}", share <= bounds[0] and rms <= bounds[1], detail)


def padding(blocks: ExpertBlocks) -> float:
    return int(blocks.num_ordered) / blocks.num_pairs


def check_tiles(weights: Weights, all_rows: list[int]) -> None:
    parameters = {"gate_up": 2 * WIDTH * HIDDEN, "down": HIDDEN * WIDTH}
    say("tile: gate-up us (TFLOP/s), down us (TFLOP/s); padding is columns multiplied over pairs")
    for rows in all_rows:
        kinds = ("random", "even", "skewed") if rows == 8192 else ("random",)
        for kind in kinds:
            torch.manual_seed(2)
            x, (chosen, route_weights) = random_x(rows), routing(rows, kind)
            active = chosen.unique().numel()
            for name, (tile, block) in VARIANTS.items():
                if kind != "random" and name not in ("160", "160b8", "128"):
                    continue
                step = Step(x, chosen, route_weights, block)
                found = {}
                for part, product in weights.products.items():
                    if not product.accepts(tile):
                        continue

                    def measure(product=product, tile=tile, part=part, step=step, found=found):
                        found[part] = median_us(lambda: step.run(product, tile))

                    guarded(f"tile {name} {part} rows {rows} {kind}", measure)
                record = {"case": "tile", "tile": name, "rows": rows, "kind": kind, "padding": padding(step.blocks)}
                texts = []
                for part, us in found.items():
                    rate = tflops(rows * TOP, parameters[part], us)
                    floor = active * parameters[part] * 17 / 32 / BYTES_PER_S * 1e6
                    record |= {f"{part}_us": us, f"{part}_tflops": rate, f"{part}_read_floor_us": floor}
                    texts.append(f"{part} {us:7.0f} ({rate:3.0f}) x{us / floor:.2f} of reading")
                results.append(record)
                say(f"rows {rows:5d} {kind:6s} tile {name:7s} padding {record['padding']:.3f}", "; ".join(texts))


def check_whole(weights: Weights, all_rows: list[int]) -> None:
    engine = weights.engine()
    for rows in all_rows:
        for kind in ("random", "skewed") if rows == 8192 else ("random",):
            torch.manual_seed(3)
            x, (chosen, route_weights) = random_x(rows), routing(rows, kind)
            blocks = order_pairs(chosen, EXPERTS, engine.block)
            counters = torch.zeros(2, dtype=torch.int32, device=DEVICE)
            values, place = engine.forward(x, chosen, route_weights, blocks)

            def whole(x=x, chosen=chosen, route_weights=route_weights):
                values, place = engine.forward(x, chosen, route_weights)
                sum_experts(values, TOP, place=place)

            us = {
                "order": median_us(lambda c=chosen: order_pairs(c, EXPERTS, engine.block)),
                "gather": median_us(lambda x=x, w=route_weights, b=blocks, c=counters: gather(x, w, b, c)),
                "sum": median_us(lambda v=values, p=place: sum_experts(v, TOP, place=p)),
                "whole": median_us(whole),
            }
            rate = tflops(rows * TOP, 3 * WIDTH * HIDDEN, us["whole"])
            results.append({"case": "whole", "rows": rows, "kind": kind, "tflops": rate, **us})
            say(f"rows {rows:5d} {kind}:", ", ".join(f"{k} {v:.0f} us" for k, v in us.items()), f"= {rate:.0f} TFLOP/s")
            del values, place, x
            torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--only", default="exact,tiles,whole")
    arguments = parser.parse_args()
    only, rows = arguments.only.split(","), [int(r) for r in arguments.rows.split(",")]
    weights = Weights()
    say(f"{torch.cuda.get_device_name()}, tiles FEW {grouped_wgmma.FEW}, MANY {grouped_wgmma.MANY}")
    compile_all(weights)
    checks: dict[str, Callable[[], None]] = {
        "exact": lambda: check_exact(weights),
        "tiles": lambda: check_tiles(weights, rows),
        "whole": lambda: check_whole(weights, rows),
    }
    for name, check in checks.items():
        if name in only:
            guarded(name, check)
            torch.cuda.empty_cache()
        if arguments.json:
            arguments.json.write_text(json.dumps(results, indent=1))
    failed = [r["case"] for r in results if "error" in r or r.get("ok") is False]
    say(f"{len(results)} results, failed: {failed}")


if __name__ == "__main__":
    main()
