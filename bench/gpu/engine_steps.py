"""Wall time of a decoding step of the whole engine against its GPU time, on the layer slice of true width.

    python bench/gpu/engine_steps.py --json bench/results/h200_engine_steps.json

Every sequence has a prompt of random tokens; then all decode. ``wall`` is the median time between steps as a caller
sees them, ``gpu`` the union of kernel time of a step by the profiler, ``phases`` what scheduling, batches, launches
and commits take by the engine's own clocks, and waiting for results; ``host`` is the wall time less that (mean of the
timed steps; none where steps are not chained, whose waiting is not told apart). ``launches`` counts, per step,
what the host hands to the driver: replays of graphs, single kernels, copies and fills, and waits. With ``--drafts`` a
step verifies that many drafts per sequence and makes new ones; ``tokens_per_step`` says how many stand, which for
dummy weights is little more than one.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from deepinfer.checkpoint.released_slice import NUM_LAYERS, released_slice
from deepinfer.config.env import read_environment
from deepinfer.config.model_file import model_config_to_dict
from deepinfer.config.resolve import resolve
from deepinfer.engine.engine import Engine
from deepinfer.engine.factory import build_engine
from deepinfer.entrypoints.collector import lasting_objects_spared
from deepinfer.sampling.params import SamplingParams

VLLM_WALL_MS = {1: 3.90, 8: 5.60, 32: 11.84, 64: 17.17, 128: 23.40, 256: 28.1}


def make_engine(num_drafts: int, max_num_seqs: int, max_model_len: int, num_blocks: int, numerics: str) -> Engine:
    """The engine over dummy weights, sequences of random ids."""
    directory = Path(tempfile.mkdtemp())
    config = released_slice(draft=num_drafts > 0)
    (directory / "config.json").write_text(json.dumps(model_config_to_dict(config)), encoding="utf-8")
    arguments = {
        "model": directory, "load_format": "dummy", "accelerator": "nvidia", "numerics": numerics,
        "max_num_seqs": max_num_seqs, "max_model_len": max_model_len, "num_blocks": num_blocks,
        "num_speculative_tokens": num_drafts, "adaptive_verification": False, "max_num_batched_tokens": 8192,
        "disable_log_stats": True, "prefix_cache": "off",
    }  # fmt: skip
    resolved, _ = resolve(arguments, read_environment({}))
    return build_engine(resolved, progress=False)[0]


_CALLS = {
    "graph_replays": ("cudaGraphLaunch", "cuGraphLaunch"),
    "kernels": (
        "cudaLaunchKernel", "cudaLaunchKernelExC", "cudaLaunchCooperativeKernel", "cuLaunchKernel", "cuLaunchKernelEx",
        "cuLaunchCooperativeKernel",
    ),
    "copies_and_fills": ("cudaMemcpyAsync", "cudaMemcpy", "cudaMemsetAsync", "cuMemcpyAsync", "cuMemsetD32Async"),
    "waits": ("cudaEventSynchronize", "cudaStreamSynchronize", "cuStreamSynchronize"),
}  # fmt: skip
"""What the host asks of the driver, by the names of the calls."""


def gpu_work(run: Any, repeats: int) -> tuple[float, dict[str, float], dict[str, tuple[float, float]]]:
    """Work of a call of ``run``.

    Returns:
        milliseconds in which at least one kernel ran; calls of the host to the driver; by kernel (launches,
        microseconds). Kernels overlap, so the last add up to more than the first.
    """
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        for _ in range(repeats):
            run()
        torch.cuda.synchronize()
    events = prof.events()
    calls = dict.fromkeys(_CALLS, 0.0)
    for event in events:
        name = event.name.removesuffix("_ptsz").removesuffix("_v2")
        for kind, names in _CALLS.items():
            calls[kind] += (name in names) / repeats
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    busy, end = 0.0, 0.0
    for start, stop in spans:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    kernels: dict[str, tuple[float, float]] = {}
    for event in events:
        if event.device_type == torch.autograd.DeviceType.CUDA:
            count, total = kernels.get(event.name, (0.0, 0.0))
            kernels[event.name] = count + 1 / repeats, total + event.device_time_total / repeats
    return busy / repeats / 1e3, calls, kernels


def _wake(seconds: float = 0.5) -> None:
    """Bring the clocks up again: while the first prompt compiles kernels the GPU rests for seconds."""
    matrix = torch.ones(4096, 4096, device="cuda", dtype=torch.bfloat16)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        torch.mm(matrix, matrix)
        torch.cuda.synchronize()


def _num_tokens(engine: Engine, names: list[str]) -> int:
    """Tokens that these requests have got."""
    outputs = [engine.get(name) for name in names]
    return sum(len(output.outputs[0].token_ids) for output in outputs if output is not None)


def measure(
    engine: Engine, batch: int, context: int, steps: int, num_drafts: int, temperature: float
) -> dict[str, Any]:
    """Decode ``batch`` sequences for ``steps`` steps."""
    rng = random.Random(batch)
    params = SamplingParams(temperature=temperature, max_tokens=(steps + 60) * (1 + num_drafts), ignore_eos=True)
    names = [engine.add_request([rng.randrange(100, 100_000) for _ in range(context)], params) for _ in range(batch)]
    begin, num_prefilled = time.perf_counter(), -1
    while num_prefilled != engine.statistics.num_prefill_tokens or engine.scheduler.num_waiting:
        num_prefilled = engine.statistics.num_prefill_tokens
        engine.run_step()
        engine.run_step()  # steps are committed one step later
    prefill_s = time.perf_counter() - begin
    _wake()
    for _ in range(8):
        engine.run_step()
    torch.cuda.synchronize()
    engine.timer.reset()
    walls, num_before = [], _num_tokens(engine, names)
    last = time.perf_counter()
    for _ in range(steps):
        engine.run_step()
        now = time.perf_counter()
        walls.append(1e3 * (now - last))
        last = now
    phases = {name: 1e3 * seconds / steps for name, seconds in engine.timer.seconds.items()}
    host_ms = statistics.mean(walls) - phases["wait"] if "wait" in phases else None
    num_tokens = _num_tokens(engine, names) - num_before
    gpu_ms, calls, kernels = gpu_work(engine.run_step, 10)
    for name in names:
        engine.abort(name)
    engine.take_changes()
    engine.run_step()
    engine.drain()
    wall_ms = statistics.median(walls)
    return {
        "batch": batch, "context": context, "drafts": num_drafts, "wall_ms": wall_ms,
        "wall_mean_ms": statistics.mean(walls), "wall_max_ms": max(walls),
        "wall_p90_ms": statistics.quantiles(walls, n=10)[8], "gpu_ms": gpu_ms, "wall_over_gpu": wall_ms / gpu_ms,
        "host_ms": host_ms, "launches": calls, "tokens_per_step": num_tokens / steps / batch,
        "tokens_per_s": num_tokens / steps * 1e3 / wall_ms, "phases_ms": phases, "prefill_s": prefill_s,
        "vllm_wall_ms": VLLM_WALL_MS.get(batch) if not num_drafts else None,
        "kernels": [
            {"name": name, "launches": count, "us": us}
            for name, (count, us) in sorted(kernels.items(), key=lambda item: -item[1][1])[:40]
        ],
    }  # fmt: skip


def write(path: Path | None, results: list[dict[str, Any]]) -> None:
    """Keep the results so far: a run that is cut short has not been in vain."""
    record = {
        "command": " ".join(["python", *sys.argv]),
        "machine": {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda, "torch": torch.__version__},
        "num_layers": NUM_LAYERS,
        "results": results,
    }
    if path is not None:
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", default="1,8,32,64,128,256")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--drafts", type=int, default=0)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--numerics", default="faithful")
    parser.add_argument("--kernels", type=int, default=0, help="print so many kernels of a step, by time")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    batches = [int(part) for part in args.batches.split(",")]
    length = args.context + (args.steps + 64) * (1 + args.drafts) + 128
    num_blocks = max(batches) * (length // 128 + 2) + 64
    engine = make_engine(args.drafts, max(batches), length, num_blocks, args.numerics)
    results: list[dict[str, Any]] = []
    for batch in batches:
        try:
            with lasting_objects_spared():  # as LLM.generate does
                record = measure(engine, batch, args.context, args.steps, args.drafts, args.temperature)
        except Exception as error:
            print(f"B={batch} FAILED {error!r}", *traceback.format_exc().splitlines()[-6:], sep="\n  ", flush=True)
            results.append({"batch": batch, "error": repr(error)})
            write(args.json, results)
            continue
        results.append(record)
        write(args.json, results)
        shown = {key: round(value, 3) if isinstance(value, float) else value for key, value in record.items()}
        for name in ("phases_ms", "launches"):
            shown[name] = {key: round(value, 3) for key, value in record[name].items()}
        del shown["kernels"]
        print(shown, flush=True)
        for kernel in record["kernels"][: args.kernels]:
            print(f"    {kernel['us']:9.1f} us  {kernel['launches']:6.1f} x  {kernel['name'][:90]}", flush=True)
    engine.close()


if __name__ == "__main__":
    main()
