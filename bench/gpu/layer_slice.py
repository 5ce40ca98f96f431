"""The layer slice of true width on one GPU: time per layer over its floor, launches per layer, kernels by time.

    python bench/gpu/layer_slice.py --json bench/results/h200_layer_slice.json

Dummy weights with uniform routing, caches full of random records. ``forward`` is one graph replay from the table of the
step to the last streams; ``step`` is that plus head and greedy choice. Each figure is the median over replays; every
replay reads all weights of the slice, far more than the L2 holds.
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
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepinfer.checkpoint.device_dummy import DeviceDummyCheckpoint
from deepinfer.checkpoint.device_loader import DeviceLoader
from deepinfer.checkpoint.released_slice import NUM_LAYERS, released_slice
from deepinfer.config.model import ModelConfig
from deepinfer.kvcache.sizing import cache_sizes
from deepinfer.layers.caches import BLOCK_TOKENS, CacheGeometry
from deepinfer.models.fused_loading import load_fused
from deepinfer.ops.records import RecordStore
from deepinfer.worker.device_step import HostTable, host_table
from deepinfer.worker.fused_runner import FusedRunner
from deepinfer.worker.ragged_rows import RaggedRows

COPY_TB_PER_S, FP8_TFLOPS = 4.2, 1380.0
VLLM_LAYER_US = {1: 220, 8: 405, 32: 920, 64: 1327, 128: 1754, 256: 2334}
TARGET_LAYER_US = {1: 120, 8: 320, 32: 830, 64: 1230, 128: 1640, 256: 1950}
VLLM_PREFILL_MS, TARGET_PREFILL_MS = 15.1, {"faithful": 14.0, "fast": 11.0}


def decode_floor_us(rows: int, context: int) -> float:
    """Bytes of one layer over the copy rate: dense weights, shared expert, distinct routed experts, keys."""
    distinct = 384 * (1 - (378 / 384) ** rows)
    keys = (2.46 + (3.68 - 2.46) * (min(context, 8192) - 1024) / 7168) / NUM_LAYERS * rows
    return (127 + 35 + 18.8 * distinct + keys) / COPY_TB_PER_S


def decode_table(batch: int, context: int, num_blocks: int, rows_each: int = 1) -> HostTable:
    """``batch`` sequences at position ``context``, blocks spread over the pool."""
    per_sequence = (context + rows_each) // BLOCK_TOKENS + 1
    rng = np.random.default_rng(0)
    blocks = rng.permutation(np.arange(1, num_blocks))
    tables = np.resize(blocks, batch * per_sequence).reshape(batch, per_sequence)
    zeros = np.zeros(batch, np.int64)
    rows = RaggedRows(
        starts=zeros + context,
        counts=zeros + rows_each,
        slots=np.arange(1, batch + 1),
        floors=zeros,
        entry_floors=zeros,
    )
    ids = rng.integers(0, 100_000, rows.total)
    return host_table(rows, ids, tables)


def fill(store: RecordStore) -> None:
    """Random valid records."""
    for begin in range(0, store.data.shape[0], 1 << 18):
        part = store.data[begin : begin + (1 << 18)]
        values = torch.randn(part.shape[0], store.format.width, device=part.device)
        part.copy_(store.format.encode(values))


def timed(run: Callable[[], Any], repeats: int, warm_up: int = 3) -> list[float]:
    """Milliseconds of each of ``repeats`` calls, by device events."""
    for _ in range(warm_up):
        run()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for begin, end in events:
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in events]


def steady(run: Callable[[], Any], seconds: float = 2.5, at_least: int = 4) -> list[float]:
    """Milliseconds of calls under lasting load: the first ones, on a rested GPU, are faster."""
    times: list[float] = timed(run, 1, warm_up=1)
    while len(times) < at_least or sum(times) < 1e3 * seconds:
        times += timed(run, 1, warm_up=0)
    return times


def profile(run: Callable[[], Any], repeats: int = 3) -> tuple[int, dict[str, tuple[int, float]]]:
    """Kernels per call and, by name, (launches, microseconds) per call."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    with torch_profile(activities=[ProfilerActivity.CUDA]) as prof:
        for _ in range(repeats):
            run()
        torch.cuda.synchronize()
    table: dict[str, tuple[int, float]] = {}
    for event in prof.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            count, total = table.get(event.name, (0, 0.0))
            table[event.name] = count + 1, total + event.device_time_total
    per_call = {name: (round(count / repeats), total / repeats) for name, (count, total) in table.items()}
    return sum(count for count, _ in per_call.values()), per_call


class Results(list[dict[str, Any]]):
    """The measurements so far. Every new one is written to the file, so a run that is cut short keeps its results."""

    def __init__(self, args: argparse.Namespace, config: ModelConfig, began: float) -> None:
        super().__init__()
        self._file, self._began = args.json, began
        self._facts = {
            "command": " ".join(["python", *sys.argv]),
            "machine": {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda, "torch": torch.__version__},
            "precision": args.precisions[0],
            "num_layers": NUM_LAYERS,
            "cache_bytes_per_token": cache_sizes(config, "faithful").token_bytes,
        }

    def append(self, record: dict[str, Any]) -> None:
        super().append(record)
        if self._file is not None:
            whole = {**self._facts, "seconds": time.monotonic() - self._began, "results": list(self)}
            self._file.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


class Slice:
    """The slice with its caches, and a graph for each kind of step."""

    def __init__(self, config: ModelConfig, precision: str, num_blocks: int, num_slots: int) -> None:
        self.config, self.device = config, torch.device("cuda")
        loader = DeviceLoader(DeviceDummyCheckpoint(config, self.device, parts=("text",)), self.device)
        self.model = load_fused(config, loader, self.device, precision=precision)
        print(loader.close(), flush=True)
        geometry = CacheGeometry.of(config.text, num_blocks, num_slots, 6)
        self.runner = FusedRunner(config.text, self.model, geometry, self.device)
        for layer in self.runner.caches.layers:
            for store in (layer.window, layer.entries, layer.index_keys):
                if store is not None:
                    fill(store)
        self.ngrams = None
        if self.runner.ngram_size:
            self.ngrams = torch.randint(0, 100_000, (8192, self.runner.ngram_size), device="cuda", dtype=torch.int32)
        print(f"caches: {self.runner.caches.num_bytes / 1e9:.2f} GB", flush=True)

    def inputs(self, host: HostTable) -> tuple[Tensor, Tensor]:
        return self.runner.move(host.table), self.runner.move(host.block_tables)

    def forward(self, table: Tensor, tables: Tensor, keys_first: bool, host: HostTable | None = None) -> Any:
        ngrams = None if self.ngrams is None else self.ngrams[: table.shape[1]]
        step = self.runner.step_of(table, tables, ngrams, keys_first, None if host is None else host.spans)
        return self.model.forward(step, self.runner.caches)

    def capture(self, run: Callable[[], Any]) -> torch.cuda.CUDAGraph:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return graph


@torch.inference_mode()
def measure_decode(subject: Slice, batch: int, context: int, rows_each: int, wants_profile: bool) -> dict[str, Any]:
    """One batch size and context."""
    geometry = subject.runner.caches.geometry
    host = decode_table(batch, context, geometry.num_blocks, rows_each)
    table, tables = subject.inputs(host)

    def step() -> Tensor:
        trunk, read_mix = subject.forward(table, tables, keys_first=True)
        return subject.model.logits(trunk, read_mix).argmax(-1)

    forward_graph = subject.capture(lambda: subject.forward(table, tables, keys_first=True))
    step_graph = subject.capture(step)
    forward_ms = statistics.median(timed(forward_graph.replay, 15))
    step_ms = statistics.median(timed(step_graph.replay, 15))
    rows = batch * rows_each
    layer_us, floor_us = 1e3 * forward_ms / NUM_LAYERS, decode_floor_us(rows, context)
    record: dict[str, Any] = {
        "batch": batch, "context": context, "rows_each": rows_each,
        "forward_ms": forward_ms, "step_ms": step_ms,
        "layer_us": layer_us, "floor_us": floor_us, "over_floor": layer_us / floor_us,
    }  # fmt: skip
    if rows_each == 1:
        record |= {"vllm_layer_us": VLLM_LAYER_US.get(batch), "target_layer_us": TARGET_LAYER_US.get(batch)}
    if wants_profile:
        launches, kernels = profile(forward_graph.replay)
        record["launches"] = launches
        record["launches_per_layer"] = launches / NUM_LAYERS
        top = sorted(kernels.items(), key=lambda item: -item[1][1])
        record["kernels"] = [{"name": name, "launches": n, "us": us} for name, (n, us) in top]
    del forward_graph, step_graph
    return record


@torch.inference_mode()
def measure_prefill(subject: Slice, tokens: int, chunk: int, precision: str, wants_profile: bool) -> dict[str, Any]:
    """One prompt in chunks, every layer on every token."""
    geometry = subject.runner.caches.geometry
    blocks = np.arange(1, tokens // BLOCK_TOKENS + 2) % geometry.num_blocks
    rng = np.random.default_rng(1)
    hosts = []
    for start in range(0, tokens, chunk):
        one = np.ones(1, np.int64)
        rows = RaggedRows(one * start, one * min(chunk, tokens - start), one, 0 * one, 0 * one)
        hosts.append(host_table(rows, rng.integers(0, 100_000, rows.total), blocks[None]))
    inputs = [subject.inputs(host) for host in hosts]

    def run() -> None:
        for host, (table, tables) in zip(hosts, inputs, strict=True):
            subject.forward(table, tables, keys_first=False, host=host)

    times = steady(run)
    ms = statistics.median(times[len(times) // 2 :])
    per_layer = ms / NUM_LAYERS * 8192 / tokens
    floor = 0.84e9 * 8192 / (FP8_TFLOPS * 1e12) * 1e3
    record = {
        "tokens": tokens, "chunk": chunk, "precision": precision, "ms": ms, "ms_fastest": min(times),
        "ms_per_layer_and_8192": per_layer,
        "floor_ms": floor, "over_floor": per_layer / floor, "vllm_ms": VLLM_PREFILL_MS,
        "target_ms": TARGET_PREFILL_MS[precision], "peak_gb": torch.cuda.max_memory_allocated() / 1e9,
    }  # fmt: skip
    if wants_profile:
        launches, kernels = profile(run, 1)
        top = sorted(kernels.items(), key=lambda item: -item[1][1])[:30]
        record["launches"] = launches
        record["kernels"] = [{"name": name, "launches": n, "us": us} for name, (n, us) in top]
    return record


def set_precision(subject: Slice, precision: str) -> None:
    """Both precisions use the same weights, so one loaded slice measures both."""
    is_fast = precision == "fast"
    for layer in subject.model.layers:
        attention, feed_forward = layer.attention, layer.feed_forward
        attention.split_weights = not is_fast
        feed_forward.experts.uses_fast = is_fast
        products = [attention.query_and_key, attention.query, attention.output_a, attention.output_b]
        products += [feed_forward.gate_up, feed_forward.down]
        if layer.engram is not None:
            products.append(layer.engram.projection)
        for product in products:
            product.use_fast(is_fast)


def attempt(name: str, run: Callable[[], dict[str, Any]], results: list[dict[str, Any]]) -> None:
    """Run one measurement; a failure is reported and does not end the others."""
    try:
        record = run()
    except Exception as error:
        tail = traceback.format_exc().strip().splitlines()[-4:]
        print(f"{name}: FAILED {error!r}\n  " + "\n  ".join(tail), flush=True)
        results.append({"name": name, "error": repr(error)})
        torch.cuda.synchronize()
        return
    results.append({"name": name, **record})
    shown = {key: round(value, 3) if isinstance(value, float) else value for key, value in record.items()}
    kernels = shown.pop("kernels", [])
    print(name, shown, flush=True)
    for kernel in kernels[:22]:
        print(f"    {kernel['us']:9.1f} us  {kernel['launches']:4d} x  {kernel['name'][:90]}", flush=True)


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if int(part)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=numbers, default=[1, 8, 32, 64, 128, 256])
    parser.add_argument("--contexts", type=numbers, default=[1024])
    parser.add_argument("--more-contexts", type=numbers, default=[8192, 65536], help="at batch 1 and 64")
    parser.add_argument("--profiles", type=numbers, default=[1, 64, 256], help="batches whose kernels are listed")
    parser.add_argument("--prefill", type=numbers, default=[8192])
    parser.add_argument("--chunk", type=int, default=8192)
    parser.add_argument("--precisions", nargs="+", choices=("faithful", "fast"), default=["faithful", "fast"])
    parser.add_argument("--drafts", type=int, default=0, help="also steps with so many draft rows per sequence")
    parser.add_argument("--engram", type=int, help="n-gram memory at one layer, rows per hash table")
    parser.add_argument("--num-blocks", type=int, default=40_000)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    config = released_slice(engram_vocab_size=args.engram)
    began = time.monotonic()
    loaded = "fast" if "fast" in args.precisions else "faithful"
    subject = Slice(config, loaded, args.num_blocks, max(args.batches) + 2)
    set_precision(subject, args.precisions[0])
    results = Results(args, config, began)
    for context in args.contexts:
        for batch in args.batches:
            name = f"decode B={batch} context={context}"
            wants = batch in args.profiles and context == args.contexts[0]
            attempt(name, lambda b=batch, c=context, w=wants: measure_decode(subject, b, c, 1, w), results)
    for context in args.more_contexts:
        for batch in [number for number in (1, 64) if number in args.batches]:
            name = f"decode B={batch} context={context}"
            wants = batch in args.profiles and context == args.more_contexts[-1]
            attempt(name, lambda b=batch, c=context, w=wants: measure_decode(subject, b, c, 1, w), results)
    if args.drafts:
        for batch in [number for number in (1, 64) if number in args.batches]:
            name = f"verify B={batch} drafts={args.drafts}"
            wants = batch in args.profiles
            attempt(name, lambda b=batch, w=wants: measure_decode(subject, b, 1024, 1 + args.drafts, w), results)
    for precision in args.precisions:
        set_precision(subject, precision)
        for tokens in args.prefill:
            name = f"prefill {tokens} {precision}"
            wants = tokens == args.prefill[0]
            run = lambda t=tokens, w=wants, p=precision: measure_prefill(subject, t, args.chunk, p, w)  # noqa: E731
            attempt(name, run, results)
        if precision != args.precisions[0]:
            for batch in [number for number in (1, 64) if number in args.batches]:
                name = f"decode B={batch} {precision}"
                attempt(name, lambda b=batch: measure_decode(subject, b, 1024, 1, False), results)


if __name__ == "__main__":
    main()
