"""How much of a long prompt is computed: decoder bounded replay and prefix hits, as ratios of times within one run.

    python bench/long_prompts.py --tokens 16384 --json bench/results/long_prompts_cpu.json

The model is the tiny configuration with random weights and room for long prompts. Times are CPU seconds of the one
thread that computes, which other load on the machine disturbs least; the smallest of some runs, in turn, count.
Results are checked before a time is believed: the exact hit has to give the tokens of the cold run, and ``compact``
those of ``mask`` on a shorter prompt.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from deepinfer.checkpoint.random_checkpoint import make_random_checkpoint
from deepinfer.checkpoint.tiny import tiny_config
from deepinfer.config.env import read_environment
from deepinfer.config.resolve import resolve
from deepinfer.engine.engine import Engine
from deepinfer.engine.factory import build_engine
from deepinfer.sampling.params import SamplingParams

KEEP = 24
SEED = 1


def make_engine(path: Path, tokens: int, **arguments: Any) -> Engine:
    """One thread, synchronous, no drafts: nothing but the prompt is timed."""
    fixed = {
        "model": path,
        "num_threads": 1,
        "max_num_seqs": 1,
        "max_model_len": tokens + 16,
        "num_speculative_tokens": 0,
        "async_scheduling": False,
        "disable_log_stats": True,
    }
    config, _ = resolve({**fixed, **arguments}, read_environment({}))
    return build_engine(config, progress=False)[0]


def first_token(engine: Engine, prompt: list[int], salt: str = "") -> tuple[float, int, int]:
    """CPU seconds to the first token, the token, and the cached tokens of the prompt."""
    engine.add_request(prompt, SamplingParams(max_tokens=1, temperature=0), cache_salt=salt)
    begin = time.process_time()
    while engine.has_work():
        for output in engine.step():
            result = output
    elapsed_s = time.process_time() - begin
    assert result.error is None, result.error
    return elapsed_s, result.outputs[0].token_ids[0], result.num_cached_tokens


def measure(path: Path, tokens: int, runs: int) -> dict[str, Any]:
    """CPU seconds of every way to compute the prompt, and their ratios."""
    generator = torch.Generator().manual_seed(SEED)
    prompt = torch.randint(512, (tokens,), generator=generator).tolist()
    truncation = {"prefill_truncation": "compact", "prefill_keep_tokens": KEEP}
    engines = {
        "off": make_engine(path, tokens, prefix_cache="off"),
        "compact": make_engine(path, tokens, prefix_cache="off", **truncation),
        "exact": make_engine(path, tokens, prefix_cache="exact"),
        "bounded": make_engine(path, tokens, prefix_cache="bounded"),
    }
    check_compact(path, prompt[:700], engines["compact"])
    times: dict[str, list[float]] = {}
    found: dict[str, int] = {}
    cached: dict[str, int] = {}
    for run in range(runs):
        for name, engine in engines.items():
            salt = str(run)  # a new cache for every run
            for visit in ("cold", "hit") if name in ("exact", "bounded") else ("cold",):
                elapsed_s, token, num_cached = first_token(engine, prompt, salt)
                times.setdefault(f"{name} {visit}", []).append(elapsed_s)
                found[f"{name} {visit}"], cached[f"{name} {visit}"] = token, num_cached
    assert found["exact hit"] == found["exact cold"] == found["off cold"], found
    best = {name: min(values) for name, values in times.items()}
    return {
        "cpu_seconds": {name: [round(value, 4) for value in values] for name, values in times.items()},
        "cached_tokens": cached,
        "ratios": {
            "compact over off": round(best["compact cold"] / best["off cold"], 4),
            "exact hit over cold": round(best["exact hit"] / best["exact cold"], 4),
            "bounded hit over cold": round(best["bounded hit"] / best["bounded cold"], 4),
            "exact cold over off (cost of the cache)": round(best["exact cold"] / best["off cold"], 4),
        },
    }


def check_compact(path: Path, prompt: list[int], compact: Engine) -> None:
    """A wrong answer has no speed to report."""
    mask = make_engine(path, len(prompt), prefix_cache="off", prefill_truncation="mask", prefill_keep_tokens=KEEP)
    assert first_token(mask, prompt)[1] == first_token(compact, prompt)[1], "mask and compact disagree"


def environment() -> dict[str, Any]:
    """What a reader needs to place the numbers."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    return {"commit": commit, "torch": torch.__version__, "python": platform.python_version(), "threads": 1}


def main() -> None:
    """Measure, print, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384, help="prompt length")
    parser.add_argument("--runs", type=int, default=2, help="times each way is measured; the smallest counts")
    parser.add_argument("--json", type=Path, help="where to write the record")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tiny"
        config = tiny_config(vision=False, max_position_embeddings=arguments.tokens + 1024)
        make_random_checkpoint(path, config, seed=SEED)
        record = {
            "model": "tiny configuration, random weights, faithful numerics",
            "prompt_tokens": arguments.tokens,
            "keep_tokens": KEEP,
            "seed": SEED,
            **environment(),
            **measure(path, arguments.tokens, arguments.runs),
        }
    print(json.dumps(record, indent=1))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
