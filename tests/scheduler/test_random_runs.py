"""Random histories on tiny pools: nothing leaks, nothing hangs, nobody starves, every token is the right one.

The pretend device in ``simulation.py`` proves row by row that each sequence is computed in order and exactly once per
(re)computation, and that no block or slot changes hands while a plan that names it is in flight.
"""

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from deepinfer.config.scheduler import SchedulerConfig
from deepinfer.scheduler.admission import PromptTooLongError

from .simulation import Simulation


def random_simulation(rng: random.Random, depth: int, chunked: bool = True) -> Simulation:
    max_num_seqs = rng.randint(1, 8)
    max_model_len = rng.choice([20, 40, 60])
    smallest = max(max_num_seqs, 1 if chunked else max_model_len)
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=rng.randint(smallest, smallest + 40),
        max_model_len=max_model_len,
        chunked_prefill=chunked,
        pipeline_depth=depth,
        max_lookahead=rng.randint(0, 4),
        max_bypasses=rng.randint(0, 5),
    )
    block_tokens = rng.choice([1, 2, 4, 8])
    return Simulation(config, rng.randint(3, 60 // block_tokens + 4), block_tokens, num_slots=rng.choice([0, 2, 4]))


def add_random(sim: Simulation, rng: random.Random, name: str) -> None:
    length = rng.randint(1, sim.config.max_model_len + 2)
    room = sim.pool.num_usable * sim.pool.block_tokens
    limits = {"max_tokens": rng.randint(1, 25), "priority": rng.choice([0, 0, 0, 1])}
    if length > sim.config.max_model_len or min(length + 1, sim.config.max_model_len) > room:
        with pytest.raises(PromptTooLongError):
            sim.add(name, length, rng.randint(1, 30), **limits)
    else:
        sim.add(name, length, rng.randint(1, 30), **limits)


def assert_ended_as_asked(sim: Simulation, aborted: set[str]) -> None:
    for name, sequence in sim.sequences.items():
        sim.assert_output_is_right(name)
        if sequence.finish_reason == "abort":
            assert name in aborted
        elif sequence.error is not None:
            assert sequence.num_tokens == sim.pool.num_usable * sim.pool.block_tokens + 1, "it filled the whole pool"
        elif sequence.finish_reason == "stop":
            assert sequence.num_output == sim.stop_after[name]
        else:
            assert sequence.finish_reason == "length"
            assert sequence.num_output == sequence.max_tokens or sequence.num_tokens == sim.config.max_model_len + 1
        if sequence.finish_reason != "abort" and sequence.num_preemptions == 0:
            rows = sequence.num_tokens - 1
            assert rows <= sim.device.rows_run[name] <= rows + 1, "each row once, and at most one behind the end"


@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("depth", [1, 2])
def test_random_histories_end_with_everything_returned_and_right(depth, chunked):
    num_preemptions = num_errors = num_aborts = 0
    for seed in range(100):
        rng = random.Random(f"{seed}/{depth}/{chunked}")
        sim = random_simulation(rng, depth, chunked)
        aborted = set()
        for turn in range(rng.randint(20, 60)):
            action = rng.random()
            if action < 0.4:
                add_random(sim, rng, f"r{turn}")
            elif action < 0.5 and sim.sequences:
                name = rng.choice(sorted(sim.sequences))
                if sim.abort(name):
                    aborted.add(name)
            else:
                sim.turn()
        sim.run_until_idle()
        sim.assert_everything_returned()
        assert_ended_as_asked(sim, aborted)
        num_preemptions += sim.scheduler.num_preemptions
        num_errors += sum(sequence.error is not None for sequence in sim.sequences.values())
        num_aborts += len(aborted)
    assert min(num_preemptions, num_errors, num_aborts) > 10, "the histories have to be rough enough to mean something"


def test_planning_ahead_gives_the_same_output_as_the_synchronous_loop():
    for seed in range(60):
        outputs = []
        for depth in (1, 2):
            rng = random.Random(seed)
            sim = random_simulation(rng, depth)
            for index in range(12):
                add_random(sim, rng, f"r{index}")
                sim.turn()
            sim.run_until_idle()
            outputs.append({name: (s.output_ids, s.finish_reason) for name, s in sim.sequences.items()})
        assert outputs[0] == outputs[1]


@pytest.mark.parametrize("depth", [1, 2])
def test_first_in_order_is_never_without_a_row_for_long(depth):
    worst = 0
    for seed in range(60):
        rng = random.Random(seed)
        sim = random_simulation(rng, depth)
        idle: dict[str, int] = {}
        for turn in range(150):
            if turn < 60:
                add_random(sim, rng, f"r{turn}")
            if not sim.scheduler.has_work():
                break
            live = [sequence for sequence in sim.scheduler._live.values() if not sequence.is_at_limit]
            first = min(live, key=lambda sequence: sequence.order, default=None)
            running = first is not None and first.num_scheduled > 0
            ran = {chunk.request_id for chunk in sim.turn().chunks}
            if running:
                name = first.request_id
                idle[name] = 0 if name in ran or first.is_at_limit else idle.get(name, 0) + 1
                worst = max(worst, idle[name])
    assert worst <= depth, "it waits for blocks in flight to come back, and for nothing else"


@pytest.mark.parametrize("depth", [1, 2])
def test_with_enough_blocks_nobody_who_runs_misses_a_step(depth):
    for seed in range(20):
        rng = random.Random(seed)
        config = SchedulerConfig(
            max_num_seqs=6, max_num_batched_tokens=rng.randint(6, 40), max_model_len=60, pipeline_depth=depth
        )
        sim = Simulation(config, num_blocks=200, block_tokens=4)
        for index in range(30):
            sim.add(f"r{index}", rng.randint(1, 50), rng.randint(1, 20))
            running = [s for s in sim.scheduler._running if s.is_prefilling or not s.is_at_limit]
            plan = sim.schedule()
            ran = {chunk.request_id for chunk in plan.chunks}
            missed = [s.request_id for s in running if s.request_id not in ran and s.finish_reason is None]
            assert not missed
            if len(sim.flying) == depth:
                sim.commit()
        sim.run_until_idle()
        assert sim.scheduler.num_preemptions == 0


def test_arrivals_without_end_do_not_starve_a_waiting_prompt():
    for seed in range(20):
        rng = random.Random(seed)
        config = SchedulerConfig(max_num_seqs=5, max_num_batched_tokens=16, max_model_len=100, max_bypasses=4)
        sim = Simulation(config, num_blocks=21, block_tokens=4)
        for index in range(4):
            sim.add(f"first{index}", rng.randint(1, 12), rng.randint(1, 20))
        sim.turn()
        big = sim.add("big", 72, stop_after=5)
        for index in range(300):
            sim.add(f"more{index}", rng.randint(1, 12), rng.randint(1, 20))
            sim.turn()
            if big.finish_reason:
                break
        assert big.finish_reason == "stop"


class SchedulerMachine(RuleBasedStateMachine):
    """Add, abort, plan and commit in any order that the engine is allowed; ``Simulation`` checks after each."""

    @initialize(
        depth=st.integers(1, 2),
        chunked=st.booleans(),
        num_seqs=st.integers(1, 4),
        num_blocks=st.integers(3, 14),
        block_tokens=st.sampled_from([1, 3, 4]),
        max_bypasses=st.integers(0, 2),
    )
    def start(self, depth, chunked, num_seqs, num_blocks, block_tokens, max_bypasses):
        config = SchedulerConfig(
            max_num_seqs=num_seqs,
            max_num_batched_tokens=24,
            max_model_len=24,
            chunked_prefill=chunked,
            pipeline_depth=depth,
            max_lookahead=2,
            max_bypasses=max_bypasses,
        )
        self.sim = Simulation(config, num_blocks, block_tokens)
        self.aborted: set[str] = set()
        self.num_added = 0

    @rule(length=st.integers(1, 25), stop_after=st.integers(1, 12), max_tokens=st.integers(1, 12))
    def add(self, length, stop_after, max_tokens):
        name = f"r{self.num_added}"
        self.num_added += 1
        room = self.sim.pool.num_usable * self.sim.pool.block_tokens
        if length <= 24 and min(length + 1, 24) <= room:
            self.sim.add(name, length, stop_after, max_tokens=max_tokens)

    @rule(pick=st.integers(0, 1000))
    def abort(self, pick):
        names = sorted(self.sim.sequences)
        if names and self.sim.abort(names[pick % len(names)]):
            self.aborted.add(names[pick % len(names)])

    @precondition(lambda self: len(self.sim.flying) < self.sim.config.pipeline_depth)
    @rule()
    def schedule(self):
        self.sim.schedule()

    @precondition(lambda self: self.sim.flying)
    @rule()
    def commit(self):
        self.sim.commit()

    def teardown(self):
        if hasattr(self, "sim"):
            self.sim.run_until_idle()
            self.sim.assert_everything_returned()
            assert_ended_as_asked(self.sim, self.aborted)


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=60,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
