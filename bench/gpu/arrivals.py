"""Requests that come and go: throughput, first tokens and gaps between tokens, on the layer slice of true width.

    python bench/gpu/arrivals.py --json bench/results/h200_arrivals.json

A fixed number of callers each send a request, wait for its last token and send the next, so that most steps decode some
sequences and compute the prompt of another. Prompts are 16 to 300 random tokens (``--longest``), outputs 16 to 96
tokens; the same requests in the same order for every run. ``first_token`` runs from the request to its first token on
the host, ``gap`` is the time between two tokens of one sequence. ``compiled`` counts the kernels that requests had to
wait for, by name.
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
from engine_steps import make_engine
from first_start import count_compilations

from deepinfer.checkpoint.released_slice import NUM_LAYERS
from deepinfer.engine.engine import Engine
from deepinfer.sampling.params import SamplingParams


def requests(count: int, seed: int, longest: int) -> list[tuple[list[int], SamplingParams]]:
    """Prompts of up to ``longest`` tokens, and parameters."""
    rng = random.Random(seed)
    made = []
    for _ in range(count):
        prompt = [rng.randrange(100, 100_000) for _ in range(rng.randint(16, longest))]
        made.append((prompt, SamplingParams(temperature=1.0, max_tokens=rng.randint(16, 96), ignore_eos=True)))
    return made


def serve(engine: Engine, waiting: list[tuple[list[int], SamplingParams]], callers: int) -> dict[str, Any]:
    """Run all requests, ``callers`` at a time."""
    waiting, begins, lasts = waiting[::-1], dict[str, float](), dict[str, float]()
    firsts, gaps, num_tokens, num_prompt = [], [], 0, 0
    begin = time.perf_counter()
    while waiting or begins:
        while waiting and len(begins) < callers:
            prompt, params = waiting.pop()
            begins[engine.add_request(prompt, params)] = time.perf_counter()
            num_prompt += len(prompt)
        engine.run_step()
        now = time.perf_counter()
        for delta in engine.take_deltas():
            assert delta.error is None, delta.error
            num_tokens += len(delta.token_ids)
            if delta.request_id not in lasts:
                firsts.append(1e3 * (now - begins[delta.request_id]))
            else:
                gaps.append(1e3 * (now - lasts[delta.request_id]))
            lasts[delta.request_id] = now
            if delta.finish_reason is not None:
                del begins[delta.request_id]
    elapsed = time.perf_counter() - begin
    engine.run_step()
    engine.drain()
    return {
        "callers": callers, "seconds": elapsed, "output_tokens_per_s": num_tokens / elapsed,
        "prompt_tokens_per_s": num_prompt / elapsed,
        **_spread("first_token_ms", firsts), **_spread("gap_ms", gaps),
    }  # fmt: skip


def _spread(name: str, values: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(values, n=100)
    return {f"{name}_median": cuts[49], f"{name}_mean": statistics.mean(values), f"{name}_p99": cuts[98]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--callers", default="4,16,64")
    parser.add_argument("--requests-per-caller", type=int, default=6)
    parser.add_argument("--longest", type=int, default=300)
    parser.add_argument("--drafts", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    callers = [int(part) for part in args.callers.split(",")]
    length = args.longest + 128
    engine = make_engine(args.drafts, max(callers), length, max(callers) * (length // 128 + 2) + 64, "faithful")
    results, compiled = [], count_compilations()
    for number in callers:
        compiled.clear()
        found = serve(engine, requests(number * args.requests_per_caller, number, args.longest), number)
        results.append({**found, "compiled": dict(compiled)})
        print({key: value if key == "compiled" else round(value, 2) for key, value in results[-1].items()}, flush=True)
    if args.json is not None:
        machine = {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda, "torch": torch.__version__}
        record = {
            "command": " ".join(["python", *sys.argv]), "machine": machine, "num_layers": NUM_LAYERS,
            "drafts": args.drafts, "results": results,
        }  # fmt: skip
        args.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    engine.close()


if __name__ == "__main__":
    main()
