"""Decode speed without drafts, with fixed drafts and with scheduled verification, as ratios within one run.

    python bench/speculation.py --json bench/results/speculation_cpu.json --plot bench/results/speculation_cpu.png

The three engines take turns on the same requests, so whatever else the machine does hits all of them. Times are CPU
seconds of the one thread that computes. A run counts from the first step in which every request decodes to the one in
which the first of them ends. Outputs are compared before a time is believed: the default sampler promises the same
tokens whatever is drafted.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepinfer.config.env import read_environment
from deepinfer.config.resolve import resolve
from deepinfer.engine.engine import Engine
from deepinfer.engine.factory import build_engine
from deepinfer.entrypoints.benchmark.record import environment_record, short_path
from deepinfer.entrypoints.default_model import TRAINED, default_model
from deepinfer.evaluation.tasks.filler import filler_sentence
from deepinfer.sampling.params import SamplingParams

ROOT = Path(__file__).resolve().parents[1]
VARIANTS: dict[str, dict[str, Any]] = {
    "none": {"num_speculative_tokens": 0},
    "fixed": {"num_speculative_tokens": 5},
    "scheduled": {"num_speculative_tokens": 5, "adaptive_verification": True},
}


@dataclass
class Measured:
    """All rounds of one variant at one concurrency."""

    tokens_per_s: list[float] = field(default_factory=list)
    num_steps: int = 0
    num_tokens: int = 0
    num_verified: int = 0
    num_accepted: int = 0


def make_engine(path: Path, max_num_seqs: int, **arguments: Any) -> Engine:
    fixed = {"model": path, "num_threads": 1, "max_num_seqs": max_num_seqs, "max_model_len": 512}
    fixed |= {"disable_log_stats": True, "prefix_cache": "off"}
    config, _ = resolve({**fixed, **arguments}, read_environment({}))
    return build_engine(config, progress=False)[0]


def prompts_of(engine: Engine, count: int, seed: int) -> list[list[int]]:
    """Short texts of a kind that the trained model has seen."""
    rng = random.Random(f"speculation {seed}")
    texts = [" ".join(filler_sentence(rng) for _ in range(3)) for _ in range(count)]
    assert engine.tokenizer is not None
    return [engine.tokenizer.encode(text, add_bos=True) for text in texts]


def measure(engine: Engine, prompts: Sequence[list[int]], params: dict[str, Any], into: Measured) -> list[list[int]]:
    """Generate from all prompts at once. Returns the tokens."""
    names = [
        engine.add_request(prompt, SamplingParams(ignore_eos=True, seq_seed=index, **params))
        for index, prompt in enumerate(prompts)
    ]
    num_decoding = 0
    while num_decoding < len(names):  # the first of many prompts may be done some steps before the last
        before = engine.statistics.num_decode_tokens
        engine.run_step()
        num_decoding = engine.statistics.num_decode_tokens - before
    first = counts(engine, names)
    begin, num_steps = time.process_time(), 0
    while not any(engine.is_finished(name) for name in names):
        engine.run_step()
        num_steps += 1
    elapsed_s = time.process_time() - begin
    last = counts(engine, names)
    tokens, verified, accepted = (b - a for a, b in zip(first, last, strict=True))
    into.tokens_per_s.append(tokens / elapsed_s)
    into.num_steps += num_steps
    into.num_tokens += tokens
    into.num_verified += verified
    into.num_accepted += accepted
    found: dict[str, list[int]] = {}
    while len(found) < len(names):
        engine.run_step()
        for output in engine.take_finished(names):
            assert output.error is None, output.error
            found[output.request_id] = output.outputs[0].token_ids
    engine.drain()
    return [found[name] for name in names]


def counts(engine: Engine, names: Sequence[str]) -> tuple[int, int, int]:
    """Tokens, verified and accepted drafts of live requests so far."""
    outputs = [request.outputs[0] for request in map(engine.get, names) if request is not None]
    return (
        sum(len(output.token_ids) for output in outputs),
        sum(output.num_drafts_verified for output in outputs),
        sum(output.num_drafts_accepted for output in outputs),
    )


def run(path: Path, concurrencies: Sequence[int], rounds: int, params: dict[str, Any]) -> dict[str, Any]:
    """All measurements, with where they come from."""
    engines = {name: make_engine(path, max(concurrencies), **more) for name, more in VARIANTS.items()}
    rows = []
    for concurrency in concurrencies:
        measured = {name: Measured() for name in VARIANTS}
        for number in range(-1, rounds):
            order = list(VARIANTS)
            shift = number % len(order)
            prompts = prompts_of(engines["none"], concurrency, seed=number)
            outputs = {}
            for name in order[shift:] + order[:shift]:
                into = measured[name] if number >= 0 else Measured()  # the first round warms up
                outputs[name] = measure(engines[name], prompts, params, into)
            assert outputs["none"] == outputs["fixed"] == outputs["scheduled"], "the texts have to be the same"
        rows.append(row_of(concurrency, measured))
        print(as_text(rows[-1]), file=sys.stderr)
    return {
        "model": short_path(path),
        "is_trained": path == TRAINED,
        "params": params,
        "rounds": rounds,
        "rows": rows,
        **environment_record(engines["scheduled"].config),
    }


def row_of(concurrency: int, measured: dict[str, Measured]) -> dict[str, Any]:
    """Medians over rounds; ratios are medians of the ratios of each round."""
    rates = {name: each.tokens_per_s for name, each in measured.items()}
    pairs = list(zip(rates["none"], rates["fixed"], rates["scheduled"], strict=True))
    return {
        "concurrency": concurrency,
        "tokens_per_s": {name: statistics.median(values) for name, values in rates.items()},
        "tokens_per_sequence_and_step": {
            name: each.num_tokens / (each.num_steps * concurrency) for name, each in measured.items()
        },
        "drafts_verified_per_step": {
            name: each.num_verified / (each.num_steps * concurrency) for name, each in measured.items()
        },
        "acceptance": {name: each.num_accepted / max(each.num_verified, 1) for name, each in measured.items()},
        "fixed_over_none": statistics.median(fixed / none for none, fixed, _ in pairs),
        "scheduled_over_none": statistics.median(scheduled / none for none, _, scheduled in pairs),
        "scheduled_over_better": statistics.median(scheduled / max(none, fixed) for none, fixed, scheduled in pairs),
    }


def as_text(row: dict[str, Any]) -> str:
    rates = ", ".join(f"{name} {rate:.0f}" for name, rate in row["tokens_per_s"].items())
    return (
        f"{row['concurrency']:3} requests: tokens/s {rates}; fixed/none {row['fixed_over_none']:.2f}, scheduled/none "
        f"{row['scheduled_over_none']:.2f}, scheduled/better {row['scheduled_over_better']:.2f}; accepted "
        f"{row['acceptance']['fixed']:.2f} of fixed, {row['acceptance']['scheduled']:.2f} of "
        f"{row['drafts_verified_per_step']['scheduled']:.1f} scheduled drafts"
    )


def plot(record: dict[str, Any], path: Path) -> None:
    """Speed over that without drafts, by number of requests."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    places = range(len(record["rows"]))
    for shift, name in ((-0.2, "fixed"), (0.2, "scheduled")):
        values = [row[f"{name}_over_none"] for row in record["rows"]]
        axes.bar([place + shift for place in places], values, 0.4, label=name)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(list(places), [str(row["concurrency"]) for row in record["rows"]])
    axes.set_xlabel("requests at the same time")
    axes.set_ylabel("decode tokens/s over those without drafts")
    axes.set_title("trained tiny model, one CPU thread" if record["is_trained"] else "random weights: chance only")
    axes.set_ylim(0, 1.3 * max(axes.get_ylim()[1], 1.0))
    axes.legend(loc="upper right")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="checkpoint (default: the default model)")
    parser.add_argument("--concurrency", default="1,8,32", help="requests at the same time (default: 1,8,32)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count (default: 5)")
    parser.add_argument("--max-tokens", type=int, default=48, help="tokens per request (default: 48)")
    parser.add_argument("--temperature", type=float, default=0.0, help="(default: 0, greedy)")
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("--plot", type=Path, help="draw the ratios here")
    arguments = parser.parse_args()
    numbers = [int(part) for part in arguments.concurrency.split(",")]
    params = {"temperature": arguments.temperature, "max_tokens": arguments.max_tokens}
    record = run(arguments.model or default_model(), numbers, arguments.rounds, params)
    if not record["is_trained"]:
        print("The weights are random or unknown: acceptance may be at chance.", file=sys.stderr)
    if arguments.json is not None:
        text = json.dumps(record, indent=1).replace(f"{ROOT}/", "")  # where the repository lies is nobody's business
        arguments.json.write_text(text + "\n", encoding="utf-8")
    if arguments.plot is not None:
        plot(record, arguments.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
