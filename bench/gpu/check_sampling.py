"""Sampling kernels on a GPU: tokens against the sampler's torch path, times over the bytes of the logits.

    python bench/gpu/check_sampling.py [--json FILE]

Times are medians of 5 replays of a CUDA graph with 16 calls. Logits of up to 64 rows stay in the L2 as they do behind
a head; those of 256 rows do not fit.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from deepinfer.kernels.sampling.gumbel import pack_gumbel_table
from deepinfer.kernels.sampling.sampler import SamplingRows, SamplingWorkspace, sample
from deepinfer.sampling.batch import SamplingBatch
from deepinfer.sampling.gumbel_table import gumbel_table
from deepinfer.sampling.params import SamplingParams
from deepinfer.sampling.row_parameters import RowParameters
from deepinfer.sampling.sampler import Sampler
from deepinfer.sampling.state import SamplingState

START = time.time()
DEVICE = torch.device("cuda")
VOCAB = 129_280
BYTES_PER_S = 4.2e12
CALLS = 16
ROWS = (1, 8, 32, 64, 128, 256)
KINDS = {
    "greedy": SamplingParams(temperature=0.0),
    "plain": SamplingParams(temperature=1.0),
    "warm": SamplingParams(temperature=0.7, min_p=0.02),
    "top_p": SamplingParams(temperature=1.0, top_p=0.95),
    "top_k": SamplingParams(temperature=1.0, top_k=50),
    "both": SamplingParams(temperature=0.6, top_p=0.9, top_k=20),
    "low_p": SamplingParams(temperature=1.0, top_p=0.1),
    "wide_k": SamplingParams(temperature=1.0, top_k=3000),
}
results: list[dict] = []


def say(*parts: object) -> None:
    print(f"[{time.time() - START:5.1f}]", *parts, flush=True)


def guarded(name: str, action: Callable[[], None]) -> None:
    try:
        action()
    except Exception:
        lines = traceback.format_exc().strip().splitlines()
        say(f"FAIL {name}: raised", " | ".join(line.strip() for line in lines[-6:])[-900:])
        results.append({"case": name, "error": lines[-1]})


def report(name: str, ok: bool, detail: str = "") -> None:
    say("PASS" if ok else "FAIL", name, detail)
    results.append({"case": name, "ok": ok, "detail": detail})


def states_of(params: list[SamplingParams]) -> list[SamplingState]:
    return [SamplingState(each, [1, 2], vocab_size=VOCAB, eos_id=1, seed=1000 + i) for i, each in enumerate(params)]


def arguments_of(states: list[SamplingState], positions: list[int]) -> tuple[SamplingRows, bool]:
    found = RowParameters.of(states, VOCAB, DEVICE)
    tensors = {name: getattr(found, name) for name in RowParameters.__slots__ if name != "truncates"}
    return SamplingRows(**tensors, positions=torch.tensor(positions, device=DEVICE)), found.truncates


def make_logits(rows: int, shape: str, seed: int) -> Tensor:
    """``flat``: normal, as random weights give; ``model``: a tail under a few likely tokens; ``ties``: bf16 steps."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    noise = torch.randn(rows, VOCAB, device=DEVICE, generator=generator)
    if shape == "flat":
        return noise
    peaks = torch.rand(rows, VOCAB, device=DEVICE, generator=generator).pow_(-0.3)
    model = 2.5 * noise + 2.0 * peaks.clamp_(max=12)
    return model.to(torch.bfloat16).float() if shape == "ties" else model


def check(rows: int, shape: str, table: Tensor) -> None:
    names = [name for name, _ in zip(itertools.cycle(KINDS), range(rows), strict=False)]
    states = states_of([KINDS[name] for name in names])
    positions = [11 + 3 * row for row in range(rows)]
    logits = make_logits(rows, shape, rows)
    if rows > 8:
        logits[5, 77] = float("nan")
        logits[6] = -float("inf")
        logits[7, ::3] = -float("inf")
    arguments, truncates = arguments_of(states, positions)
    workspace = SamplingWorkspace(rows, VOCAB, table)
    expected = Sampler(VOCAB, device=DEVICE).sample(logits, SamplingBatch.build(states, positions, device=DEVICE))
    for attempt in range(3):
        tokens, is_bad = sample(logits, arguments, workspace, truncates=truncates)
        wrong = (tokens != expected.token_ids).nonzero().flatten().tolist()
        same_bad = torch.equal(is_bad, expected.is_bad)
        detail = ", ".join(f"{names[row]}: {int(tokens[row])} not {int(expected.token_ids[row])}" for row in wrong[:6])
        if wrong or not same_bad or attempt == 2:
            report(
                f"{shape} rows {rows}", not wrong and same_bad, detail or f"listed {workspace.list_size.tolist()[:8]}"
            )
            break
    if workspace.arrivals.any():
        report(f"{shape} rows {rows}: counters", False)


def check_against_cpu(table: Tensor) -> None:
    rows = 16
    states = states_of([KINDS[name] for name, _ in zip(itertools.cycle(KINDS), range(rows), strict=False)])
    positions = list(range(rows))
    logits = make_logits(rows, "model", 5)
    arguments, truncates = arguments_of(states, positions)
    tokens, _bad = sample(logits, arguments, SamplingWorkspace(rows, VOCAB, table), truncates=truncates)
    expected = Sampler(VOCAB).sample(logits.cpu(), SamplingBatch.build(states, positions))
    report("against the CPU sampler", torch.equal(tokens.cpu(), expected.token_ids))


def graph_us(actions: Sequence[Callable[[], object]]) -> float:
    for action in actions[:2]:
        action()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for action in actions:
            action()
    graph.replay()
    times = []
    for _ in range(5):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(actions))
    return statistics.median(times)


def time_kind(name: str, shape: str, table: Tensor, configurations: list[tuple[int, int]]) -> None:
    for rows in ROWS:
        copies = max(2, min(CALLS, (64 << 20) // (rows * VOCAB * 4)))
        logits = [make_logits(rows, shape, seed) for seed in range(copies)]
        names = list(KINDS) if name == "mixed" else [name]
        states = states_of([KINDS[each] for each, _ in zip(itertools.cycle(names), range(rows), strict=False)])
        arguments, truncates = arguments_of(states, list(range(rows)))
        token_ids = torch.empty(rows, dtype=torch.int64, device=DEVICE)
        is_bad = torch.empty(rows, dtype=torch.bool, device=DEVICE)
        floor_us = rows * VOCAB * 4 / BYTES_PER_S * 1e6
        found = {}
        for target, warps in configurations:
            workspace = SamplingWorkspace(rows, VOCAB, table, target_programs=target)
            call = partial(
                sample,
                rows=arguments,
                workspace=workspace,
                truncates=truncates,
                token_ids=token_ids,
                is_bad=is_bad,
                num_warps=warps,
            )
            actions = [partial(call, logits[which % copies]) for which in range(CALLS)]
            found[f"{target}/{warps}"] = round(graph_us(actions), 2)
        best = min(found.values())
        say(f"time {name} {shape} rows {rows}: {best} us, one read {floor_us:.1f}", found)
        results.append(
            {"case": f"time {name} {shape}", "rows": rows, "us": best, "floor_us": floor_us, "configurations": found}
        )


def time_torch() -> None:
    for name, rows in (("greedy", 64), ("plain", 64), ("top_p", 64), ("plain", 256)):
        states = states_of([KINDS[name]] * rows)
        batch = SamplingBatch.build(states, list(range(rows)), device=DEVICE)
        logits, sampler = make_logits(rows, "model", 0), Sampler(VOCAB, device=DEVICE)
        times = []
        for _ in range(4):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            sampler.sample(logits, batch)
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3)
        say(f"time torch path {name} rows {rows}: {min(times):.0f} us")
        results.append({"case": f"time torch {name}", "rows": rows, "us": min(times)})


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    table = pack_gumbel_table(*gumbel_table(DEVICE))
    for rows, shape in itertools.product((1, 3, 37, 256), ("flat", "model", "ties")):
        guarded(f"{shape} rows {rows}", partial(check, rows, shape, table))
    guarded("cpu", lambda: check_against_cpu(table))
    every = [(512, 4), (1024, 4), (2048, 4), (1024, 8), (2048, 8)]
    for name, shape, configurations in (
        ("greedy", "model", every),
        ("plain", "model", every),
        ("plain", "flat", every[1:2]),
        ("warm", "model", every[1:2]),
        ("top_p", "model", every),
        ("top_p", "flat", every[1:2]),
        ("top_k", "model", every[1:4:2]),
        ("both", "model", every[1:2]),
        ("low_p", "model", every[1:2]),
        ("mixed", "model", every[1:2]),
    ):
        guarded(
            f"time {name} {shape}",
            partial(time_kind, name, shape, table, configurations),
        )
    guarded("torch", time_torch)
    if options.json:
        options.json.write_text(json.dumps({"device": torch.cuda.get_device_name(), "results": results}, indent=1))
    failed = sum(1 for each in results if each.get("ok") is False or "error" in each)
    say(f"{failed} failures, {time.time() - START:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
