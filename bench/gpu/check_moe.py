"""Router and routed experts on a GPU: bits and errors against float64, times over floor, a search over tile shapes.

    python bench/gpu/check_moe.py [--json FILE] [--only router,small,exact,times,invariant,prefill,search]

Times are medians of 5 replays of a CUDA graph whose launches rotate over routings (or router weights) that L2 cannot
hold, per launch. Sizes of the released model: 384 experts, 6 per row, gate-up [4608, 5120], down [5120, 2304].
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from deepinfer.kernels import moe_humming
from deepinfer.kernels.expert_blocks import order_pairs
from deepinfer.kernels.expert_inputs import quantize_activation
from deepinfer.kernels.expert_sum import sum_experts
from deepinfer.kernels.moe import ExpertInput, PackedExperts, build_experts
from deepinfer.kernels.router import Router, Routing
from deepinfer.kernels.swiglu import swiglu_quantized
from deepinfer.ops.moe import route
from deepinfer.ops.number_formats import q4u_decode, q8_round

START = time.time()
DEVICE = torch.device("cuda")
EXPERTS, HIDDEN, WIDTH, TOP, LIMIT = 384, 5120, 2304, 6, 10.0
BYTES_PER_S = 4.2e12
DECODE_ROWS = (1, 2, 4, 8, 32, 64, 128, 256)
results: list[dict] = []


def say(*parts: object) -> None:
    print(f"[{time.time() - START:5.1f}]", *parts, flush=True)


def guarded(name: str, action: Callable[[], None]) -> None:
    begin = time.time()
    try:
        action()
    except Exception:
        lines = traceback.format_exc().strip().splitlines()
        say(f"FAIL {name}: raised", " | ".join(line.strip() for line in lines[-6:])[-700:])
        results.append({"case": name, "error": lines[-1]})
    say(f"-- {name}: {time.time() - begin:.1f} s")


def report(name: str, ok: bool, detail: str = "") -> None:
    say("PASS" if ok else "FAIL", name, detail)
    results.append({"case": name, "ok": ok, "detail": detail})


def graph_us(actions: list[Callable[[], object]], replays: int = 5) -> float:
    actions[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for action in actions:
            action()
    graph.replay()
    times = []
    for _ in range(replays):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(actions))
    return statistics.median(times)


def timed(name: str, actions: list[Callable[[], object]], floor_us: float, **more: object) -> float:
    us = graph_us(actions)
    say(f"{name}: {us:.1f} us, floor {floor_us:.1f}, x{us / floor_us:.2f}", *(f"{k} {v}" for k, v in more.items()))
    results.append({"case": name, "us": us, "floor_us": floor_us, **more})
    return us


def random_packed(experts: int, n: int, k: int) -> PackedExperts:
    packed = PackedExperts.empty(experts, n, k, DEVICE)
    for part in packed.codes:
        part.copy_(torch.randint(0, 256, part.shape, dtype=torch.uint8, device=DEVICE))
    packed.scales.copy_(torch.randint(114, 122, packed.scales.shape, dtype=torch.uint8, device=DEVICE))
    return packed


def random_routing(rows: int, experts: int = EXPERTS, top: int = TOP) -> tuple[Tensor, Tensor]:
    chosen = torch.rand(rows, experts, device=DEVICE).topk(top, 1).indices.int()
    return chosen, torch.rand(rows, top, device=DEVICE) * 0.5


def exact_experts(x: Tensor, chosen: Tensor, weights: Tensor, gate_up: PackedExperts, down: PackedExperts) -> Tensor:
    """Float64 outputs ``[pairs, hidden]`` before their rounding, with the inner rounding of Q8."""
    wide_x, outputs = q8_round(x).double(), []
    for row in range(x.shape[0]):
        for place in range(chosen.shape[1]):
            expert = int(chosen[row, place])
            first = q4u_decode(gate_up.codes[expert], gate_up.scales[expert]).double()
            gate, up = (first @ wide_x[row]).chunk(2)
            inner = torch.nn.functional.silu(gate.clamp_max(LIMIT)) * up.clamp(-LIMIT, LIMIT) * weights[row, place]
            second = q4u_decode(down.codes[expert], down.scales[expert]).double()
            outputs.append(second @ q8_round(inner.float()).double())
    return torch.stack(outputs)


def compare(name: str, found: Tensor, exact: Tensor, most_wrong: float) -> None:
    error = (found.double() - exact).abs()
    rms = exact.square().mean().sqrt()
    wrong = (found.double() != exact.to(found.dtype).double()).double().mean().item()
    detail = f"max error / rms {(error.max() / rms).item():.1e}, rms error / rms "
    detail += f"{(error.square().mean().sqrt() / rms).item():.1e}, not the rounded exact value {wrong:.4f}"
    report(name, wrong <= most_wrong and bool((error.max() / rms < 0.1).item()), detail)


def check_router() -> None:
    torch.manual_seed(0)
    gates = [(torch.randn(EXPERTS, HIDDEN, device=DEVICE) * 2 / HIDDEN**0.5).bfloat16() for _ in range(62)]
    bias, image_bias = torch.randn(2, EXPERTS, device=DEVICE) * 0.1
    routers = [Router(gate, bias, image_bias, TOP, 1.5) for gate in gates]
    whole = torch.randn(256, HIDDEN, device=DEVICE).bfloat16()
    for rows in (1, 3, 17, 33, 256):
        x = whole[:rows]
        is_image = torch.arange(rows, device=DEVICE) % 5 == 1
        positions = torch.arange(rows, device=DEVICE, dtype=torch.int32)
        positions[rows // 2 + 1 :: 7] = -1
        both = torch.where(is_image[:, None], image_bias, bias).double()
        experts, weights = route(x, gates[0].double(), both, TOP, 1.5)
        experts[positions < 0], weights[positions < 0] = -1, 0
        for fused in (True, False):
            ok, worst = True, 0.0
            for _ in range(3):
                found = routers[0].forward(x, positions=positions, is_image=is_image, block=8, fused=fused)
                assert found.blocks is not None
                again = order_pairs(found.experts, EXPERTS, 8)
                number, blocks = int(again.num_ordered), found.blocks
                same = int(blocks.num_ordered) == number and torch.equal(blocks.offsets, again.offsets)
                same &= torch.equal(blocks.block_expert[: number // 8], again.block_expert[: number // 8])
                # Pairs of one expert may stand in any order within it.
                ours, theirs = (b.ordered[:number].view(-1, 8) for b in (blocks, again))
                key = again.block_expert[: number // 8, None].long() * 4096
                same &= torch.equal((key + ours).flatten().sort().values, (key + theirs).flatten().sort().values)
                live = positions >= 0
                at = blocks.place.view(rows, TOP)[live]
                pairs = torch.arange(rows * TOP, device=DEVICE).view(rows, TOP)[live]
                same &= torch.equal(blocks.ordered[at.flatten().long()].long(), pairs.flatten())
                ok &= same and torch.equal(found.experts.long(), experts)
                worst = max(worst, float((found.weights - weights).abs().max()))
            report(f"router rows {rows} fused {fused}", ok and worst < 1e-5, f"weights within {worst:.1e}")
    alone = [routers[0].forward(whole[r : r + 1].clone()) for r in (0, 40, 255)]
    together = routers[0].forward(whole)
    same = all(torch.equal(a.weights[0], together.weights[r]) for a, r in zip(alone, (0, 40, 255), strict=True))
    report("router row alone equals row in 256", same)
    for rows in DECODE_ROWS:
        x = whole[:rows]
        floor = EXPERTS * HIDDEN * 2 / BYTES_PER_S * 1e6
        for fused in (True, False):
            if fused and rows > 64:
                continue
            actions = [lambda r=r, x=x, f=fused: r.forward(x, block=8, fused=f) for r in routers]
            timed(f"router rows {rows} {'one launch' if fused else 'two launches'} with order", actions, floor)
    x = whole
    timed("router rows 256 two launches, no order", [lambda r=r: r.forward(x, fused=False) for r in routers], 1.0)
    chosen, _ = random_routing(8192)
    timed("order of 49152 pairs, block 64", [lambda: order_pairs(chosen, EXPERTS, 64)] * 5, 1.0)


def check_small() -> None:
    """Both ways at sizes that both take, native."""
    torch.manual_seed(1)
    for experts, hidden, width, top, rows in ((8, 256, 96, 2, 19), (16, 1024, 512, 3, 37)):
        gate_up, down = random_packed(experts, 2 * width, hidden), random_packed(experts, hidden, width)
        x = torch.randn(rows, hidden, device=DEVICE).bfloat16()
        chosen, weights = random_routing(rows, experts, top)
        exact = exact_experts(x, chosen, weights, gate_up, down)
        ways = {"triton": False, "library": True} if width % 128 == 0 else {"triton": False}
        for name, library in ways.items():
            copies = (PackedExperts(p.codes.clone(), p.scales.clone()) for p in (gate_up, down))
            engine = build_experts(*copies, top, LIMIT, library=library)
            found = engine.forward(ExpertInput(x), Routing(chosen, weights, None)).values
            compare(f"small {name} {experts} experts [{hidden}, {width}]", found, exact, 0.3 if library else 0.02)
            holes = chosen.clone()
            holes[::3, 0] = -1
            partly = engine.forward(ExpertInput(x), Routing(holes, weights, None)).values
            kept = (holes >= 0).flatten()
            report(f"small {name} with holes", torch.equal(partly[kept], found[kept]) and not partly[~kept].any())


class Released:
    """The released size, once packed as stored and once repacked."""

    def __init__(self) -> None:
        torch.manual_seed(2)
        self.gate_up, self.down = random_packed(EXPERTS, 2 * WIDTH, HIDDEN), random_packed(EXPERTS, HIDDEN, WIDTH)
        copies = [PackedExperts(p.codes.clone(), p.scales.clone()) for p in (self.gate_up, self.down)]
        torch.cuda.synchronize()
        before, begin = torch.cuda.memory_allocated(), time.time()
        torch.cuda.reset_peak_memory_stats()
        engine = build_experts(*copies, TOP, LIMIT)
        torch.cuda.synchronize()
        peak = (torch.cuda.max_memory_allocated() - before) / 1e9
        say(f"{type(engine).__name__}: repacked in {time.time() - begin:.1f} s, peak above the weights {peak:.2f} GB")
        self.engine = engine

    def library(self) -> moe_humming.HummingExperts:
        assert isinstance(self.engine, moe_humming.HummingExperts)
        return self.engine


def floor_us(chosen: Tensor, n: int, k: int) -> float:
    active = chosen[chosen >= 0].unique().numel()
    return active * n * k * (0.5 + 1 / 32) / BYTES_PER_S * 1e6


def check_exact(released: Released) -> None:
    torch.manual_seed(3)
    for rows in (1, 5):
        x = torch.randn(rows, HIDDEN, device=DEVICE).bfloat16()
        chosen, weights = random_routing(rows)
        exact = exact_experts(x, chosen, weights, released.gate_up, released.down)
        found = released.engine.forward(ExpertInput(x), Routing(chosen, weights, None)).values
        compare(f"released {type(released.engine).__name__} rows {rows}", found, exact, 0.3)
        other = build_experts(released.gate_up, released.down, TOP, LIMIT, library=False)
        found = other.forward(ExpertInput(x), Routing(chosen, weights, None)).values
        compare(f"released TritonExperts rows {rows}", found, exact, 0.02)


def check_times(released: Released) -> None:
    engine = released.library()
    for rows in DECODE_ROWS:
        pairs, repeats = rows * TOP, 24 if rows <= 4 else 12 if rows <= 32 else 6
        x = torch.randn(rows, HIDDEN, device=DEVICE).bfloat16()
        codes, scales = quantize_activation(x)
        block = engine.block_of(rows)
        routings = []
        for _ in range(repeats):
            chosen, weights = random_routing(rows)
            routings.append(Routing(chosen, weights, order_pairs(chosen, EXPERTS, block)))
        floors = [
            statistics.mean(floor_us(r.experts, *size) for r in routings)
            for size in ((2 * WIDTH, HIDDEN), (HIDDEN, WIDTH))
        ]
        gate_up = torch.randn(pairs, 2 * WIDTH, device=DEVICE).half()
        inner, inner_scales = swiglu_quantized(gate_up, LIMIT, routings[0].weights)
        values = torch.empty(pairs, HIDDEN, dtype=torch.bfloat16, device=DEVICE)

        def product(part, codes, scales, out, top, routing, pairs=pairs):
            b = routing.blocks
            order = {"sorted_ids": b.ordered, "expert_ids": b.block_expert, "num_tokens_padded": b.num_ordered}
            part.run(codes, scales, out, pairs, top, **order)

        first = [lambda r=r, c=codes, s=scales, o=gate_up: product(engine.gate_up, c, s, o, TOP, r) for r in routings]
        timed(f"gate-up rows {rows}", first, floors[0], block=block)
        second = [lambda r=r, c=inner, s=inner_scales, o=values: product(engine.down, c, s, o, 1, r) for r in routings]
        timed(f"down rows {rows}", second, floors[1])
        middle = [
            lambda r=r, g=gate_up, v=values: swiglu_quantized(g, LIMIT, r.weights, experts=r.experts, clear=v)
            for r in routings
        ]
        timed(f"swiglu rows {rows}", middle, pairs * (3 * WIDTH * 2) / BYTES_PER_S * 1e6)
        timed(f"quantize rows {rows}", [lambda x=x: quantize_activation(x)] * 12, 1.0)
        timed(f"sum rows {rows}", [lambda v=values: sum_experts(v, TOP)] * 12, 1.0)
        inputs = ExpertInput(x, codes, scales)
        timed(f"experts rows {rows}", [lambda r=r, i=inputs: engine.forward(i, r) for r in routings], sum(floors))


def check_invariant(released: Released) -> None:
    """Rows alone against rows in a batch, as it is and with the library's switch."""
    torch.manual_seed(4)
    rows = 64
    x = torch.randn(rows, HIDDEN, device=DEVICE).bfloat16()
    chosen, weights = random_routing(rows)
    engine = released.library()
    for switch in (False, True):
        for part in (engine.gate_up, engine.down):
            part.batch_invariant = switch
            part._tuned.clear()
        together = engine.forward(ExpertInput(x), Routing(chosen, weights, None)).values.view(rows, TOP, -1)
        different = 0
        for size in (1, 7, 40):
            part = slice(3, 3 + size)
            routing = Routing(chosen[part].contiguous(), weights[part].contiguous(), None)
            alone = engine.forward(ExpertInput(x[part].contiguous()), routing).values.view(size, TOP, -1)
            different += int((alone != together[part]).sum())
        report(f"batch invariance, switch {switch}", different == 0 or not switch, f"{different} elements differ")
        if switch:
            for r in (1, 64):
                routings = [Routing(*random_routing(r), None) for _ in range(8)]
                actions = [lambda q=q, r=r: engine.forward(ExpertInput(x[:r]), q) for q in routings]
                timed(f"experts rows {r} invariant, with order and quantize", actions, 1.0)
    for part in (engine.gate_up, engine.down):
        part.batch_invariant = False
        part._tuned.clear()


def check_prefill(released: Released) -> None:
    engine = released.library()
    for rows in (2048, 8192):
        x = torch.randn(rows, HIDDEN, device=DEVICE).bfloat16()
        outputs = {}
        chosen, weights = random_routing(rows)
        floor = 6 * rows * WIDTH * HIDDEN * 3 * 2 / 1380e12 * 1e6
        for precision in ("faithful", "fast"):
            engine.precision = precision  # type: ignore[assignment]
            routing = Routing(chosen, weights, None)
            out = engine.forward(ExpertInput(x), routing)
            outputs[precision] = sum_experts(out.values, TOP, place=out.place).double()

            def whole(x=x, routing=routing):
                out = engine.forward(ExpertInput(x), routing)
                sum_experts(out.values, TOP, place=out.place)

            timed(f"experts rows {rows} {precision}, order to sum", [whole] * 2, floor)
        error = (outputs["fast"] - outputs["faithful"]).square().mean().sqrt() / outputs[
            "faithful"
        ].square().mean().sqrt()
        report(f"fast against faithful at {rows}", bool(error < 0.1), f"rms difference {float(error):.4f}")
    engine.precision = "faithful"


# block N, block K, warp N, warp K, stages, CTAs per SM, stream-K
SEARCH = [
    (128, 256, 32, 128, 4, 2, True), (128, 256, 32, 128, 4, 2, False), (128, 256, 32, 128, 3, 3, False),
    (128, 128, 32, 128, 4, 2, False), (128, 128, 32, 128, 6, 4, False), (128, 128, 32, 128, 6, 4, True),
    (64, 256, 16, 128, 4, 4, False), (64, 256, 16, 128, 4, 4, True), (64, 256, 16, 256, 4, 4, False),
    (64, 256, 16, 128, 5, 3, True), (64, 128, 16, 128, 6, 6, False), (64, 128, 16, 128, 8, 4, True),
    (64, 512, 16, 128, 4, 2, False), (64, 512, 16, 128, 3, 3, True), (128, 512, 32, 128, 3, 1, True),
    (256, 128, 32, 128, 4, 2, True), (256, 128, 64, 128, 4, 2, False), (128, 256, 16, 128, 4, 2, False),
]  # fmt: skip


def check_search(released: Released) -> None:
    from humming.kernel.humming import HummingKernel

    engine = released.library()
    for name, part, top in (("gate-up", engine.gate_up, TOP), ("down", engine.down, 1)):
        base = json.loads(part.tuned(6, False, False).tuning)
        candidates = []
        for bn, bk, wn, wk, stages, ctas, stream_k in SEARCH:
            if part.n % bn or part.k % bk:
                continue
            tuning = base | {"block_shape": [8, bn, bk], "warp_shape": [8, wn, wk], "num_stages": stages}
            candidates.append(tuning | {"num_ctas_per_sm": ctas, "use_stream_k": stream_k})
        config, compute = part.configs[False], json.dumps({"gemm_type": "indexed", "use_batch_invariant": False})
        try:
            HummingKernel.prepare_kernels(config.to_str(), compute, [[0, 1 << 30, c] for c in candidates], DEVICE)
        except Exception as error:
            say("not compiled together:", str(error)[-300:])
        for rows in (1, 4, 16, 64):
            pairs, repeats = rows * TOP, 24 if rows <= 4 else 8
            source = rows if top == TOP else pairs
            codes, scales = quantize_activation(torch.randn(source, part.k, device=DEVICE).bfloat16())
            out = torch.empty(pairs, part.n, dtype=part.out_dtype, device=DEVICE)
            routings = [random_routing(rows)[0] for _ in range(repeats)]
            orders = [order_pairs(chosen, EXPERTS, 8) for chosen in routings]
            floor = statistics.mean(floor_us(chosen, part.n, part.k) for chosen in routings)
            found = []
            for tuning in candidates:
                part._tuned = {(pairs, False, False): moe_humming._Tuned(8, compute, json.dumps(tuning))}
                label = "{block_shape} {warp_shape} stages {num_stages} ctas {num_ctas_per_sm} stream {use_stream_k}"
                label = label.format(**tuning)

                def launch(b, part=part, top=top, codes=codes, scales=scales, out=out, pairs=pairs):
                    order = {"sorted_ids": b.ordered, "expert_ids": b.block_expert, "num_tokens_padded": b.num_ordered}
                    part.run(codes, scales, out, pairs, top, **order)

                try:
                    us = graph_us([lambda b=b: launch(b) for b in orders], 3)
                except Exception as error:
                    say(f"search {name} {label}: {str(error).strip().splitlines()[-1][-160:]}")
                    continue
                found.append((us, label))
                results.append({"case": f"search {name} rows {rows} {label}", "us": us, "floor_us": floor})
            found.sort()
            for us, label in found[:4] + found[-1:]:
                say(f"search {name} rows {rows}: {us:.1f} us x{us / floor:.2f} {label}")
            part._tuned = {}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default="router,small,exact,times,invariant,prefill,search")
    arguments = parser.parse_args()
    only = arguments.only.split(",")
    for name, action in (("router", check_router), ("small", check_small)):
        if name in only:
            guarded(name, action)
    if set(only) & {"exact", "times", "invariant", "prefill", "search"}:
        kept: list[Released] = []
        guarded("released weights", lambda: kept.append(Released()))
        for name, check in (
            ("exact", check_exact),
            ("times", check_times),
            ("prefill", check_prefill),
            ("invariant", check_invariant),
            ("search", check_search),
        ):
            if name in only and kept:
                guarded(name, lambda check=check: check(kept[0]))
    failed = [r["case"] for r in results if "error" in r or r.get("ok") is False]
    say(f"{len(results)} results, failed: {failed}")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
