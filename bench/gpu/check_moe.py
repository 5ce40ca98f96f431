"""Router and routed experts on a GPU: bits and errors against float64, times over floor, a search over tile shapes.

    python bench/gpu/check_moe.py [--json FILE] [--only small,exact,router,order,times,prefill,invariant,search]

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

from deepinfer.kernels.moe import experts_humming, router_cuda
from deepinfer.kernels.moe import router as router_module
from deepinfer.kernels.moe.expert_blocks import ExpertBlocks, order_pairs
from deepinfer.kernels.moe.expert_inputs import quantize_activation
from deepinfer.kernels.moe.expert_sum import sum_experts
from deepinfer.kernels.moe.experts import ExpertInput, PackedExperts, build_experts
from deepinfer.kernels.moe.router import Router, Routing
from deepinfer.kernels.moe.swiglu import swiglu_quantized, swiglu_rounded
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


def wide(packed: PackedExperts, expert: int) -> Tensor:
    return q4u_decode(packed.codes[expert], packed.scales[expert]).double()


def swiglu_exact(gate_up: Tensor, weights: Tensor) -> Tensor:
    """Float64 values of the rounded activations ``[pairs, width]``."""
    gate, up = gate_up.double().chunk(2, 1)
    inner = torch.nn.functional.silu(gate.clamp_max(LIMIT)) * up.clamp(-LIMIT, LIMIT) * weights.view(-1, 1).double()
    return q8_round(inner.float()).double()


def by_pair(inputs: Tensor, chosen: Tensor, packed: PackedExperts) -> Tensor:
    """Exact products ``[pairs, N]`` of one input per pair."""
    return torch.stack([wide(packed, int(e)) @ x for x, e in zip(inputs, chosen.flatten(), strict=True)])


def exact_experts(x: Tensor, chosen: Tensor, weights: Tensor, gate_up: PackedExperts, down: PackedExperts) -> Tensor:
    """Float64 outputs ``[pairs, hidden]`` before their rounding, with the inner rounding of Q8."""
    pairs = q8_round(x).double().repeat_interleave(chosen.shape[1], 0)
    return by_pair(swiglu_exact(by_pair(pairs, chosen, gate_up), weights), chosen, down)


def compare(name: str, found: Tensor, exact: Tensor, most_wrong: float, most_rms: float = 2.3e-3) -> None:
    """``most_rms``: of the error over the exact value's root mean square; one to bf16 makes at most 2**-8 / 3**0.5."""
    error = (found.double() - exact).abs()
    rms = exact.square().mean().sqrt()
    relative = float(error.square().mean().sqrt() / rms)
    wrong = (found.double() != exact.to(found.dtype).double()).double().mean().item()
    ok = wrong <= most_wrong and relative <= most_rms
    detail = f"rms error / rms {relative:.2e} (<= {most_rms:.1e}), max {(error.max() / rms).item():.1e}, "
    report(name, ok, detail + f"not the rounded exact value {wrong:.4f} (<= {most_wrong})")


def same_order(blocks: ExpertBlocks, chosen: Tensor) -> bool:
    """Whether the blocks are those of a stable sort by expert."""
    flat, block = chosen.flatten().long(), blocks.block
    counts = torch.bincount(flat[flat >= 0], minlength=EXPERTS)
    padded = (counts + block - 1) // block * block
    ends = padded.cumsum(0)
    number = int(ends[-1])
    order = torch.full((number,), flat.numel(), device=DEVICE)
    place = torch.full_like(flat, -1)
    by_expert = torch.sort(flat, stable=True).indices[(flat < 0).sum() :]
    first = torch.repeat_interleave(ends - padded - (counts.cumsum(0) - counts), counts)
    at = first + torch.arange(by_expert.numel(), device=DEVICE)
    order[at], place[by_expert] = by_expert, at
    return (
        int(blocks.num_ordered) == number
        and torch.equal(blocks.offsets.long(), torch.cat([ends - padded, ends[-1:]]))
        and torch.equal(blocks.block_expert[: number // block].long().repeat_interleave(block), expert_at(ends, number))
        and torch.equal(blocks.ordered[:number].long(), order)
        and torch.equal(blocks.place.long(), place)
    )


def expert_at(ends: Tensor, number: int) -> Tensor:
    return torch.searchsorted(ends, torch.arange(number, device=DEVICE), right=True)


def check_router() -> None:
    torch.manual_seed(0)
    gates = [(torch.randn(EXPERTS, HIDDEN, device=DEVICE) * 2 / HIDDEN**0.5).bfloat16() for _ in range(62)]
    bias, image_bias = torch.randn(2, EXPERTS, device=DEVICE) * 0.1
    routers = [Router(gate, bias, image_bias, TOP, 1.5) for gate in gates]
    say("CUDA router:", routers[0].has_cuda)
    whole = torch.randn(2048, HIDDEN, device=DEVICE).bfloat16()
    for rows in (1, 2, 3, 17, 64, 65, 129, 256, 257, 300, 512, 600):
        x = whole[:rows]
        is_image = torch.arange(rows, device=DEVICE) % 5 == 1
        positions = torch.arange(rows, device=DEVICE, dtype=torch.int32)
        positions[rows // 2 + 1 :: 7] = -1
        both = torch.where(is_image[:, None], image_bias, bias).double()
        experts, weights = route(x, gates[0].double(), both, TOP, 1.5)
        experts[positions < 0], weights[positions < 0] = -1, 0
        for way in (None, "one launch", "two launches") if rows == 17 else (None,):
            wrong, ordered, worst = 0, True, 0.0
            for _ in range(3):
                found = routers[0].forward(x, positions=positions, is_image=is_image, block=8, way=way)
                assert found.blocks is not None
                # Triton's one launch leaves the order within an expert open.
                ordered &= way is not None or same_order(found.blocks, found.experts)
                is_same = (found.experts == experts).all(1)
                wrong += int((~is_same).sum())
                worst = max(worst, float((found.weights - weights).abs()[is_same].max()))
            detail = f"{wrong} rows differ, weights within {worst:.1e}, order {ordered}"
            report(f"router rows {rows} {way or 'default'}", wrong == 0 and worst < 1e-5 and ordered, detail)
    alone = {r: routers[0].forward(whole[r : r + 1].clone()) for r in (0, 40, 255)}
    for rows in (8, 64, 512):
        together = routers[0].forward(whole[:rows])
        same = all(torch.equal(a.weights[0], together.weights[r]) for r, a in alone.items() if r < rows)
        report(f"router row alone equals row in {rows}", same)
    floor = EXPERTS * HIDDEN * 2 / BYTES_PER_S * 1e6
    for rows in (*DECODE_ROWS, 512, 2048):
        x = whole[:rows]
        timed(f"router rows {rows} with order", [lambda r=r, x=x: r.forward(x, block=8) for r in routers], floor)
    for rows in (1, 8, 64, 128, 256, 384):
        x = whole[:rows]
        numbers = (rows, 64, 128, 256, 384) if rows > 8 else (rows,)
        for shape in dict.fromkeys(router_cuda.choose_logits_shape(number, EXPERTS, HIDDEN) for number in numbers):
            actions = [lambda g=g, x=x, s=shape: router_cuda.logits(x, g, shape=s) for g in gates]
            timed(f"router logits rows {rows} {shape}", actions, floor)
        partial = router_cuda.logits(x, gates[0])
        experts = torch.empty(rows, TOP, dtype=torch.int32, device=DEVICE)
        weights = torch.empty(rows, TOP, device=DEVICE)
        blocks = order_pairs(experts.zero_(), EXPERTS, 8)
        parts = (bias, None, None, None, 1.5, experts, weights)
        ways = {"no order": (None, 0, 1)}
        ways |= {"order, 8 CTAs": (blocks.buffers, 8, 8)} if rows <= router_cuda.max_cluster_rows() else {}
        ways |= {"order, 1 CTA": (blocks.buffers, 8, 1)} if rows <= 8 else {}
        for name, (buffers, block, cluster) in ways.items():
            actions = [
                lambda p=partial, q=parts, b=buffers, n=block, c=cluster: router_cuda.select(p, *q, b, n, cluster=c)
            ] * 24
            timed(f"router selection rows {rows} {name}", actions, 1.0)
    before = router_module.CLUSTER_ROWS
    for rows in (32, 64, 128, 256):
        router_module.CLUSTER_ROWS = rows - 1
        actions = [lambda r=r, x=whole[:rows]: r.forward(x, block=8) for r in routers]
        timed(f"router rows {rows}, order apart", actions, floor)
    router_module.CLUSTER_ROWS = before
    own, router_module.MAX_OWN_ROWS = router_module.MAX_OWN_ROWS, 0
    for rows in (64, 256, 512):
        actions = [lambda r=r, x=whole[:rows]: r.forward(x, block=8) for r in routers]
        timed(f"router rows {rows}, logits by cuBLAS", actions, floor)
    router_module.MAX_OWN_ROWS = own


def check_order() -> None:
    torch.manual_seed(5)
    for rows, block in ((1, 8), (33, 8), (500, 16), (2048, 64), (8192, 64), (8192, 1), (16384, 64)):
        chosen, _ = random_routing(rows)
        chosen[torch.rand(rows, device=DEVICE) < 0.1] = -1
        report(f"order of {rows} rows in blocks of {block}", same_order(order_pairs(chosen, EXPERTS, block), chosen))
        floor = rows * TOP * 12 / BYTES_PER_S * 1e6 + 1
        actions = [lambda c=chosen, b=block: order_pairs(c, EXPERTS, b)] * 12
        timed(f"order of {rows * TOP} pairs in blocks of {block}", actions, floor)
    chosen, _ = random_routing(8192)
    slow = order_pairs(chosen, EXPERTS, 64, cuda=False)
    report("order by Triton of 8192 rows", same_order(slow, chosen))


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
            engine = build_experts(*copies, top, LIMIT, way="library" if library else "triton")
            found = engine.forward(ExpertInput(x), Routing(chosen, weights, None)).values
            bounds = (0.5, 2e-2) if library else (0.02, 2.3e-3)  # float16 in between: see check_exact
            compare(f"small {name} {experts} experts [{hidden}, {width}]", found, exact, *bounds)
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
        engine = build_experts(*copies, TOP, LIMIT, way="library")
        torch.cuda.synchronize()
        peak = (torch.cuda.max_memory_allocated() - before) / 1e9
        say(f"{type(engine).__name__}: repacked in {time.time() - begin:.1f} s, peak above the weights {peak:.2f} GB")
        self.engine = engine

    def library(self) -> experts_humming.HummingExperts:
        assert isinstance(self.engine, experts_humming.HummingExperts)
        return self.engine


def floor_us(chosen: Tensor, n: int, k: int) -> float:
    active = chosen[chosen >= 0].unique().numel()
    return active * n * k * (0.5 + 1 / 32) / BYTES_PER_S * 1e6


def check_exact(released: Released) -> None:
    """Each stage of the library against its own exact value; then the whole, whose error the float16 between sets."""
    torch.manual_seed(3)
    engine = released.library()
    triton = build_experts(released.gate_up, released.down, TOP, LIMIT, way="triton")
    for rows in (1, 5):
        x = torch.randn(rows, HIDDEN, device=DEVICE).bfloat16()
        chosen, weights = random_routing(rows)
        blocks = order_pairs(chosen, EXPERTS, engine.block_of(rows))
        order = {
            "sorted_ids": blocks.ordered,
            "expert_ids": blocks.block_expert,
            "num_tokens_padded": blocks.num_ordered,
        }
        exact_gate_up = by_pair(q8_round(x).double().repeat_interleave(TOP, 0), chosen, released.gate_up)
        gate_up = torch.empty(rows * TOP, 2 * WIDTH, dtype=engine.gate_up.out_dtype, device=DEVICE)
        engine.gate_up.run(*quantize_activation(x), gate_up, rows * TOP, TOP, **order)
        # A rounding to float16 makes at most 2**-11 / 3**0.5; sums of 13 bits move a tenth of the elements to the other
        # neighbour.
        compare(f"library gate-up rows {rows}", gate_up, exact_gate_up, 0.15, 2.9e-4)
        inner = swiglu_exact(gate_up, weights)
        codes, scales = swiglu_quantized(gate_up, LIMIT, weights)
        values = codes.view(torch.float8_e4m3fn).double() * scales.double().repeat_interleave(32, 1)
        flips = float((values != inner).double().mean())
        report(f"library swiglu rows {rows}", flips <= 1e-3, f"{flips:.1e} differ from float64 on the same input")
        out = torch.empty(rows * TOP, HIDDEN, dtype=torch.bfloat16, device=DEVICE)
        engine.down.run(codes, scales, out, rows * TOP, 1, **order)
        compare(f"library down rows {rows}", out, by_pair(values, chosen, released.down), 0.05)
        exact_inner = swiglu_exact(exact_gate_up, weights)
        exact = by_pair(exact_inner, chosen, released.down)
        flips = float((values != exact_inner).double().mean())
        report(f"library inner rows {rows}", flips <= 5e-3, f"{flips:.4f} rounded otherwise behind float16")
        found = engine.forward(ExpertInput(x), Routing(chosen, weights, None)).values
        errors = ((found.double() - exact).square().mean(1) / exact.square().mean(1)).sqrt()
        middle, worst = float(errors.median()), float(errors.max())
        wrong = float((found.double() != exact.bfloat16().double()).double().mean())
        detail = f"error of a pair: median {middle:.1e} (<= 4.5e-3), worst {worst:.1e} (<= 5e-2), "
        ok = middle <= 4.5e-3 and worst <= 5e-2 and wrong <= 0.6
        report(f"library whole rows {rows}", ok, detail + f"not the rounded exact value {wrong:.3f} (<= 0.6)")
        between = by_pair(swiglu_exact(exact_gate_up.half(), weights), chosen, released.down).bfloat16().double()
        errors = ((between - exact).square().mean(1) / exact.square().mean(1)).sqrt()
        say(f"  the same of exact products with float16 in between: median {float(errors.median()):.1e}")
        found = triton.forward(ExpertInput(x), Routing(chosen, weights, None)).values
        compare(f"Triton whole rows {rows}", found, exact, 0.02)


def inner_of(rows: int) -> Tensor:
    return torch.empty(rows, WIDTH, dtype=torch.bfloat16, device=DEVICE)


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
        shared, shared_out = torch.randn(rows, 2 * WIDTH, device=DEVICE), inner_of(rows)
        both = [
            lambda r=r, g=gate_up, v=values, s=shared, o=shared_out: swiglu_quantized(
                g, LIMIT, r.weights, experts=r.experts, clear=v, shared=s, shared_out=o
            )
            for r in routings
        ]
        timed(f"swiglu with the shared expert's rows {rows}", both, pairs * (3 * WIDTH * 2) / BYTES_PER_S * 1e6)
        report(f"shared swiglu rows {rows}", torch.equal(shared_out, swiglu_rounded(shared, LIMIT)))
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


SEARCH = [
    experts_humming.Tile(*tile)  # block N, block K, warp N, stages, CTAs per SM, stream-K
    for tile in (
        (128, 256, 32, 4, 2, True), (128, 128, 32, 4, 2, False), (128, 128, 32, 6, 3, False),
        (64, 256, 16, 4, 4, False), (64, 128, 16, 6, 4, False), (64, 256, 16, 4, 3, True),
    )
]  # fmt: skip
SEARCH_S = 22


def check_search(released: Released) -> None:
    from humming.kernel.humming import HummingKernel

    begin = time.time()
    engine = released.library()
    compute = json.dumps({"gemm_type": "indexed", "use_batch_invariant": False})
    parts = (("down", engine.down, 1), ("gate-up", engine.gate_up, TOP))
    tunings = {}
    for name, part, _ in parts:
        base = json.loads(part.tuned(6, False, False).tuning)
        tunings[name] = [base | t.changes() for t in SEARCH if part.n % t.n == 0 and part.k % t.k == 0]
        try:
            variants = [[0, 1 << 30, tuning] for tuning in tunings[name]]
            HummingKernel.prepare_kernels(part.configs[False].to_str(), compute, variants, DEVICE)
        except Exception as error:
            say("not compiled together:", str(error)[-300:])
        say(f"search {name}: compiled after {time.time() - begin:.1f} s")
    for name, part, top in parts:
        cases = []
        for rows in (1, 4, 8):
            source = rows if top == TOP else rows * TOP
            inputs = quantize_activation(torch.randn(source, part.k, device=DEVICE).bfloat16())
            out = torch.empty(rows * TOP, part.n, dtype=part.out_dtype, device=DEVICE)
            routings = [random_routing(rows)[0] for _ in range(24 if rows == 1 else 8)]
            orders = [order_pairs(chosen, EXPERTS, 8) for chosen in routings]
            floor = statistics.mean(floor_us(chosen, part.n, part.k) for chosen in routings)
            cases.append((rows, inputs, out, orders, floor))
        for tuning in tunings[name]:
            label = "{block_shape} warp {warp_shape} stages {num_stages} ctas {num_ctas_per_sm} stream {use_stream_k}"
            label = label.format(**tuning)
            if time.time() - begin > SEARCH_S:
                say(f"search {name} {label}: no time left")
                continue
            found = []
            for rows, inputs, out, orders, floor in cases:
                pairs = rows * TOP
                part._tuned = {(pairs, False, False): experts_humming._Tuned(8, compute, json.dumps(tuning))}

                def launch(b, part=part, top=top, inputs=inputs, out=out, pairs=pairs):
                    order = {"sorted_ids": b.ordered, "expert_ids": b.block_expert, "num_tokens_padded": b.num_ordered}
                    part.run(*inputs, out, pairs, top, **order)

                try:
                    us = graph_us([lambda b=b: launch(b) for b in orders], 3)
                except Exception as error:
                    say(f"search {name} {label}: {str(error).strip().splitlines()[-1][-160:]}")
                    break
                found.append(f"{us:.1f} us x{us / floor:.2f}")
                results.append({"case": f"search {name} rows {rows} {label}", "us": us, "floor_us": floor})
            say(f"search {name} {label}: rows 1, 4, 8:", *found)
        part._tuned = {}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default="small,exact,router,order,times,prefill,invariant,search")
    arguments = parser.parse_args()
    only = arguments.only.split(",")
    kept: list[Released] = []
    for name, check, needs_weights in (
        ("small", check_small, False),
        ("exact", check_exact, True),
        ("router", check_router, False),
        ("order", check_order, False),
        ("times", check_times, True),
        ("prefill", check_prefill, True),
        ("invariant", check_invariant, True),
        ("search", check_search, True),
    ):
        if name not in only:
            continue
        if needs_weights and not kept:
            guarded("released weights", lambda: kept.append(Released()))
        if not needs_weights:
            guarded(name, check)
        elif kept:
            guarded(name, lambda check=check: check(kept[0]))
        torch.cuda.empty_cache()
        if arguments.json:
            arguments.json.write_text(json.dumps(results, indent=1))
    failed = [r["case"] for r in results if "error" in r or r.get("ok") is False]
    say(f"{len(results)} results, failed: {failed}")


if __name__ == "__main__":
    main()
