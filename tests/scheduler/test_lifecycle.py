"""Finish and abort in every state, and planning ahead of results."""

import pytest

from deepinfer.config.scheduler import SchedulerConfig
from deepinfer.messages import PLACEHOLDER_TOKEN
from deepinfer.scheduler.sequence import Status

from .simulation import Simulation, sampled_token


def simulation(depth=1, num_blocks=100, **options) -> Simulation:
    values = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 200, **options}
    return Simulation(SchedulerConfig(pipeline_depth=depth, **values), num_blocks, block_tokens=4)


def test_abort_while_waiting():
    sim = simulation()
    sequence = sim.add("a", 5, stop_after=1)
    assert sim.abort("a")
    assert (sequence.status, sequence.finish_reason) == (Status.FINISHED, "abort")
    sim.assert_everything_returned()


def test_abort_between_two_prefill_chunks_returns_blocks_and_slot():
    sim = simulation()
    sequence = sim.add("a", 50, stop_after=1)
    sim.turn()
    assert sequence.num_computed == 16
    assert sim.abort("a")
    sim.assert_everything_returned()


def test_abort_while_decoding():
    sim = simulation()
    sim.add("a", 5, stop_after=100)
    for _ in range(5):
        sim.turn()
    assert sim.abort("a")
    sim.assert_everything_returned()


def test_abort_after_preemption():
    sim = simulation(num_blocks=10)
    sim.add("a", 12, stop_after=20)
    b = sim.add("b", 12, stop_after=20)
    sim.turn_until(lambda: b.num_preemptions)
    assert b.status is Status.WAITING
    assert sim.abort("b")
    sim.run_until_idle()
    sim.assert_everything_returned()


@pytest.mark.parametrize("length", [5, 50])
def test_memory_of_an_aborted_sequence_returns_at_the_commit_of_its_newest_plan(length):
    sim = simulation(depth=2)
    sequence = sim.add("a", length, stop_after=100)
    sim.schedule()
    sim.schedule()
    free = sim.pool.num_free
    assert sim.abort("a")
    assert (sim.pool.num_free, sim.slots.num_used) == (free, 1), "the device may still read them"
    sim.commit()
    assert (sim.pool.num_free, sim.slots.num_used) == (free, 1), "the second plan has rows of it too"
    sim.commit()
    sim.assert_everything_returned()
    assert sequence.output_ids == [], "tokens that arrive after the abort are ignored"


def test_abort_of_an_unknown_or_finished_request_is_false():
    sim = simulation()
    assert not sim.abort("ghost")
    sim.add("a", 5, stop_after=1)
    sim.run_until_idle()
    assert not sim.abort("a")


def test_id_of_an_aborted_request_can_be_used_again_while_its_rows_are_in_flight():
    sim = simulation(depth=2)
    first = sim.add("a", 5, stop_after=3)
    sim.schedule()
    sim.abort("a")
    second = sim.add("a", 5, stop_after=3)
    sim.run_until_idle()
    assert first.output_ids == []
    assert second.num_output == 3
    sim.assert_everything_returned()


def test_newest_token_in_flight_is_a_placeholder_in_the_next_plan():
    sim = simulation(depth=2)
    sequence = sim.add("a", 5, stop_after=4)
    first, second = sim.schedule(), sim.schedule()
    assert first.chunks[0].num_sampled == 1
    [chunk] = second.chunks
    assert (chunk.start, chunk.token_ids, chunk.is_prefill) == (5, (PLACEHOLDER_TOKEN,), False)
    assert chunk.history == sequence.prompt_ids[-3:]
    sim.commit()
    third = sim.schedule()
    assert third.chunks[0].token_ids == (PLACEHOLDER_TOKEN,)
    assert third.chunks[0].history == (*sequence.prompt_ids[-2:], sampled_token("a", 5)), "history has true ids only"
    sim.run_until_idle()
    assert sequence.num_output == 4


def test_sequence_that_skipped_a_step_has_no_placeholder_afterwards():
    # Whole prompts: the patient one takes a step's rows, and the decoding ones miss that step.
    sim = simulation(depth=2, chunked_prefill=False, max_model_len=16)
    for name in "ab":
        sim.add(name, 2, stop_after=14)
    sim.turn()
    sim.add("whole", 16, stop_after=1)
    sim.run_until_idle()
    ran = [[c.request_id for c in plan.chunks] for plan in sim.plans]
    gap = next(index for index, names in enumerate(ran) if "whole" in names)
    assert ran[gap] == ["whole"]
    after = sim.plans[gap + 1]
    assert {chunk.request_id for chunk in after.chunks} == {"a", "b"}
    assert all(chunk.token_ids != (PLACEHOLDER_TOKEN,) for chunk in after.chunks)
    for name in "ab":
        assert sim.sequences[name].num_output == 14


def test_row_planned_behind_a_stop_is_ignored():
    sim = simulation(depth=2)
    sequence = sim.add("a", 5, stop_after=1)
    sim.schedule()
    sim.schedule()
    sim.commit()
    assert sequence.finish_reason == "stop"
    assert sim.slots.num_used == 1
    sim.commit()
    assert sequence.num_output == 1
    sim.assert_everything_returned()


def test_preempted_in_flight_sequence_computes_its_token_again():
    sim = simulation(depth=2, num_blocks=10)
    sim.add("a", 12, stop_after=20)
    b = sim.add("b", 12, stop_after=20)
    sim.run_until_idle()
    assert b.num_preemptions >= 1
    assert b.num_output == 20
    sim.assert_output_is_right("b")
    sim.assert_everything_returned()


def test_pipeline_depth_is_enforced():
    sim = simulation(depth=1)
    sim.add("a", 5, stop_after=4)
    sim.schedule()
    with pytest.raises(AssertionError, match="depth=1"):
        sim.scheduler.schedule()


def test_plans_are_committed_in_order_and_once():
    sim = simulation(depth=2)
    sim.add("a", 5, stop_after=4)
    first, second = sim.scheduler.schedule(), sim.scheduler.schedule()
    with pytest.raises(AssertionError, match="step 1 committed before step 0"):
        sim.scheduler.commit(second, {"a": [1]})
    sim = simulation(depth=1)
    sim.add("a", 5, stop_after=4)
    first = sim.scheduler.schedule()
    sim.scheduler.commit(first, {"a": [1]})
    with pytest.raises(AssertionError, match="committed twice"):
        sim.scheduler.commit(first, {"a": [1]})


def test_sampled_rows_have_to_bring_a_token():
    sim = simulation()
    sim.add("a", 5, stop_after=4)
    plan = sim.scheduler.schedule()
    with pytest.raises(AssertionError, match="a: 0 tokens"):
        sim.scheduler.commit(plan, {})


def test_failed_step_is_closed_by_finishing_its_requests():
    sim = simulation(depth=2)
    a = sim.add("a", 5, stop_after=4)
    b = sim.add("b", 5, stop_after=4)
    plan = sim.scheduler.schedule()
    for name in "ab":
        assert sim.scheduler.finish(name, "error", "the step failed")
    assert sim.scheduler.commit(plan, {}) == []
    sim.scheduler.check()
    assert a.error == b.error == "the step failed"
    sim.assert_everything_returned()


def test_empty_plan_needs_no_commit():
    sim = simulation()
    plan = sim.scheduler.schedule()
    assert plan.chunks == ()
    assert sim.scheduler.commit(plan, {}) == []
    assert sim.scheduler.num_uncommitted == 0
    assert not sim.scheduler.has_work()


def test_commit_reports_the_sequences_that_got_tokens():
    sim = simulation()
    a = sim.add("a", 5, stop_after=4)
    sim.add("b", 50, stop_after=4)
    plan = sim.scheduler.schedule()
    assert len(plan.chunks) == 2
    assert sim.scheduler.commit(plan, {"a": [7], "b": [8]}) == [a], "b is in the middle of its prompt"
    assert a.output_ids == [7]
    assert sim.scheduler.usage == sim.pool.num_used / 99
