"""The routed experts' FP8 kernels for many pairs on a GPU: errors against float64 beside those in bf16, times of both.

    python bench/gpu/check_grouped_fp8.py [--json FILE] [--rows 1024,8192] [--only exact,tiles,whole]

Sizes and weights of ``check_grouped.py``. Errors are against the same operands multiplied in float64, so what they show
is the sum of the tensor cores. Behind Q8 a result of gate-up may be a neighbour, so it is compared with what Q8 rounds
as well.
"""

from __future__ import annotations

import argparse
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import silu

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.gpu import check_grouped as base
from bench.gpu.check_grouped import DEVICE, EXPERTS, HIDDEN, LIMIT, TOP, WIDTH, guarded, median_us, report, say
from deepinfer.kernels import nvrtc
from deepinfer.kernels.moe import grouped_fp8, grouped_wgmma
from deepinfer.kernels.moe.expert_blocks import order_pairs
from deepinfer.kernels.moe.expert_sum import sum_experts
from deepinfer.kernels.moe.grouped_fp8 import BLOCK, FEW, LINE, MANY, GroupedFp8Experts, GroupedProduct, Lines, Tile
from deepinfer.ops.number_formats import q8_round

ROWS = (512, 1024, 2048, 4096, 8192, 16384)
TILES = {"160": MANY, "4x80": FEW, "128": Tile(128, 2, 2, 5), "160s3": Tile(160, 2, 2, 3)}
PARAMETERS = {"gate_up": 2 * WIDTH * HIDDEN, "down": HIDDEN * WIDTH}


class Step:
    """Operands of both FP8 products for one routing; what the kernels have to write starts as NaN."""

    def __init__(self, x: Tensor, chosen: Tensor, weights: Tensor) -> None:
        self.blocks = order_pairs(chosen, EXPERTS, BLOCK)
        self.counters = torch.zeros(2, dtype=torch.int32, device=DEVICE)
        self.lines, self.weights = grouped_fp8.gather(x, weights, self.blocks, self.counters)
        capacity = self.weights.shape[0]
        self.codes = torch.full((WIDTH // LINE, capacity, LINE), 0x7F, dtype=torch.uint8, device=DEVICE)
        self.exponents = torch.zeros(WIDTH // 32, capacity, dtype=torch.uint8, device=DEVICE)
        self.inner = Lines(self.codes, torch.ones(capacity, device=DEVICE))
        self.values = torch.full((capacity, HIDDEN), torch.nan, dtype=torch.bfloat16, device=DEVICE)

    def run(self, product: GroupedProduct, tile: Tile) -> None:
        self.counters.zero_()
        x, out, exponents = (
            (self.lines, self.codes, self.exponents) if product.swiglu else (self.inner, self.values, None)
        )
        ctas = nvrtc.num_multiprocessors(DEVICE)
        product(x, self.weights, out, exponents, self.blocks, self.counters[:1], tile, ctas)

    def align(self) -> None:
        self.inner = grouped_fp8.align(self.codes, self.exponents, self.blocks)


def rows_of(lines: Lines) -> Tensor:
    """float32 ``[capacity, K]``: pieces in order again, then columns, times the power of the row."""
    num, capacity, _ = lines.codes.shape
    pieces = torch.arange(8, device=DEVICE) ^ (torch.arange(capacity, device=DEVICE) % 8)[:, None]
    rows = lines.codes.view(num, capacity, 8, 16).gather(2, pieces[None, :, :, None].expand(num, -1, -1, 16)).flatten(2)
    byte = torch.arange(LINE, device=DEVICE)
    column = byte // 32 * 32 + 8 * (byte // 4 % 4) + byte // 16 % 2
    column += 2 * torch.tensor([2, 0, 3, 1], device=DEVICE)[byte % 4]
    back = torch.empty_like(rows)
    back[..., column] = rows
    return back.view(torch.float8_e4m3fn).float().transpose(0, 1).flatten(1) * lines.powers[:, None]


def one_power(rows: Tensor) -> Tensor:
    power = torch.exp2((rows.abs().amax(1, keepdim=True).float().clamp_min(1e-4) / 448).log2().ceil())
    return (rows.float() / power).to(torch.float8_e4m3fn).float() * power


def compile_all(products: dict[str, GroupedProduct]) -> None:
    jobs = [("moe_fp8.cu", p.defines(t, BLOCK)) for p in products.values() for t in TILES.values() if p.accepts(t)]
    jobs.append(("moe_fp8_rows.cu", {"GATHER": 1, "LINES": HIDDEN // LINE, "TOP": TOP}))
    jobs.append(("moe_fp8_rows.cu", {"GATHER": 0, "LINES": WIDTH // LINE, "BLOCK": BLOCK, "EXPERTS": EXPERTS}))
    with ThreadPoolExecutor(12) as pool:
        list(pool.map(lambda job: guarded(f"compile {job}", lambda: nvrtc.compile_cubin(*job, "sm_90a")), jobs))
    say(f"{len(jobs)} kernels compiled")


def relative(found: Tensor, exact: Tensor) -> tuple[float, float]:
    """Sums of squares: of the error and of the exact values."""
    return float((found.double() - exact).square().sum()), float(exact.square().sum())


def check_exact(weights: base.Weights, products: dict[str, GroupedProduct]) -> None:
    """A step with experts of very different numbers of pairs."""
    torch.manual_seed(1)
    counts = {0: 299, 5: 137, 77: 33, 200: 1, 317: 8, 383: 160}  # expert: pairs
    rows = 300
    x, chosen = base.random_x(rows), torch.full((rows, TOP), -1, dtype=torch.int32, device=DEVICE)
    for column, (expert, count) in enumerate(counts.items()):
        chosen[torch.randperm(rows, device=DEVICE)[:count], column] = expert
    route_weights = torch.rand(rows, TOP, device=DEVICE) * 0.5
    there = (chosen.flatten() >= 0).nonzero().flatten()
    first: dict[str, Tensor] = {}
    for name, tile in TILES.items():
        step = Step(x, chosen, route_weights)
        places = step.blocks.place[there].long()
        if not first:
            same = torch.equal(rows_of(step.lines)[places], one_power(x)[there // TOP])
            report("gather", same, "rows rounded to one power of two")
            near = (rows_of(step.lines)[places] == x[there // TOP].float()).float().mean()
            say(f"of the gathered values {float(near):.6f} are those of Q8")
        step.run(products["gate_up"], tile)
        raw = step.codes[:, places].clone(), step.exponents[:, places].clone()
        groups = rows_of(Lines(step.codes.clone(), torch.ones_like(step.weights)))[places]
        groups *= torch.exp2(step.exponents[:, places].float() - 128).T.repeat_interleave(32, 1)
        step.align()
        inner = rows_of(step.inner)[places]
        step.run(products["down"], tile)
        found = {"codes": raw[0], "exponents": raw[1], "inner": inner, "down": step.values[places]}
        if not first:
            first = found
            power = torch.exp2(raw[1].amax(0).float() - 128)[:, None]
            same = torch.equal(inner, (groups / power).to(torch.float8_e4m3fn).float() * power)
            report("align", same, "results of gate-up rounded to one power of two")
        for key, value in found.items():
            report(f"bits of tile {name} {key}", torch.equal(value, first[key]), "those of the first tile")
    engine = GroupedFp8Experts(weights.gate_up, weights.down, LIMIT)
    values, place = engine.forward(x, chosen, route_weights)
    report("forward", torch.equal(values[place[there].long()], first["down"]), "the bits of the products one by one")
    values, place = engine.forward(x[:40].contiguous(), chosen[:40].contiguous(), route_weights[:40].contiguous())
    few = there[there < 40 * TOP]
    report(
        "rows in a smaller batch", torch.equal(values[place[few].long()], first["down"][: len(few)]), "the same bits"
    )
    compare(weights, x, chosen, route_weights, there, first)


def compare(
    weights: base.Weights, x: Tensor, chosen: Tensor, route_weights: Tensor, there: Tensor, first: dict[str, Tensor]
) -> None:
    engine = weights.engine()
    values, place = engine.forward(x, chosen, route_weights)
    faithful = values[place[there].long()]
    blocks = order_pairs(chosen, EXPERTS, 16)
    step = base.Step(x, chosen, route_weights, 16)
    of_bf16 = base.rows_of(step.run(weights.products["gate_up"], grouped_wgmma.MANY))[blocks.place[there].long()]
    sums: dict[str, list[tuple[float, float]]] = {}
    experts, operands = chosen.flatten()[there], one_power(x)
    for expert in experts.unique().tolist():
        mine = (experts == expert).nonzero().flatten()
        gate, up = (operands[there[mine] // TOP].double() @ weights.wide("gate_up", expert).T).chunk(2, 1)
        exact = silu(gate.clamp_max(LIMIT)) * up.clamp(-LIMIT, LIMIT) * route_weights.flatten()[there[mine], None]
        rounded = q8_round(exact.float()).double()
        wide = weights.wide("down", expert)
        for name, found, truth in (
            ("gate-up fp8, before Q8", first["inner"][mine], exact),
            ("gate-up bf16, before Q8", of_bf16[mine], exact),
            ("gate-up fp8, behind Q8", first["inner"][mine], rounded),
            ("gate-up bf16, behind Q8", of_bf16[mine], rounded),
            ("down fp8", first["down"][mine], first["inner"][mine].double() @ wide.T),
            ("both fp8", first["down"][mine], rounded @ wide.T),
            ("both bf16", faithful[mine], rounded @ wide.T),
            ("both fp8, Q8 left out", first["down"][mine], exact @ wide.T),
            ("both bf16, Q8 left out", faithful[mine], exact @ wide.T),
        ):
            sums.setdefault(name, []).append(relative(found, truth))
    found = {name: (sum(e for e, _ in pairs) / sum(s for _, s in pairs)) ** 0.5 for name, pairs in sums.items()}
    base.results.append({"case": "errors", **found})
    for name, error in found.items():
        say(f"rms error / rms: {name:24s} {error:.2e}")
    report("down", found["down fp8"] < 1e-2, f"error {found['down fp8']:.2e} (<= 1e-2)")
    report("both", found["both fp8"] < 5e-2, f"error {found['both fp8']:.2e} (<= 5e-2)")


def check_tiles(products: dict[str, GroupedProduct], all_rows: list[int]) -> None:
    say("tile: gate-up us (TFLOP/s), down us (TFLOP/s)")
    for rows in all_rows:
        for kind in ("random", "skewed") if rows == 8192 else ("random",):
            torch.manual_seed(2)
            x, (chosen, route_weights) = base.random_x(rows), base.routing(rows, kind)
            step = Step(x, chosen, route_weights)
            for name, tile in TILES.items():
                if kind == "skewed" and name != "160":
                    continue
                found = {part: median_us(lambda p=p, t=tile, s=step: s.run(p, t)) for part, p in products.items()}
                rates = {part: base.tflops(rows * TOP, PARAMETERS[part], us) for part, us in found.items()}
                record = {f"{part}_us": us for part, us in found.items()}
                record |= {f"{part}_tflops": rate for part, rate in rates.items()}
                base.results.append({"case": "tile", "tile": name, "rows": rows, "kind": kind, **record})
                texts = [f"{part} {us:6.0f} ({rates[part]:4.0f})" for part, us in found.items()]
                say(f"rows {rows:5d} {kind:6s} tile {name:6s}", ", ".join(texts), f"sum {sum(found.values()):6.0f}")


def check_whole(weights: base.Weights, all_rows: list[int]) -> None:
    fp8, bf16 = GroupedFp8Experts(weights.gate_up, weights.down, LIMIT), weights.engine()
    for rows in all_rows:
        torch.manual_seed(3)
        x, (chosen, route_weights) = base.random_x(rows), base.routing(rows)
        step, blocks = Step(x, chosen, route_weights), order_pairs(chosen, EXPERTS, BLOCK)
        values, place = fp8.forward(x, chosen, route_weights, blocks)

        def whole(engine, x=x, chosen=chosen, route_weights=route_weights, blocks=blocks):
            values, place = engine.forward(x, chosen, route_weights, blocks)
            return sum_experts(values, TOP, place=place)

        us = {
            "gather": median_us(lambda x=x, w=route_weights, s=step: grouped_fp8.gather(x, w, s.blocks, s.counters)),
            "align": median_us(step.align),
            "sum": median_us(lambda v=values, p=place: sum_experts(v, TOP, place=p)),
            "whole": median_us(lambda: whole(fp8)),
            "whole in bf16": median_us(lambda: whole(bf16)),
        }
        rate = base.tflops(rows * TOP, 3 * WIDTH * HIDDEN, us["whole"])
        base.results.append({"case": "whole", "rows": rows, "tflops": rate, **us})
        say(f"rows {rows:5d}:", ", ".join(f"{k} {v:.0f} us" for k, v in us.items()), f"= {rate:.0f} TFLOP/s")
        del values, place, x, step
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--only", default="exact,tiles,whole")
    arguments = parser.parse_args()
    only, rows = arguments.only.split(","), [int(r) for r in arguments.rows.split(",")]
    weights = base.Weights()
    products = {
        "gate_up": GroupedProduct(weights.gate_up, True, LIMIT),
        "down": GroupedProduct(weights.down, False),
    }
    say(f"{torch.cuda.get_device_name()}, tiles FEW {FEW}, MANY {MANY}")
    compile_all(products)
    checks = {
        "exact": lambda: check_exact(weights, products),
        "tiles": lambda: check_tiles(products, rows),
        "whole": lambda: check_whole(weights, rows),
    }
    for name, check in checks.items():
        if name in only:
            guarded(name, check)
            torch.cuda.empty_cache()
        if arguments.json:
            arguments.json.write_text(json.dumps(base.results, indent=1))
    failed = [r["case"] for r in base.results if "error" in r or r.get("ok") is False]
    say(f"{len(base.results)} results, failed: {failed}")


if __name__ == "__main__":
    main()
