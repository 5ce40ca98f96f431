"""What a decoding step costs the host, without a device: everything but the model and the sampler is the engine's own.

    python bench/host_work.py --json bench/results/host_work_cpu.json

The runner, its tables, the chain of unread steps, scheduler, commit and outputs are those of the NVIDIA path; in the
place of its graphs stand tensors that are there already. So the calls of a driver are missing, and what is left is
Python, NumPy and small tensors of a CPU: the part that grows with the sequences. Times are the medians of steps of one
thread, in microseconds; on a shared machine compare figures of one run.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import platform
import pstats
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # kernels are imported, and never run

import torch

from deepinfer.checkpoint.tiny import tiny_config
from deepinfer.config.env import read_environment
from deepinfer.config.model_file import model_config_to_dict
from deepinfer.config.resolve import resolve
from deepinfer.engine.engine import Engine
from deepinfer.engine.factory import build_engine
from deepinfer.engine.fused_setup import graph_sizes
from deepinfer.engine.speculation_setup import build_worker
from deepinfer.entrypoints.collector import lasting_objects_spared
from deepinfer.layers.fused.device_rows import Column
from deepinfer.messages import StepPlan
from deepinfer.ops.numerics import Numerics
from deepinfer.sampling.params import SamplingParams
from deepinfer.worker.fused_runner import FusedRunner
from deepinfer.worker.model_runner import StepResult
from deepinfer.worker.sample_step import Outputs
from deepinfer.worker.slot_state import SlotState


class NoGraphs:
    """In the place of a ``GraphSet``: every size is captured, and its outputs never change."""

    def __init__(self, sizes: list[int], make: Any) -> None:
        self.sizes, self._make, self._outputs = sizes, make, dict[int, Any]()

    def size_for(self, count: int) -> int | None:
        return next((size for size in self.sizes if size >= count), None)

    def is_captured(self, size: int) -> bool:
        return size in self.sizes

    def outputs(self, size: int) -> Any:
        if size not in self._outputs:
            self._outputs[size] = self._make(size)
        return self._outputs[size]

    replay = outputs


class HostRunner(FusedRunner):
    """The runner of the NVIDIA path without a model. A prompt's chunks give at once what a graph would leave."""

    def run(self, plan: StepPlan, trace: Any = None) -> StepResult:
        if all(not chunk.is_prefill for chunk in plan.chunks):
            return super().run(plan, trace)
        assert self.graphs is not None
        count = sum(chunk.num_sampled for chunk in plan.chunks)
        size = self.graphs.graphs.size_for(count)
        assert size is not None
        trunk, read_mix, ngrams, table = self.graphs.graphs.outputs(size)
        return StepResult(self.model, trunk, read_mix, torch.arange(count), True, ngrams, table, size)


def make_engine(max_num_seqs: int, context: int, steps: int, prefix_cache: str) -> Engine:
    """The engine over a runner that computes nothing."""
    length = context + steps
    model = tiny_config(vision=False, max_position_embeddings=2 * length)
    arguments = {
        "load_format": "dummy", "accelerator": "cpu", "max_num_seqs": max_num_seqs, "max_model_len": length,
        "max_num_batched_tokens": 8192, "disable_log_stats": True, "num_threads": 1, "num_speculative_tokens": 0,
        "prefix_cache": prefix_cache, "num_blocks": max_num_seqs * (length // 128 + 2) + 64, "async_scheduling": True,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(model_config_to_dict(model)), encoding="utf-8")
        config, _ = resolve({"model": directory, **arguments}, read_environment({}))
        engine = build_engine(config, progress=False)[0]
    sizes = graph_sizes(config.scheduler)
    geometry, text = engine.runner.caches.geometry, model.text
    stub: Any = SimpleNamespace(layers=(), numerics=Numerics.from_mode("faithful"))
    runner = HostRunner(text, stub, geometry, torch.device("cpu"), graph_sizes=sizes, max_blocks=-(-length // 128))
    assert runner.graphs is not None
    runner.graphs.graphs = NoGraphs(sizes, forward_of)  # type: ignore[assignment]
    worker = build_worker(config, runner, SlotState(geometry.num_slots, 0, text.engram_max_ngram_size - 1))
    assert worker.sample_step is not None
    worker.sample_step.graphs = NoGraphs(sizes, sampled_of)  # type: ignore[assignment]
    engine.worker, engine.runner, engine.timer = worker, runner, runner.timer
    return engine


def forward_of(size: int) -> tuple[Any, ...]:
    """What a graph of the backbone leaves."""
    return torch.zeros(size, 1, 1), torch.zeros(size, 1), None, torch.zeros(len(Column), size, dtype=torch.int32)


def sampled_of(size: int) -> Outputs:
    """What a graph of the sampler leaves: a token for every row."""
    storage = torch.full((8 * size,), 7)  # one copy for all, as from the kernel
    token_ids, first_row, row_tokens, positions, drafts = (storage[size * n : size * (n + 1)] for n in range(5))
    first_row.copy_(torch.arange(size))
    none, zeros = torch.zeros(size, dtype=torch.bool), torch.zeros(size, dtype=torch.int64)
    return Outputs(
        token_ids[:, None],
        zeros,
        none,
        none[:, None][:, :0],
        first_row,
        row_tokens,
        none,
        positions,
        zeros.int(),
        drafts[:, None][:, :0],
    )


def measure(engine: Engine, batch: int, context: int, steps: int, profile: int = 0) -> dict[str, Any]:
    """Decode ``batch`` sequences for ``steps`` steps, and for some more under the profiler."""
    params = SamplingParams(temperature=1.0, max_tokens=2 * steps + 64, ignore_eos=True)
    names = [engine.add_request([3 + n % 400] * context, params) for n in range(batch)]
    while engine.scheduler.num_waiting or any(each.is_prefilling for each in engine.scheduler._running):
        engine.run_step()
    for _ in range(8):
        engine.run_step()
        engine.take_deltas()
    engine.timer.reset()
    run, take = [], []
    for _ in range(steps):
        begin = time.perf_counter()
        engine.run_step()
        middle = time.perf_counter()
        engine.take_deltas()
        run.append(1e6 * (middle - begin))
        take.append(1e6 * (time.perf_counter() - middle))
    phases = {name: 1e6 * seconds / steps for name, seconds in engine.timer.seconds.items()}
    if profile:
        profiler = cProfile.Profile()
        for _ in range(steps // 2):
            profiler.runcall(engine.run_step)
            engine.take_deltas()
        pstats.Stats(profiler).sort_stats("tottime").print_stats(profile)
    for name in names:
        output = engine.get(name)
        assert output is not None
        assert len(output.outputs[0].token_ids) > steps, output.error
        engine.abort(name)
    engine.take_changes()
    engine.run_step()
    engine.drain()
    return {
        "batch": batch, "step_us": statistics.median(run), "deltas_us": statistics.median(take),
        "fastest_step_us": min(run), "phases_us": phases,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", default="1,8,32,64,128,256")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--prefix-cache", default="off")
    parser.add_argument("--profile", type=int, default=0, help="print so many functions by their own time")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    batches = [int(part) for part in args.batches.split(",")]
    engine = make_engine(max(batches), args.context, 3 * args.steps, args.prefix_cache)
    results = []
    for batch in batches:
        with lasting_objects_spared():  # as LLM.generate does
            results.append(measure(engine, batch, args.context, args.steps, args.profile))
        shown = {
            key: value if key != "phases_us" else {n: round(us) for n, us in value.items()}
            for key, value in results[-1].items()
        }
        print(shown, flush=True)
    engine.close()
    record = {
        "command": " ".join(["python", *sys.argv]),
        "machine": {
            "cpu": platform.processor() or platform.machine(),
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
        "results": results,
    }
    if args.json is not None:
        args.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
