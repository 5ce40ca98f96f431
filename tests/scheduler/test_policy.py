"""The promises of docs/scheduling.md about who gets rows, one test each."""

import pytest

from deepinfer.config.scheduler import SchedulerConfig
from deepinfer.scheduler.admission import PromptTooLongError
from deepinfer.scheduler.budget import ROW_PATIENCE_STEPS, min_chunk, prefill_share
from deepinfer.scheduler.preemption import latest_behind
from deepinfer.scheduler.sequence import Sequence

from .simulation import Simulation


def simulation(num_blocks=1000, block_tokens=4, num_slots=0, **options) -> Simulation:
    values = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 10_000, **options}
    return Simulation(SchedulerConfig(**values), num_blocks, block_tokens, num_slots)


def rows_of(plan) -> dict[str, int]:
    return {chunk.request_id: chunk.num_rows for chunk in plan.chunks}


def test_prompt_is_computed_in_chunks_of_the_budget_and_sampled_once():
    sim = simulation()
    sim.add("a", 150, stop_after=3)
    plans = [sim.turn() for _ in range(4)]
    chunks = [plan.chunks[0] for plan in plans]
    assert [(chunk.start, chunk.num_rows, chunk.num_sampled) for chunk in chunks] == [
        (0, 64, 0),
        (64, 64, 0),
        (128, 22, 1),
        (150, 1, 1),
    ]
    assert [chunk.is_prefill for chunk in chunks] == [True, True, True, False]
    assert chunks[1].history == chunks[0].token_ids[-3:], "chunks know the ids before them"
    assert chunks[0].history == ()
    assert [plan.step_id for plan in plans] == [0, 1, 2, 3]


def test_blocks_are_allocated_as_rows_are_scheduled():
    sim = simulation()
    sequence = sim.add("a", 500, stop_after=3)
    sim.turn()
    assert len(sequence.block_table) == 64 // 4


def test_every_decoding_sequence_gets_its_row_in_every_step_while_prompts_are_prefilled():
    sim = simulation()
    for name in "abc":
        sim.add(name, 5, stop_after=1000)
    sim.turn()
    sim.add("long", 3000, stop_after=5)
    for _ in range(40):
        rows = rows_of(sim.turn())
        assert [rows[name] for name in "abc"] == [1, 1, 1]
        assert rows["long"] == 61, "prefill gets the rest of the budget"


def test_short_prompt_starts_in_the_step_after_it_arrives_behind_a_long_one():
    sim = simulation()
    sim.add("long", 3000, stop_after=1)
    sim.turn()
    short = sim.add("short", 20, stop_after=1)
    rows = rows_of(sim.turn())
    assert rows == {"long": 44, "short": 20}
    assert short.finish_reason == "stop"


def test_short_prompt_finds_a_share_behind_many_long_ones():
    sim = simulation(max_num_seqs=100, max_num_batched_tokens=100, num_blocks=20_000)
    for index in range(20):
        sim.add(f"long{index}", 3000, stop_after=1)
    for _ in range(5):
        sim.turn()
    short = sim.add("short", 10, stop_after=1)
    for _ in range(20):
        sim.turn()
        if short.finish_reason:
            break
    assert short.finish_reason == "stop"
    assert sim.scheduler.num_waiting + sim.scheduler.num_running == 20, "all the long ones are still at it"


def test_prompts_in_progress_get_equal_shares_and_the_first_the_surplus():
    sim = simulation()
    for name in "abc":
        sim.add(name, 1000, stop_after=1)
    assert rows_of(sim.turn()) == {"a": 22, "b": 21, "c": 21}
    assert rows_of(sim.turn()) == {"a": 22, "b": 21, "c": 21}


def test_no_prompt_starts_with_a_sliver():
    config = SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=256)
    assert min_chunk(config) == 64
    assert prefill_share(config, rows_left=256, num_prefilling=0, num_waiting=50) == 64
    assert prefill_share(config, rows_left=256, num_prefilling=4, num_waiting=50) == 51, "one more always finds a share"
    assert prefill_share(config, rows_left=2, num_prefilling=3, num_waiting=0) == 1


def test_prompts_progress_when_decode_takes_almost_the_whole_budget():
    sim = simulation(max_num_seqs=8, max_num_batched_tokens=8)
    for index in range(6):
        sim.add(f"d{index}", 1, stop_after=10_000)
    sim.turn()
    for name in "pq":
        sim.add(name, 50, stop_after=10_000)
    for _ in range(120):
        rows = rows_of(sim.turn())
        assert len([name for name in rows if name.startswith("d")]) == 6
    assert sim.sequences["p"].num_output > 0
    assert sim.sequences["q"].num_output > 0


def test_sequence_limit_is_never_exceeded():
    sim = simulation(max_num_seqs=3)
    for index in range(10):
        sim.add(f"r{index}", 4, stop_after=5)
    for _ in range(100):
        assert len(sim.turn().chunks) <= 3
        assert sim.scheduler.num_running <= 3
    sim.assert_everything_returned()


def test_lower_priority_number_starts_first():
    sim = simulation(max_num_seqs=1)
    sim.add("running", 4, stop_after=3)
    sim.turn()
    sim.add("normal", 4, stop_after=1)
    sim.add("urgent", 4, stop_after=1, priority=-1)
    sim.run_until_idle()
    started = [chunk.request_id for plan in sim.plans for chunk in plan.chunks if chunk.start == 0]
    assert started == ["running", "urgent", "normal"]


# ---- memory is short ---------------------------------------------------------------------------------------------


def test_a_head_without_room_does_not_block_smaller_ones_behind_it():
    sim = simulation(num_blocks=11)
    sim.add("holder", 20, stop_after=20)
    sim.turn()
    sim.add("big", 30, stop_after=1)
    small = sim.add("small", 4, stop_after=1)
    assert "small" in rows_of(sim.turn())
    assert small.finish_reason == "stop"
    assert sim.sequences["big"].num_bypassed == 1
    sim.run_until_idle()
    assert sim.sequences["big"].finish_reason == "stop"
    assert sim.sequences["big"].num_bypassed == 0, "its patience is fresh if it ever has to wait again"


def test_a_bypassed_head_is_not_starved():
    sim = simulation(num_blocks=11, max_bypasses=5)
    sim.add("holder", 20, stop_after=15)
    sim.turn()
    big = sim.add("big", 36, stop_after=1)
    for index in range(200):
        sim.add(f"small{index}", 4, stop_after=4)
        sim.turn()
        assert big.num_bypassed <= 5
        if big.finish_reason:
            break
    assert big.finish_reason == "stop"
    started = [chunk.request_id for plan in sim.plans for chunk in plan.chunks if chunk.start == 0]
    assert len([name for name in started[: started.index("big")] if name.startswith("small")]) == 5


def test_lookahead_is_bounded():
    sim = simulation(num_blocks=11, max_lookahead=2)
    sim.add("holder", 28, stop_after=20)
    sim.turn()
    for index in range(3):
        sim.add(f"big{index}", 30, stop_after=1)
    sim.add("small", 4, stop_after=1)
    assert rows_of(sim.turn()) == {"holder": 1}


def test_a_prompt_starts_only_if_the_rest_of_those_in_progress_still_fits():
    sim = simulation(num_blocks=21, max_num_batched_tokens=16)
    sim.add("a", 60, stop_after=1)
    sim.turn()
    sim.add("b", 40, stop_after=1)
    assert sim.pool.num_free > 10, "there is room for all of b now, but not for b and the rest of a"
    assert rows_of(sim.turn()) == {"a": 16}
    sim.run_until_idle()
    assert sim.scheduler.num_preemptions == 0
    assert sim.sequences["b"].finish_reason == "stop"


def test_a_newcomer_leaves_a_block_for_the_growth_of_those_that_run():
    sim = simulation(num_blocks=6)
    sim.add("a", 6, stop_after=5)
    sim.turn()
    sim.add("b", 12, stop_after=1)
    assert sim.pool.num_free == 3, "just what b needs"
    assert rows_of(sim.turn()) == {"a": 1}
    sim.run_until_idle()
    assert sim.scheduler.num_preemptions == 0


def test_nothing_starts_in_a_step_that_had_to_preempt():
    sim = simulation(num_blocks=14, max_num_seqs=3)
    sim.add("a", 16, stop_after=30)
    sim.add("b", 24, stop_after=30)
    sim.turn()
    sim.turn_until(lambda: sim.pool.num_free == 0)
    sim.add("small", 1, stop_after=1)
    plan = sim.turn_until(lambda: sim.scheduler.num_preemptions)
    assert plan.preempted == ("b",)
    assert sim.pool.num_free > 2
    assert rows_of(plan) == {"a": 1}


def test_nobody_is_preempted_for_blocks_that_a_last_token_in_flight_will_free():
    sim = simulation(num_blocks=8, pipeline_depth=2)
    a = sim.add("a", 8, stop_after=8)
    c = sim.add("c", 4, stop_after=8)
    last = sim.add("b", 4, stop_after=100, max_tokens=5)
    for _ in range(5):
        assert len(sim.turn().chunks) == 3
    # Rows 12 of a and 8 of c need a block each, all seven are taken, and b's last token is still being sampled.
    assert sim.pool.num_free == 0
    assert rows_of(sim.turn()) == {}
    assert rows_of(sim.turn()) == {"a": 1, "c": 1}
    sim.run_until_idle()
    assert sim.scheduler.num_preemptions == 0
    assert (a.num_output, c.num_output, last.num_output) == (8, 8, 5)


def test_latest_sequence_is_preempted_and_the_oldest_never():
    sim = simulation(num_blocks=14)
    for name in "abc":
        sim.add(name, 14, stop_after=20)
    sim.run_until_idle()
    preempted = [name for plan in sim.plans for name in plan.preempted]
    assert preempted[0] == "c"
    assert "a" not in preempted
    assert sim.scheduler.num_preemptions == len(preempted) > 0
    for name in "abc":
        assert sim.sequences[name].finish_reason == "stop"
        assert sim.sequences[name].num_output == 20
        sim.assert_output_is_right(name)
    finished = [name for name in "abc" if sim.sequences[name].num_preemptions == 0]
    assert "a" in finished


def test_nobody_is_preempted_when_no_new_block_is_needed():
    sim = simulation(num_blocks=5)
    sim.add("a", 4, stop_after=5)  # rows for exactly two blocks
    sim.add("b", 1, stop_after=4)  # rows for exactly one
    sim.add("c", 1, stop_after=4)
    fullest = 0
    for _ in range(5):
        sim.schedule()
        fullest = max(fullest, sim.pool.num_used)
        sim.commit()
    assert not sim.scheduler.has_work()
    assert fullest == sim.pool.num_usable
    assert sim.scheduler.num_preemptions == 0


def test_preempted_sequence_recomputes_prompt_and_output_and_resumes_with_same_tokens():
    sim = simulation(num_blocks=10)
    sim.add("a", 12, stop_after=20)
    b = sim.add("b", 12, stop_after=20)
    sim.run_until_idle()
    assert b.num_preemptions >= 1
    assert sim.device.starts == {"a": 1, "b": 1 + b.num_preemptions}
    again = [c for plan in sim.plans for c in plan.chunks if c.request_id == "b" and c.start == 0][1]
    assert again.is_prefill
    assert again.num_rows > 12, "its output so far is prefilled with the prompt"
    sim.assert_output_is_right("b")


def test_preempted_sequence_goes_back_in_arrival_order():
    sim = simulation(num_blocks=9)
    sim.add("a", 12, stop_after=12)
    sim.add("b", 12, stop_after=12)
    sim.turn()
    sim.add("late", 12, stop_after=1)
    sim.turn_until(lambda: sim.sequences["b"].num_preemptions)
    assert [sequence.request_id for sequence in sim.scheduler._waiting] == ["b", "late"]


def test_recomputed_sequence_is_never_too_long():
    sim = simulation(num_blocks=12, max_model_len=40, max_num_batched_tokens=40, chunked_prefill=False)
    sim.add("a", 8, stop_after=30)
    b = sim.add("b", 8, stop_after=30)
    sim.run_until_idle()
    assert b.num_preemptions >= 1
    assert (b.finish_reason, b.num_output) == ("stop", 30)


def test_decode_gets_blocks_before_prefill():
    sim = simulation(num_blocks=10, max_num_seqs=2, max_num_batched_tokens=3)
    sim.add("a", 3, stop_after=30)
    sim.turn()
    b = sim.add("b", 28, stop_after=1)
    stalled = 0
    for _ in range(25):
        rows = rows_of(sim.turn())
        assert rows["a"] == 1
        stalled += "b" not in rows and b.num_preemptions == 0
    assert b.num_preemptions == 1
    assert stalled > 1, "the prompt waits, with what it has, until decode needs a block"
    sim.run_until_idle()
    assert b.finish_reason == "stop"


def test_oldest_prefill_gets_blocks_from_later_decodes():
    sim = simulation(num_blocks=20, max_num_batched_tokens=8)
    old = sim.add("old", 60, stop_after=2)
    for name in "bcd":
        sim.add(name, 2, stop_after=40)
    sim.run_until_idle()
    assert old.num_preemptions == 0
    assert old.finish_reason == "stop"
    assert sim.scheduler.num_preemptions > 0


def test_sequence_that_alone_outgrows_the_pool_ends_with_length_and_says_why():
    sim = simulation(num_blocks=4)
    sequence = sim.add("a", 5, stop_after=100)
    sim.run_until_idle()
    assert (sequence.finish_reason, sequence.num_tokens) == ("length", 13)
    assert "3 blocks of 4 tokens" in sequence.error
    assert sim.scheduler.take_ended() == [sequence]
    assert sim.scheduler.take_ended() == []
    sim.assert_everything_returned()


def test_victim_is_the_latest_behind_that_does_not_end_by_itself():
    a, b, c = (Sequence(request_id=name, prompt_ids=(1,), max_tokens=1) for name in "abc")
    assert latest_behind([a, b, c], a) is c
    assert latest_behind([a, b, c], c) is None
    c.num_pending = 1
    assert latest_behind([a, b, c], a) is b
    assert latest_behind([a, b, c], b) is None


# ---- limits ------------------------------------------------------------------------------------------------------


def test_prompt_of_exactly_the_limit_gives_one_token():
    sim = simulation(max_model_len=16)
    sequence = sim.add("a", 16, stop_after=100)
    sim.run_until_idle()
    assert (sequence.finish_reason, sequence.num_output) == ("length", 1)


def test_prompt_beyond_the_limit_is_refused_with_limit_and_length():
    sim = simulation(max_model_len=16)
    with pytest.raises(PromptTooLongError, match=r"17.*16 tokens") as caught:
        sim.add("a", 17, stop_after=1)
    assert (caught.value.length, caught.value.limit) == (17, 16)
    assert not sim.scheduler.has_work()


def test_prompt_that_can_never_fit_the_pool_is_refused():
    sim = simulation(num_blocks=4)
    with pytest.raises(PromptTooLongError, match="holds 12 tokens") as caught:
        sim.add("a", 12, stop_after=1)
    assert (caught.value.length, caught.value.limit) == (12, 11)
    sim.add("b", 11, stop_after=1)
    sim.run_until_idle()
    assert sim.sequences["b"].finish_reason == "stop"


@pytest.mark.parametrize("depth", [1, 2])
def test_max_tokens_gives_exactly_that_many_tokens_and_no_row_too_many(depth):
    sim = simulation(pipeline_depth=depth)
    for count in (1, 2, 7):
        sim.add(f"r{count}", 10, stop_after=1000, max_tokens=count)
    sim.run_until_idle()
    for count in (1, 2, 7):
        assert (sim.sequences[f"r{count}"].finish_reason, sim.sequences[f"r{count}"].num_output) == ("length", count)
        assert sim.device.rows_run[f"r{count}"] == 10 + count - 1


def test_duplicate_id_is_refused_while_the_first_lives():
    sim = simulation()
    sim.add("a", 3, stop_after=1)
    with pytest.raises(ValueError, match="'a'"):
        sim.add("a", 3, stop_after=1)
    sim.run_until_idle()
    sim.add("a", 3, stop_after=1)


# ---- whole prompts -----------------------------------------------------------------------------------------------


def test_without_chunks_a_prompt_is_scheduled_whole_or_not_at_all():
    sim = simulation(chunked_prefill=False, max_model_len=64)
    for index, length in enumerate((40, 30, 20)):
        sim.add(f"r{index}", length, stop_after=3)
    assert rows_of(sim.turn()) == {"r0": 40, "r2": 20}
    assert rows_of(sim.turn()) == {"r0": 1, "r2": 1, "r1": 30}
    sim.run_until_idle()
    assert all(chunk.start == 0 for plan in sim.plans for chunk in plan.chunks if chunk.is_prefill)


def test_without_chunks_a_prompt_as_long_as_the_budget_is_not_starved_by_decode():
    sim = simulation(chunked_prefill=False, max_model_len=64)
    for name in "ab":
        sim.add(name, 4, stop_after=55)
    sim.turn()
    whole = sim.add("whole", 64, stop_after=1)
    for _ in range(ROW_PATIENCE_STEPS + 1):
        sim.turn()
    assert whole.finish_reason == "stop"
    sim.run_until_idle()
    assert {sim.sequences[name].num_output for name in "ab"} == {55}
