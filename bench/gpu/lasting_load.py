"""Decoding steps under lasting load: time per layer in the first quarter second and later, SM clock, power, its limit.

    python bench/gpu/lasting_load.py --batches 64,256 [--rows-each 6] [--plans "now;1,1,2,20/1,1,2,20"] [--json FILE]

The layer slice of true width (``layer_slice.py``), a CUDA graph per case, replayed for 1.2 s after 0.3 s of rest. Cases
take turns, in opposite order every other round. ``--plans``: of the routed experts' two products, as ``pair tiles,
split, depth, warps`` (:class:`deepinfer.kernels.moe.grouped_skinny.Plan`); ``now`` are those that the engine takes,
``many`` are the kernels for many rows.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from layer_slice import Slice, decode_table, numbers

from deepinfer.checkpoint.released_slice import NUM_LAYERS, released_slice
from deepinfer.kernels.moe import experts_hopper
from deepinfer.kernels.moe.grouped_skinny import Plan

REST_S, BURST_S, SETTLED_S, END_S = 0.3, 0.25, 0.6, 1.2
_FIELDS = "clocks.sm", "clocks.mem", "power.draw.instant", "temperature.gpu", "clocks_event_reasons.active"
_NOW = experts_hopper.PLANS


@dataclass(frozen=True, slots=True)
class Sample:
    """What the driver says at one time."""

    at: float
    sm_mhz: float
    memory_mhz: float
    watts: float
    celsius: float
    reasons: str
    """For a clock below the highest, a bit mask: 0x4 is the limit on power."""


class Monitor:
    """Asks the driver every 50 ms."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        command = ["nvidia-smi", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits", "-lms", "50"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            *values, reasons = (part.strip() for part in line.split(","))
            self.samples.append(Sample(time.perf_counter(), *map(float, values), reasons))

    def between(self, begin: float, end: float) -> dict[str, Any]:
        found = [sample for sample in self.samples if begin < sample.at < end]
        means = {
            name: statistics.mean(getattr(sample, name) for sample in found) if found else None
            for name in ("sm_mhz", "memory_mhz", "watts", "celsius")
        }
        return {**means, "reasons": sorted({sample.reasons for sample in found})}

    def close(self) -> None:
        self._process.kill()


def replay(graph: torch.cuda.CUDAGraph) -> tuple[float, list[tuple[float, float]]]:
    """When it began, and (seconds since then, milliseconds) of each replay."""
    time.sleep(REST_S)
    begin, found = time.perf_counter(), list[tuple[float, float]]()
    while (now := time.perf_counter() - begin) < END_S:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(5)]
        events[0].record()
        for event in events[1:]:
            graph.replay()
            event.record()
        torch.cuda.synchronize()
        found += [(now, before.elapsed_time(after)) for before, after in itertools.pairwise(events)]
    return begin, found


def plan_of(text: str) -> Plan:
    pair_tiles, split, depth, warps = (int(part) for part in text.split(","))
    return Plan(pair_tiles, split, depth, warps)


def set_plans(name: str) -> None:
    experts_hopper.PLANS = _NOW
    if name == "many":
        experts_hopper.PLANS = ()
    elif name != "now":
        gate_up, down = name.split("/")
        experts_hopper.PLANS = ((0, float("inf"), plan_of(gate_up), plan_of(down)),)


@torch.inference_mode()
def measure(subject: Slice, monitor: Monitor, batch: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """All plans at one batch size."""
    host = decode_table(batch, args.context, subject.runner.caches.geometry.num_blocks, args.rows_each)
    table, tables = subject.inputs(host)
    graphs = {}
    for name in args.plans.split(";"):
        set_plans(name)
        graphs[name] = subject.capture(lambda: subject.forward(table, tables, keys_first=True))
    set_plans("now")
    results = []
    for turn in range(args.rounds):
        for name in list(graphs)[:: 1 if turn % 2 == 0 else -1]:
            begin, times = replay(graphs[name])
            burst = statistics.median(ms for at, ms in times if at < BURST_S)
            settled = statistics.median(ms for at, ms in times if at > SETTLED_S)
            record = {
                "batch": batch, "rows_each": args.rows_each, "plans": name, "round": turn,
                "burst_layer_us": 1e3 * burst / NUM_LAYERS, "settled_layer_us": 1e3 * settled / NUM_LAYERS,
                **monitor.between(begin + SETTLED_S, begin + END_S),
            }  # fmt: skip
            results.append(record)
            print({key: round(value, 1) if isinstance(value, float) else value for key, value in record.items()})
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=numbers, default=[1, 32, 64, 128, 256])
    parser.add_argument("--rows-each", type=int, default=1)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--plans", default="now")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--num-blocks", type=int, default=8000)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    subject = Slice(released_slice(), "faithful", args.num_blocks, max(args.batches) + 2)
    monitor, results = Monitor(), list[dict[str, Any]]()
    facts = {
        "command": " ".join(["python", *sys.argv]),
        "machine": {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda, "torch": torch.__version__},
        "num_layers": NUM_LAYERS,
    }
    for batch in args.batches:
        results += measure(subject, monitor, batch, args)
        if args.json is not None:
            args.json.write_text(json.dumps({**facts, "results": results}, indent=1) + "\n", encoding="utf-8")
    monitor.close()


if __name__ == "__main__":
    main()
