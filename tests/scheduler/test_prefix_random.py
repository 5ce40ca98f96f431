"""Random mixes of hits, partial hits, forks, evictions, preemptions, drafts, aborts and failures on tiny pools.

Whatever happens, every output is that of an empty cache, exact requests read only what a cold run would have written,
and every block, slot and place is accounted for after every call.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest

from deepinfer.config.scheduler import SchedulerConfig

from .prefix_simulation import PrefixSimulation

MAX_MODEL_LEN = 120


def random_simulation(rng: random.Random, policy: str, depth: int, drafts: int, keep: int) -> PrefixSimulation:
    max_num_seqs = rng.randint(1, 6)
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=rng.randint(max(max_num_seqs, 4), 60),
        max_model_len=MAX_MODEL_LEN,
        pipeline_depth=depth,
        num_speculative_tokens=drafts,
        decoder_keep_tokens=keep,
        max_bypasses=rng.randint(0, 5),
        max_lookahead=rng.randint(0, 4),
    )
    num_places, num_blocks = rng.choice([1, 3, 20, 20]), rng.randint(17, 30)
    return PrefixSimulation(config, num_blocks, policy=policy, num_places=num_places, seed=rng.randrange(10**6))


def add_random(sim: PrefixSimulation, rng: random.Random, texts: list[list[int]]) -> None:
    """A prompt that begins like a text that was seen, and may leave it."""
    base = rng.choice(texts)
    prompt = base[: rng.choice([len(base), rng.randint(1, len(base))])] + [
        rng.randrange(100) for _ in range(rng.choice([0, 0, 1, 5, 12]))
    ]
    sim.add(
        f"r{len(sim.sequences)}",
        prompt[:100],
        rng.randint(1, 60),
        wants_exact=rng.random() < 0.5,
        salt=rng.choice(["", "", "", "", "", "other"]),
        reads=rng.random() < 0.9,
    )


def run_history(sim: PrefixSimulation, rng: random.Random) -> None:
    texts = [[rng.randrange(100) for _ in range(rng.randint(1, 60))] for _ in range(3)]
    for _ in range(rng.randint(40, 80)):
        action = rng.random()
        if action < 0.3:
            add_random(sim, rng, texts)
        elif action < 0.36 and sim.sequences:
            name, reason = rng.choice(sorted(sim.sequences)), rng.choice(["abort", "abort", "error"])
            sim.scheduler.finish(name, reason)
        else:
            sim.turn()
            done = [each for each in sim.sequences.values() if each.finish_reason]
            if done and rng.random() < 0.3:
                texts.append(list(rng.choice(done).token_ids))
        sim.check()
    sim.run_until_idle()


@pytest.mark.parametrize("keep", [0, 14])
@pytest.mark.parametrize("drafts", [0, 5])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("policy", ["exact", "bounded"])
def test_outputs_do_not_depend_on_the_cache(policy, depth, drafts, keep):
    seen: Counter[str] = Counter()
    for seed in range(8):
        rng = random.Random(f"{seed}/{policy}/{depth}/{drafts}/{keep}")
        sim = random_simulation(rng, policy, depth, drafts, keep)
        run_history(sim, rng)
        for name, sequence in sim.sequences.items():
            sim.assert_output_is_right(name)
            if policy == "exact" or sequence.prefix.wants_exact:
                assert sim.device.cold.get(name, True), f"{seed=}: {name} read what no cold run writes"
        assert sim.prefix is not None
        seen["hits"] += sim.prefix.statistics.num_hit_tokens > 0
        seen["resumed"] += sim.prefix.statistics.num_cached_tokens > 0
        seen["evictions"] += sim.prefix.index.num_evictions > 0
        seen["preemptions"] += sim.scheduler.num_preemptions > 0
    assert min(seen[name] for name in ("hits", "resumed", "evictions", "preemptions")) >= 2, f"too tame: {seen}"


@pytest.mark.parametrize("depth", [1, 2])
def test_the_same_requests_run_fewer_rows_with_the_cache(depth):
    rows = {}
    for policy in ("off", "exact", "bounded"):
        rng = random.Random(5)
        config = SchedulerConfig(
            max_num_seqs=4, max_num_batched_tokens=40, max_model_len=MAX_MODEL_LEN, pipeline_depth=depth
        )
        sim = PrefixSimulation(config, 200, policy=policy, num_places=40)
        texts = [[rng.randrange(100) for _ in range(60)] for _ in range(3)]
        for index in range(30):
            prompt = [*rng.choice(texts)[: rng.randint(30, 60)], index]
            sim.add(f"r{index}", prompt, 5)
            sim.turn()
        sim.run_until_idle()
        for name in sim.sequences:
            sim.assert_output_is_right(name)
        rows[policy] = sim.device.num_prefill_rows
    assert rows["exact"] < 0.6 * rows["off"]
    assert rows["bounded"] < 0.6 * rows["off"]
