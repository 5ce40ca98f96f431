"""Measurements on one engine: prefill by prompt length, decoding by batch size. Seeded prompts, greedy, no EOS."""

from __future__ import annotations

import random
import resource
import sys
import time
from dataclasses import dataclass

from deepinfer.engine.engine import Engine
from deepinfer.errors import CapacityError, ConfigError
from deepinfer.observe.op_timer import OpTimer
from deepinfer.sampling.params import SamplingParams

SCAN_OPS = ("index_full",)
"""Operators whose work per token grows with the context: they score every earlier entry."""

_DECODE_PROMPT_TOKENS = 24


@dataclass(frozen=True, slots=True)
class PrefillRecord:
    """One prompt, alone in the engine."""

    prompt_tokens: int
    num_steps: int
    seconds: float
    op_seconds: dict[str, float]
    peak_rss_bytes: int
    """Of the process so far, so it includes everything measured before."""

    @property
    def tokens_per_s(self) -> float:
        return self.prompt_tokens / self.seconds

    @property
    def us_per_token(self) -> float:
        return 1e6 * self.seconds / self.prompt_tokens

    @property
    def scan_us_per_token(self) -> float:
        """Part of :attr:`us_per_token` that scores the context."""
        return 1e6 * sum(self.op_seconds.get(name, 0.0) for name in SCAN_OPS) / self.prompt_tokens


@dataclass(frozen=True, slots=True)
class DecodeRecord:
    """Steps in which every one of ``batch`` sequences gets a token or more."""

    batch: int
    num_steps: int
    num_tokens: int
    """More than one per sequence and step with speculation."""
    seconds: float
    phase_seconds: dict[str, float]
    op_seconds: dict[str, float]
    """From as many further steps, with operator timers on."""

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def step_ms(self) -> float:
        return 1e3 * self.seconds / self.num_steps

    @property
    def overhead_share(self) -> float:
        """Share of the wall time that is neither forward nor sampler nor draft nor waiting for them, in [0, 1]."""
        useful = sum(self.phase_seconds.get(name, 0.0) for name in ("forward", "sample", "draft", "wait"))
        return 1 - useful / self.seconds


def measure_prefill(engine: Engine, prompt_tokens: int, seed: int) -> PrefillRecord:
    """Compute one prompt of ``prompt_tokens`` tokens and one output token."""
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
    ids = _random_ids(engine, prompt_tokens, random.Random(f"{seed} prefill {prompt_tokens}"))
    steps = engine.statistics.num_steps
    with OpTimer(engine.runner.model.ops) as timer:
        begin = time.perf_counter()
        request_id = engine.add_request(ids, params)
        while not engine.is_finished(request_id):
            engine.run_step()
        seconds = time.perf_counter() - begin
    engine.drain()
    (output,) = engine.take_finished((request_id,))
    if output.error is not None:
        raise CapacityError(f"a prompt of {prompt_tokens} tokens failed", why=output.error, fix="lower --lengths")
    num_steps = engine.statistics.num_steps - steps
    return PrefillRecord(prompt_tokens, num_steps, seconds, dict(timer.seconds), peak_rss_bytes())


@dataclass(frozen=True, slots=True)
class HitRecord:
    """One prompt, computed and then found in the prefix cache."""

    prompt_tokens: int
    cached_tokens: int
    cold_seconds: float
    hit_seconds: float

    def as_row(self) -> dict[str, float]:
        """For the record: ratios rather than times, which are noise on a shared machine."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "cached_share": self.cached_tokens / self.prompt_tokens,
            "hit_over_cold": self.hit_seconds / self.cold_seconds,
        }


def measure_hit(engine: Engine, prompt_tokens: int, seed: int) -> HitRecord | None:
    """The same prompt twice; None without a prefix cache."""
    if engine.scheduler.prefix is None:
        return None
    cold = measure_prefill(engine, prompt_tokens, seed)
    before = engine.scheduler.prefix.statistics.num_cached_tokens
    hit = measure_prefill(engine, prompt_tokens, seed)
    cached = engine.scheduler.prefix.statistics.num_cached_tokens - before
    return HitRecord(prompt_tokens, cached, cold.seconds, hit.seconds)


def measure_decode(engine: Engine, batch: int, num_steps: int, seed: int) -> DecodeRecord:
    """Decode ``num_steps`` steps with ``batch`` running sequences; prompts are computed before the clock starts."""
    warm_up = 3
    most_per_step = 1 + engine.config.speculation.num_tokens
    # The first of many prompts may be done some steps before the last.
    tokens = (2 * num_steps + warm_up + batch + 3) * most_per_step
    limit = engine.config.scheduler.max_model_len
    if _DECODE_PROMPT_TOKENS + tokens > limit:
        raise ConfigError(
            f"--steps is {num_steps}",
            why=f"it needs sequences of {_DECODE_PROMPT_TOKENS + tokens} tokens, and max_model_len is {limit}",
            fix="lower --steps or raise --max-model-len",
        )
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    rng = random.Random(f"{seed} decode {batch}")
    names = [engine.add_request(_random_ids(engine, _DECODE_PROMPT_TOKENS, rng), params) for _ in range(batch)]
    num_decoded = 0
    while num_decoded < batch:  # until a step decodes them all
        before = engine.statistics.num_decode_tokens
        engine.run_step()
        num_decoded = engine.statistics.num_decode_tokens - before
    _run_steps(engine, names, warm_up)
    engine.timer.reset()
    num_tokens = _num_output_tokens(engine, names)
    seconds = _run_steps(engine, names, num_steps)
    num_tokens = _num_output_tokens(engine, names) - num_tokens
    phases = dict(engine.timer.seconds)
    with OpTimer(engine.runner.model.ops) as timer:
        _run_steps(engine, names, num_steps)
    for name in names:
        engine.abort(name)
    engine.take_changes(names)
    engine.drain()
    engine.check()
    return DecodeRecord(batch, num_steps, num_tokens, seconds, phases, dict(timer.seconds))


def _num_output_tokens(engine: Engine, names: list[str]) -> int:
    outputs = [engine.get(name) for name in names]
    return sum(len(output.outputs[0].token_ids) for output in outputs if output is not None)


def _run_steps(engine: Engine, names: list[str], count: int) -> float:
    """Run steps as ``LLM.generate`` does, collecting what ended. Returns seconds."""
    begin = time.perf_counter()
    for _ in range(count):
        engine.run_step()
        ended = engine.take_finished(names)
        assert not ended, f"{ended[0].request_id} ended early: {ended[0].error}"
    return time.perf_counter() - begin


def _random_ids(engine: Engine, count: int, rng: random.Random) -> list[int]:
    config = engine.model_config
    special = {config.bos_token_id, config.eos_token_id, config.pad_token_id, config.image_token_id}
    ordinary = [token for token in range(config.text.vocab_size) if token not in special]
    return rng.choices(ordinary, k=count)


def peak_rss_bytes() -> int:
    """Most memory that this process ever had resident."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
