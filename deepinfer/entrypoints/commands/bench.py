"""``deepinfer bench``: offline measurements of one engine, as a table, JSON and a plot."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from typing import Any

from deepinfer.checkpoint.tiny import tiny_config
from deepinfer.config.flags import path_argument
from deepinfer.engine.engine import Engine
from deepinfer.entrypoints.benchmark.measure import measure_decode, measure_hit, measure_prefill, peak_rss_bytes
from deepinfer.entrypoints.benchmark.plot import plot_record, require_matplotlib
from deepinfer.entrypoints.benchmark.record import (
    decode_rows,
    environment_record,
    load_average,
    prefill_rows,
    short_path,
)
from deepinfer.entrypoints.benchmark.tables import render
from deepinfer.entrypoints.default_model import cached_random_model
from deepinfer.entrypoints.engine_args import add_model_arguments, load_llm, names_model
from deepinfer.errors import ConfigError
from deepinfer.kvcache.sizing import cache_sizes

_LONG_POSITIONS = 32768
_WARM_UP_TOKENS = 256


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's flags."""
    parser.epilog = "Without --model: a random tiny model with room for long prompts. --num-threads 1 is steadiest."
    parser.add_argument(
        "--lengths", type=_numbers, default=[1024, 2048, 4096, 8192, 16384], metavar="N,N,...", help="prompt lengths"
    )
    parser.add_argument("--batches", type=_numbers, default=[1, 8, 32], metavar="N,N,...", help="running sequences")
    parser.add_argument("--steps", type=int, default=40, help="decoding steps per batch size (default: 40)")
    parser.add_argument("--repeats", type=int, default=2, help="prompts per length, the fastest counts (default: 2)")
    parser.add_argument("--bench-seed", type=int, default=0, help="of the prompts (default: 0)")
    parser.add_argument("--json", type=path_argument, metavar="FILE", help="write the record")
    parser.add_argument(
        "--plot", type=path_argument, metavar="FILE", help="draw it (png, svg or pdf; needs matplotlib)"
    )
    add_model_arguments(parser)


def run(namespace: argparse.Namespace) -> int:
    """Measure and print."""
    if namespace.plot is not None:
        require_matplotlib()
    for name in ("steps", "repeats"):
        if getattr(namespace, name) < 1:
            raise ConfigError(f"--{name} is {getattr(namespace, name)}", why="nothing is measured", fix="give >= 1")
    if namespace.json is not None and not namespace.json.absolute().parent.is_dir():
        raise ConfigError(f"--json is {namespace.json}", why="its directory does not exist", fix="make it first")
    with load_llm(namespace, **_defaults(namespace)) as llm:
        record = measure(llm.engine, namespace)
    print(render(record))
    if namespace.json is not None:
        namespace.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if namespace.plot is not None:
        plot_record(record, namespace.plot)
    return 0


def measure(engine: Engine, namespace: argparse.Namespace) -> dict[str, Any]:
    """All measurements on ``engine``, with where they come from."""
    config, seed = engine.config, namespace.bench_seed
    limit = config.scheduler.max_model_len
    lengths = [length for length in namespace.lengths if length < limit]
    for length in sorted(set(namespace.lengths) - set(lengths)):
        print(f"skipping prompts of {length} tokens: max_model_len is {limit}", file=sys.stderr)
    load, after_load = load_average(), peak_rss_bytes()
    measure_prefill(engine, min(_WARM_UP_TOKENS, limit - 1), seed)
    prefill, decode = [], []
    for length in lengths:
        print(f"prefill of {length} tokens ...", file=sys.stderr)
        runs = [measure_prefill(engine, length, seed + repeat) for repeat in range(namespace.repeats)]
        prefill.append(min(runs, key=lambda run: run.seconds))  # what others take from a shared machine only adds
    hits = [measure_hit(engine, length, seed + namespace.repeats) for length in lengths]
    for batch in namespace.batches:
        print(f"decode of {batch} sequences ...", file=sys.stderr)
        decode.append(measure_decode(engine, batch, namespace.steps, seed))
    sizes = cache_sizes(engine.model_config, config.numerics)
    assert config.cache.num_blocks is not None
    return {
        "model": short_path(config.model.path),
        "num_threads": config.device.num_threads,
        "command": shlex.join(["deepinfer", *sys.argv[1:]]),
        "seed": seed,
        "load_average": {"before": load, "after": load_average()},
        "prefill": prefill_rows(prefill, engine.model_config) if prefill else [],
        "prefix_cache": [hit.as_row() for hit in hits if hit is not None],
        "decode": decode_rows(decode),
        "memory": {
            "cache_bytes": config.cache.num_blocks * sizes.block_bytes
            + engine.runner.caches.geometry.num_slots * sizes.slot_bytes,
            "bytes_per_token": sizes.token_bytes,
            "peak_rss_after_load_bytes": after_load,
            "peak_rss_bytes": peak_rss_bytes(),
        },
        **environment_record(config),
    }


def _defaults(namespace: argparse.Namespace) -> dict[str, Any]:
    defaults: dict[str, Any] = {
        "max_num_seqs": max(namespace.batches, default=1),
        "max_num_batched_tokens": 1024,  # the same chunk at every length
        "num_speculative_tokens": 0,  # plain decoding, unless asked for: drafts of random weights are never accepted
        "disable_log_stats": True,
    }
    if not names_model(namespace):
        model = cached_random_model("tiny-long", tiny_config(max_position_embeddings=_LONG_POSITIONS))
        longest = max(namespace.lengths, default=0)
        return {**defaults, "model": model, "max_model_len": min(_LONG_POSITIONS, max(longest, 1024) + 128)}
    return defaults


def _numbers(text: str) -> list[int]:
    """``"1,8,32"``; an empty text is an empty list."""
    numbers = [int(part) for part in text.split(",") if part]
    if any(number < 1 for number in numbers):
        raise ValueError("numbers >= 1")
    return sorted(set(numbers))


_numbers.__name__ = "list of numbers >= 1"
