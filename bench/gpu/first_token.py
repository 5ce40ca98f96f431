"""Time to the first token of one prompt in an idle engine, against the GPU time of its steps, on the layer slice.

    python bench/gpu/first_token.py --json bench/results/h200_first_token.json

``wall`` runs from the request to its first token on the host, the median of some prompts of random tokens; ``gpu`` is
the time in which any kernel of such a prompt ran, by the profiler. Prompts are not captured as graphs: what the wall
time has more is the host's launches, where they do not keep up, and the way there and back.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from engine_steps import gpu_work, make_engine

from deepinfer.checkpoint.released_slice import NUM_LAYERS
from deepinfer.engine.engine import Engine
from deepinfer.sampling.params import SamplingParams


def first_token(engine: Engine, length: int, rng: random.Random) -> float:
    """Milliseconds from a request to its first token."""
    prompt = [rng.randrange(100, 100_000) for _ in range(length)]
    begin = time.perf_counter()
    name = engine.add_request(prompt, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
    while not engine.is_finished(name):
        engine.run_step()
    elapsed = 1e3 * (time.perf_counter() - begin)
    (output,) = engine.take_changes()
    assert output.error is None, output.error
    engine.run_step()
    engine.drain()
    return elapsed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="1,16,64,128,256,512,1024,2048,4096,8192,16384")
    parser.add_argument("--drafts", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    lengths, rng = [int(part) for part in args.lengths.split(",")], random.Random(0)
    most = max(lengths) + 16
    engine = make_engine(args.drafts, 64, most, 64 + most // 128, "faithful")
    results: list[dict[str, Any]] = []
    for length in lengths:
        for _ in range(3):
            first_token(engine, length, rng)
        walls = [first_token(engine, length, rng) for _ in range(args.repeats)]
        gpu_ms, calls, _ = gpu_work(lambda length=length: first_token(engine, length, rng), 3)
        wall_ms = statistics.median(walls)
        results.append(
            {"tokens": length, "wall_ms": wall_ms, "fastest_ms": min(walls), "gpu_ms": gpu_ms,
             "wall_over_gpu": wall_ms / gpu_ms, "launches": calls}
        )  # fmt: skip
        print({key: round(value, 3) if isinstance(value, float) else value for key, value in results[-1].items()})
        torch.cuda.synchronize()
    if args.json is not None:
        machine = {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda, "torch": torch.__version__}
        record = {
            "command": " ".join(["python", *sys.argv]), "machine": machine, "num_layers": NUM_LAYERS, "results": results
        }  # fmt: skip
        args.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    engine.close()


if __name__ == "__main__":
    main()
