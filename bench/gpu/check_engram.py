"""Engram kernels on a GPU: hashes and rows exactly, the gate against float64, placements, times over bytes.

    python bench/gpu/check_engram.py [--json FILE] [--vocab-size 1000000]

The table has 24 hash tables of ``--vocab-size`` rows: 6.3 GB by default, far more than the L2 holds, so every gather is
cold. A part of it is copied to pinned host memory and read from there. Also timed: making synthetic weights.
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

from deepinfer.checkpoint.device_dummy import DeviceDummyCheckpoint
from deepinfer.checkpoint.device_loader import DeviceLoader, copy_table
from deepinfer.checkpoint.released_slice import ENGRAM_LAYER, released_slice
from deepinfer.config.engram_hashing import engram_multipliers, engram_primes
from deepinfer.kernels.engram.gate import engram_gate
from deepinfer.kernels.engram.gather import NgramHash, engram_gather, engram_row_numbers
from deepinfer.kernels.engram.placement import (
    DeviceTable,
    EngramPlacement,
    HostTable,
    MappedTable,
    PinnedTable,
    pinned_bytes,
)
from deepinfer.ops.engram import engram_gate as reference_gate
from deepinfer.ops.engram import engram_rows, ngram_context

START = time.time()
DEVICE = torch.device("cuda")
BYTES_PER_S = 4.2e12
CALLS = 16
VOCAB, WIDTH, HEADS, STREAMS, HIDDEN = 129_280, 256, 8, 4, 5120
ROWS = (1, 8, 32, 64, 128, 256, 8192)
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


def graph_us(actions: Sequence[Callable[[], object]]) -> float:
    actions[0]()
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


def make_hash(vocab_size: int) -> NgramHash:
    (primes,) = engram_primes(1, 4, HEADS, vocab_size)
    offsets = list(itertools.accumulate(primes, initial=0))[:-1]
    generator = torch.Generator().manual_seed(0)
    token_map = torch.randint(0, 99_092, (VOCAB,), dtype=torch.int32, generator=generator)
    return NgramHash(
        token_map=token_map.to(DEVICE),
        pad=2,
        multipliers=torch.tensor(engram_multipliers(ENGRAM_LAYER, 4, 99_092), device=DEVICE),
        primes=torch.tensor(primes, device=DEVICE).view(3, HEADS),
        offsets=torch.tensor(offsets, device=DEVICE).view(3, HEADS),
    )


def make_ids(rows: int, seed: int = 0) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    ids = torch.randint(0, VOCAB, (rows, 4), device=DEVICE, generator=generator, dtype=torch.int32)
    ids[1::7, 2] = -1
    ids[3::11, 0] = -1
    return ids


def expected_numbers(ids: Tensor, constants: NgramHash) -> Tensor:
    context = ngram_context(constants.token_map.long(), ids.long(), constants.pad)
    return engram_rows(context, constants.multipliers, constants.primes, constants.offsets)


def expected_values(numbers: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    flat = numbers.flatten()
    values = codes[flat].view(torch.float8_e4m3fn).float().view(len(flat), -1, 32)
    factors = torch.exp2(scales[flat].float() - 127)
    return (values * factors[..., None]).to(torch.bfloat16).view(numbers.shape[0], -1)


def check_gather(constants: NgramHash, codes: Tensor, scales: Tensor) -> None:
    for rows in (1, 5, 257):
        ids = make_ids(rows, rows)
        numbers = expected_numbers(ids, constants)
        report(f"row numbers, rows {rows}", torch.equal(engram_row_numbers(ids, constants), numbers))
        found = engram_gather(ids, constants, codes, scales)
        report(f"gather, rows {rows}", torch.equal(found, expected_values(numbers, codes, scales)))


def check_gate() -> None:
    for rows in (1, 3, 131):
        trunk = torch.randn(rows, STREAMS, HIDDEN, device=DEVICE).bfloat16()
        keys_value = torch.randn(rows, STREAMS + 1, HIDDEN, device=DEVICE).bfloat16()
        keys_value[0, :STREAMS] = trunk[0]
        weight = 1 + 0.2 * torch.randn(STREAMS, HIDDEN, device=DEVICE)
        is_image = torch.arange(rows, device=DEVICE) % 5 == 4
        expected = reference_gate(trunk, keys_value, weight.double(), 1e-20)
        expected = torch.where(is_image[:, None, None], trunk, expected)
        found = engram_gate(trunk, keys_value.flatten(1), weight, 1e-20, is_image)
        share = (found != expected).float().mean().item()
        largest = (found.float() - expected.float()).abs().max().item()
        report(f"gate, rows {rows}", share < 1e-3 and largest < 0.1, f"{share:.1e} differ, at most {largest:.1e}")
        alone = engram_gate(trunk[:1].contiguous(), keys_value[:1].flatten(1).contiguous(), weight, 1e-20)
        report(f"gate, row alone of {rows}", torch.equal(alone[0], found[0]))


def check_placements(constants: NgramHash, codes: Tensor, scales: Tensor, table: HostTable) -> None:
    placed: dict[str, EngramPlacement] = {
        "device": DeviceTable(codes, scales, constants, 256),
        "mapped": MappedTable(table, constants, 256),
    }
    begin_s = time.perf_counter()
    host = [pinned_bytes(*part.shape) for part in (codes, scales)]
    middle_s = time.perf_counter()
    for target, source in zip(host, (codes, scales), strict=True):
        target.copy_(source)
    torch.cuda.synchronize()
    size = sum(part.numel() for part in host) / 1e9
    say(f"pinned {size:.1f} GB in {middle_s - begin_s:.1f} s, filled in {time.perf_counter() - middle_s:.1f} s")
    placed["pinned"] = PinnedTable(host[0], host[1], constants, 256)
    for name, placement in placed.items():
        for rows in (1, 64, 256):
            ids = make_ids(rows, 9 + rows)
            numbers = expected_numbers(ids, constants)
            placement.begin(ids)
            ok = torch.equal(placement.rows(), expected_values(numbers, codes, scales))
            torch.cuda.synchronize()
            times = []
            for seed in range(5):
                ids = make_ids(rows, 100 + seed)
                torch.cuda.synchronize()
                start_s = time.perf_counter()
                placement.begin(ids)
                placement.rows()
                torch.cuda.synchronize()
                times.append((time.perf_counter() - start_s) * 1e6)
            report(f"placement {name}, rows {rows}", ok, f"{statistics.median(times):.0f} us from begin to rows, wall")
            results[-1]["wall_us"] = statistics.median(times)
    for rows in (1, 8, 64, 256):
        inputs = [make_ids(rows, seed) for seed in range(CALLS)]
        found = {warps: gather_us(inputs, constants, host, warps) for warps in (1, 4)}
        moved = rows * 24 * (WIDTH + WIDTH // 32)
        say(f"time gather from pinned memory, rows {rows}: {found} us, {moved / min(found.values()) / 1e3:.1f} GB/s")
        results.append({"case": "time gather pinned", "rows": rows, "us": found})


def gather_us(inputs: list[Tensor], constants: NgramHash, table: list[Tensor], warps: int) -> float:
    out = torch.empty(inputs[0].shape[0], 24 * WIDTH, dtype=torch.bfloat16, device=DEVICE)
    gather = partial(engram_gather, constants=constants, codes=table[0], scales=table[1], out=out, num_warps=warps)
    return round(graph_us([partial(gather, ids) for ids in inputs]), 2)


def time_kernels(constants: NgramHash, codes: Tensor, scales: Tensor) -> None:
    weight = torch.randn(STREAMS, HIDDEN, device=DEVICE)
    for rows in ROWS:
        inputs = [make_ids(rows, seed) for seed in range(CALLS)]
        floor_us = rows * 24 * (WIDTH + WIDTH // 32 + 2 * WIDTH) / BYTES_PER_S * 1e6
        found = {warps: gather_us(inputs, constants, [codes, scales], warps) for warps in (1, 2, 4)}
        say(f"time gather, rows {rows}: {found} us by warps, floor {floor_us:.2f}")
        results.append({"case": "time gather", "rows": rows, "us": found, "floor_us": floor_us})
        copies = max(1, min(CALLS, (256 << 20) // (rows * 18 * HIDDEN)))
        trunk = torch.randn(copies, rows, STREAMS, HIDDEN, device=DEVICE).bfloat16()
        keys_value = torch.randn(copies, rows, (STREAMS + 1) * HIDDEN, device=DEVICE).bfloat16()
        floor_us = rows * (3 * STREAMS + 1) * HIDDEN * 2 / BYTES_PER_S * 1e6
        found = {}
        for warps in (4, 8, 16):
            gate = partial(engram_gate, gate_weight=weight, eps=1e-20, num_warps=warps)
            pairs = [(trunk[i % copies], keys_value[i % copies]) for i in range(CALLS)]
            actions = [partial(gate, streams, keys, out=streams) for streams, keys in pairs]
            found[warps] = round(graph_us(actions), 2)
        say(f"time gate, rows {rows}: {found} us by warps, floor {floor_us:.2f}")
        results.append({"case": "time gate", "rows": rows, "us": found, "floor_us": floor_us})


def time_dummy() -> None:
    source = DeviceDummyCheckpoint(released_slice(), DEVICE)
    loader = DeviceLoader(source, DEVICE)
    loader.expert_stack("layers.0", "w1")
    for name in source.specs:
        if name.startswith("layers.2.") and ".experts." not in name:
            loader.tensor(name)
    say("warm", loader.close())
    loader = DeviceLoader(source, DEVICE)
    for projection in ("w1", "w2", "w3"):
        loader.expert_stack("layers.5", projection)
    loader.tensor("head.weight")
    made = loader.close()
    say("synthetic weights:", made)
    results.append({"case": "synthetic weights", "gb_per_s": made.gb_per_s, "peak_bytes": made.peak_bytes})
    on_cpu = DeviceDummyCheckpoint(released_slice(), torch.device("cpu"))
    for name in ("layers.3.attn.wq_a.weight", "layers.3.hc_attn_fn", "layers.3.ffn.experts.7.w2.weight"):
        here, there = source.tensor(name), on_cpu.tensor(name)
        same = torch.equal(here.data.cpu().view(torch.uint8), there.data.view(torch.uint8))
        report(f"synthetic {name} as on a CPU", same)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--vocab-size", type=int, default=1_000_000)
    options = parser.parse_args()
    guarded("synthetic weights", time_dummy)
    constants = make_hash(options.vocab_size)
    source = DeviceDummyCheckpoint(released_slice(engram_vocab_size=options.vocab_size), DEVICE)
    table = source.engram_table(ENGRAM_LAYER)
    codes = torch.empty((table.rows, table.width), dtype=torch.uint8, device=DEVICE)
    scales = torch.empty((table.rows, table.width // 32), dtype=torch.uint8, device=DEVICE)
    copy_table(table, codes, scales)
    torch.cuda.synchronize()
    say(f"table of {table.rows:,} rows, {(codes.numel() + scales.numel()) / 1e9:.1f} GB")
    guarded("gather", lambda: check_gather(constants, codes, scales))
    guarded("gate", check_gate)
    guarded("times", lambda: time_kernels(constants, codes, scales))
    guarded("placements", lambda: check_placements(constants, codes, scales, table))
    if options.json:
        options.json.write_text(json.dumps({"device": torch.cuda.get_device_name(), "results": results}, indent=1))
    failed = sum(1 for each in results if each.get("ok") is False or "error" in each)
    say(f"{failed} failures, {time.time() - START:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
