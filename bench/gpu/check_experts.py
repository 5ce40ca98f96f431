"""The routed experts' own kernel for few pairs on a GPU: errors against float64, times over floor, plans, the library.

    python bench/gpu/check_experts.py [--json FILE] [--rows 1,8,64] [--no-library]

Sizes of the released model: 384 experts, 6 per row, gate-up [4608, 5120], down [5120, 2304]. Times are medians of 7
replays of a CUDA graph of launches that rotate over routings, per launch; the weights are a hundred times L2. The floor
is what a launch reads, over the copy rate of 4.2 TB/s; reading alone reaches 4.65.
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

from deepinfer.kernels.moe import experts_humming, packing
from deepinfer.kernels.moe.expert_blocks import order_pairs
from deepinfer.kernels.moe.experts import ExpertInput, PackedExperts
from deepinfer.kernels.moe.grouped_skinny import GroupedSkinny, Plan, new_output
from deepinfer.kernels.moe.router import Routing
from deepinfer.kernels.moe.swiglu import swiglu_rounded
from deepinfer.ops.number_formats import q4u_decode, q8_round

EXPERTS, HIDDEN, WIDTH, TOP, LIMIT = 384, 5120, 2304, 6, 10.0
SHAPES = {"gate_up": (2 * WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
COPY_BYTES_PER_S = 4.2e12
DEVICE = torch.device("cuda")
results: list[dict[str, Any]] = []


def report(**record: Any) -> None:
    results.append(record)
    print({key: round(value, 3) if isinstance(value, float) else value for key, value in record.items()}, flush=True)


def stored_weights(name: str) -> PackedExperts:
    n, k = SHAPES[name]
    weights = PackedExperts.empty(EXPERTS, n, k, DEVICE)
    for codes, scales in zip(weights.codes, weights.scales, strict=True):
        codes.random_(0, 256)
        scales.random_(116, 122)
    return weights


def packed_weights(weights: PackedExperts, is_paired: bool) -> Tensor:
    """All experts in the kernel's layout, one after the other."""
    _, n, half = weights.codes.shape
    shape = EXPERTS, 2 * half // packing.TILE, n // packing.TILE, packing.TILE_BYTES
    packed = torch.empty(shape, dtype=torch.uint8, device=DEVICE)
    for expert in range(EXPERTS):
        packing.pack_expert(weights.codes[expert], weights.scales[expert], packed[expert], is_paired=is_paired)
    return packed


def routings(rows: int, count: int) -> list[Tensor]:
    scores = torch.rand(count, rows, EXPERTS, device=DEVICE)
    return list(scores.topk(TOP, dim=-1).indices.int())


def time_us(launch: Callable[[int], Any], count: int) -> float:
    """Microseconds per launch of a graph of ``count``."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for index in range(count):
            launch(index)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(count):
            launch(index)
    times = []
    for _ in range(7):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / count)
    return statistics.median(times)


class Subject:
    """Weights in both layouts, the products on them, and the library's."""

    def __init__(self, with_library: bool) -> None:
        gate_up, down = stored_weights("gate_up"), stored_weights("down")
        self.stored = {"gate_up": gate_up, "down": down}
        self.products = {
            "gate_up": GroupedSkinny(packed_weights(gate_up, True), TOP, LIMIT),
            "down": GroupedSkinny(packed_weights(down, False), 1),
        }
        self.library = None
        if with_library:
            copies = [PackedExperts(w.codes.clone(), w.scales.clone()) for w in (gate_up, down)]
            self.library = experts_humming.HummingExperts(copies[0], copies[1], TOP, LIMIT)

    def exact(self, name: str, x: Tensor, experts: Tensor, pairs: Tensor) -> Tensor:
        """Float64 products ``[pairs, N]`` of some pairs."""
        per_row = TOP if name == "gate_up" else 1
        weights = self.stored[name]
        sums = []
        for pair in pairs.tolist():
            expert = int(experts.view(-1)[pair])
            sums.append(
                q4u_decode(weights.codes[expert], weights.scales[expert]).double() @ x[pair // per_row].double()
            )
        return torch.stack(sums)


def random_x(rows: int, columns: int) -> Tensor:
    return q8_round(torch.randn(rows, columns, device=DEVICE)).bfloat16()


def check(subject: Subject, rows: int, plan: Plan) -> None:
    experts = routings(rows, 1)[0]
    experts[rows // 2, 1] = -1
    weights = torch.rand(rows, TOP, device=DEVICE)
    blocks = order_pairs(experts, EXPERTS, plan.block)
    pairs = torch.randperm(rows * TOP, device=DEVICE)[:24]
    pairs = pairs[experts.view(-1)[pairs] >= 0]
    x = random_x(rows, HIDDEN)
    inner = new_output(rows * TOP, subject.products["gate_up"]).fill_(torch.nan)
    subject.products["gate_up"](x, blocks, inner, plan, weights=weights)
    expected = swiglu_rounded(subject.exact("gate_up", x, experts, pairs).float(), LIMIT, weights.view(-1)[pairs])
    flips = float((inner[pairs] != expected).float().mean())
    error = float((inner[pairs].double() - expected.double()).norm() / expected.double().norm())
    x = random_x(rows * TOP, WIDTH)
    values = new_output(rows * TOP, subject.products["down"]).fill_(torch.nan)
    subject.products["down"](x, blocks, values, plan)
    expected = subject.exact("down", x, experts, pairs).bfloat16()
    flips_down = float((values[pairs] != expected).float().mean())
    error_down = float((values[pairs].double() - expected.double()).norm() / expected.double().norm())
    untouched = bool(values[experts.view(-1) < 0].isnan().all())
    is_right = flips < 5e-3 and flips_down < 5e-3 and untouched
    report(check="PASS" if is_right else "FAIL", rows=rows, plan=str(plan), flips=flips, error=error,
           flips_down=flips_down, error_down=error_down, untouched=untouched)  # fmt: skip


def measure(subject: Subject, rows: int, plans: list[Plan]) -> None:
    count = 12 if rows <= 64 else 6
    chosen = routings(rows, count)
    distinct = sum(len(experts.unique()) for experts in chosen) / count
    weights = torch.rand(rows, TOP, device=DEVICE)
    blocks = {size: [order_pairs(experts, EXPERTS, size) for experts in chosen] for size in (8, 16, 24)}
    x, inner = random_x(rows, HIDDEN), random_x(rows * TOP, WIDTH)
    values = new_output(rows * TOP, subject.products["down"])
    made = new_output(rows * TOP, subject.products["gate_up"])
    best: dict[str, tuple[float, Plan]] = {}
    for name, (n, k) in SHAPES.items():
        product, num_bytes = subject.products[name], distinct * n * k * 17 / 32
        for plan in plans:

            def launch(index: int) -> None:
                order = blocks[plan.block][index]  # noqa: B023
                if name == "gate_up":  # noqa: B023
                    product(x, order, made, plan, weights=weights, early=True)  # noqa: B023
                else:
                    product(inner, order, values, plan, early=True)  # noqa: B023

            us = time_us(launch, count)
            report(product=name, rows=rows, pair_tiles=plan.pair_tiles, split=plan.split,
                   depth=plan.depth, warps=plan.warps, us=us,
                   tb_per_s=num_bytes / us / 1e6, over_floor=us * 1e-6 * COPY_BYTES_PER_S / num_bytes)  # fmt: skip
            if name not in best or us < best[name][0]:
                best[name] = us, plan
    both = {name: plan for name, (_, plan) in best.items()}

    def chain(index: int) -> None:
        gate_plan, down_plan = both["gate_up"], both["down"]
        order = blocks[gate_plan.block][index]
        subject.products["gate_up"](x, order, made, gate_plan, weights=weights, early=True)
        subject.products["down"](made, blocks[down_plan.block][index], values, down_plan, early=True)

    num_bytes = distinct * sum(n * k for n, k in SHAPES.values()) * 17 / 32
    us = time_us(chain, count)
    report(product="both", rows=rows, us=us, over_floor=us * 1e-6 * COPY_BYTES_PER_S / num_bytes, plans=str(both))
    if subject.library is not None:
        library = subject.library
        wide = torch.randn(rows, HIDDEN, device=DEVICE).bfloat16()
        from deepinfer.kernels.moe.expert_inputs import quantize_activation

        codes, scales = quantize_activation(wide)
        size = library.block_of(rows)
        made_routings = [Routing(experts, weights, order_pairs(experts, EXPERTS, size)) for experts in chosen]
        us = time_us(lambda index: library.forward(ExpertInput(wide, codes, scales), made_routings[index]), count)
        report(product="library, both and swiglu", rows=rows, us=us,
               over_floor=us * 1e-6 * COPY_BYTES_PER_S / num_bytes)  # fmt: skip


def candidates(rows: int) -> list[Plan]:
    """Plans worth a try."""
    if rows <= 16:
        return [Plan(1, 2, 2), Plan(1, 4, 2), Plan(1, 8, 2), Plan(1, 2, 2, 20), Plan(1, 4, 2, 12)]
    if rows < 320:
        return [Plan(1, 1, 2), Plan(1, 1, 2, 20), Plan(1, 1, 2, 24), Plan(1, 2, 2), Plan(1, 2, 2, 20)]
    return [Plan(1, 1, 2, 20), Plan(2, 1, 2), Plan(3, 1, 2, 12)]


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=lambda text: [int(part) for part in text.split(",")],
                        default=[1, 2, 4, 8, 16, 32, 64, 128, 256, 320, 384, 512, 640, 768, 1024])  # fmt: skip
    parser.add_argument("--no-library", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    began = time.monotonic()
    subject = Subject(not args.no_library)
    print(f"weights: {time.monotonic() - began:.1f} s", flush=True)
    for rows, plan in (
        (1, Plan(1, 4, 2)),
        (5, Plan(1, 2, 2)),
        (67, Plan(1, 1, 2, 20)),
        (200, Plan(2, 1, 2)),
        (33, Plan(1, 8, 2)),
        (700, Plan(3, 1, 2, 12)),
    ):
        check(subject, rows, plan)
    for rows in args.rows:
        measure(subject, rows, candidates(rows))
    print(f"whole run: {time.monotonic() - began:.1f} s")
    if args.json is not None:
        record = {
            "command": " ".join(["python", *sys.argv]),
            "machine": {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda, "torch": torch.__version__},
            "results": results,
        }
        args.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
