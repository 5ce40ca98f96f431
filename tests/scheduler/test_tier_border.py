"""Blocks and states leave and enter through the border of a tier, slowly and out of order, and stay what they are."""

from __future__ import annotations

import random

import pytest

from deepinfer.config.scheduler import SchedulerConfig
from deepinfer.kvcache.tier import RecordKind, TierRecord
from deepinfer.kvcache.tier_traffic import TierTraffic
from tests.kvcache.tier_double import SlowTier

from .prefix_simulation import PrefixSimulation


def make(policy: str, *, num_blocks: int = 24, failure_rate: float = 0, seed: int = 0, depth: int = 1):
    """A small device over a tier that keeps everything."""
    config = SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=40, max_model_len=120, pipeline_depth=depth)
    sim = PrefixSimulation(config, num_blocks, policy=policy, num_places=4, seed=seed)
    device, block_tokens = sim.device, sim.pool.block_tokens

    def read(record: TierRecord) -> object:
        if record.kind is RecordKind.STATE:
            return device.places[record.place].copy()
        return [device.cells[record.place, at] for at in range(block_tokens)]

    def write(record: TierRecord, value) -> None:
        if record.kind is RecordKind.STATE:
            device.places[record.place] = value.copy()
        else:
            device.cells.update({(record.place, at): cell for at, cell in enumerate(value)})

    tier = SlowTier(read, write, random.Random(seed), failure_rate=failure_rate)
    assert sim.prefix is not None
    sim.prefix.tier = TierTraffic(tier, sim.prefix.index, sim.prefix.checkpoints)
    sim.is_waiting_for_copies = lambda: tier.is_busy
    return sim, tier


def drain(sim: PrefixSimulation, tier: SlowTier) -> None:
    """Run until no copy is on its way either."""
    for _ in range(500):
        if not sim.scheduler.has_work() and not tier.is_busy:
            break
        sim.turn()
    assert sim.pool.num_free == sim.pool.num_usable
    assert sim.prefix.tier.pinned().total() == 0


def text(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(length)]


@pytest.mark.parametrize("policy", ["exact", "bounded"])
def test_what_the_device_lost_comes_back_from_the_tier(policy):
    sim, tier = make(policy)
    prompt = text(50, seed=1)
    sim.add("first", prompt, 2)
    drain(sim, tier)
    for index in range(6):  # others push it out
        sim.add(f"other {index}", text(90, seed=10 + index), 2)
        drain(sim, tier)
    before = tier.num_in
    again = sim.add("again", prompt, 2)
    drain(sim, tier)
    assert again.prefix.num_cached == 48
    assert tier.num_in > before
    sim.assert_output_is_right("again")
    assert sim.device.cold["again"] == (policy == "exact")


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("failure_rate", [0, 0.3])
@pytest.mark.parametrize("policy", ["exact", "bounded"])
def test_random_traffic_never_mixes_records_up(policy, failure_rate, depth):
    """Known failure P3: places are reused at once and copies are slow; the double compares what it copied."""
    num_in = num_out = 0
    for seed in range(6):
        rng = random.Random(f"{seed}/{policy}/{failure_rate}/{depth}")
        sim, tier = make(policy, failure_rate=failure_rate, seed=seed, depth=depth, num_blocks=rng.randint(18, 40))
        texts = [text(70, seed=index) for index in range(4)]
        for index in range(30):
            prompt = rng.choice(texts)[: rng.randint(10, 70)] + text(rng.randint(0, 4), seed=1000 + index)
            sim.add(f"r{index}", prompt, rng.randint(1, 10), wants_exact=rng.random() < 0.5)
            for _ in range(rng.randint(0, 6)):
                sim.turn()
            if rng.random() < 0.1:
                sim.scheduler.abort(f"r{rng.randint(0, index)}")
        drain(sim, tier)
        for name, sequence in sim.sequences.items():
            sim.assert_output_is_right(name)
            if policy == "exact" or sequence.prefix.wants_exact:
                assert sim.device.cold.get(name, True), name
        num_in += tier.num_in
        num_out += tier.num_out
    assert num_in > 20
    assert num_out > 100
