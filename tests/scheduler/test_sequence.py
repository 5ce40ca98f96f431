import pytest

from deepinfer.config.scheduler import SchedulerConfig
from deepinfer.errors import RequestError
from deepinfer.scheduler.budget import decode_rows
from deepinfer.scheduler.sequence import Sequence, Status


def running(num_prompt=5, **values) -> Sequence:
    sequence = Sequence(request_id="a", prompt_ids=tuple(range(num_prompt)), **values)
    sequence.status = Status.RUNNING
    sequence.state_slot = 1
    sequence.block_table = [3, 4]
    return sequence


@pytest.mark.parametrize(
    ("values", "field"),
    [({"prompt_ids": ()}, "prompt"), ({"max_tokens": 0}, "max_tokens"), ({"max_model_len": -1}, "max_model_len")],
)
def test_impossible_requests_are_refused_with_the_field(values, field):
    with pytest.raises(RequestError) as caught:
        Sequence(**{"request_id": "a", "prompt_ids": (1,), **values})
    assert caught.value.field == field


def test_limit_counts_tokens_that_are_being_sampled():
    sequence = running(max_tokens=3)
    sequence.append_tokens([7])
    sequence.num_pending = 5
    assert not sequence.is_at_limit, "rows in flight give one token for sure"
    sequence.append_tokens([8])
    assert sequence.is_at_limit


def test_rows_of_a_decode_step_stop_at_the_limits():
    config = SchedulerConfig(num_speculative_tokens=4)
    assert decode_rows(config, running(max_tokens=100)) == 5
    assert decode_rows(config, running(max_tokens=3)) == 3, "more drafts could not be used"
    assert decode_rows(config, running(max_tokens=1)) == 1
    long = running(num_prompt=4, max_model_len=7)
    long.append_tokens([7])
    assert decode_rows(config, long) == min(5, 7 - long.num_scheduled)


def test_a_sequence_may_grow_one_token_beyond_its_rows():
    sequence = running(num_prompt=4, max_model_len=5)
    sequence.append_tokens([7])
    assert not sequence.is_at_limit, "row 4 still fits"
    sequence.append_tokens([8])
    assert sequence.is_at_limit


def test_rows_beyond_the_known_tokens_are_placeholders():
    assert running().slice_ids(3, 6, -1) == (3, 4, -1)
    assert running().slice_ids(1, 3, -1) == (1, 2)


def test_placeholder_never_becomes_a_token():
    with pytest.raises(AssertionError, match="-1 is no token id"):
        running().append_tokens([-1])


def test_table_is_the_same_tuple_until_it_grows():
    sequence = running()
    first = sequence.table()
    assert sequence.table() is first
    sequence.block_table.append(9)
    assert sequence.table() == (3, 4, 9)


def test_dropping_memory_keeps_tokens_and_starts_a_new_epoch():
    sequence = running()
    sequence.append_tokens([7, 8])
    sequence.table()
    sequence.num_computed, sequence.num_in_flight, sequence.num_pending = 6, 1, 1
    assert sequence.drop_memory() == ([3, 4], 1)
    assert sequence.token_ids == [0, 1, 2, 3, 4, 7, 8]
    assert (sequence.num_prefill, sequence.num_scheduled, sequence.num_pending, sequence.epoch) == (7, 0, 0, 1)
    assert sequence.table() == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_computed": 9}, "rows=9 beyond"),
        ({"block_table": []}, "blocks=0 do not cover"),
        ({"state_slot": 0}, "without a state slot"),
        ({"num_in_flight": -1}, "negative"),
        ({"finish_reason": "stop"}, "finish_reason"),
        ({"num_pending": 1}, "2 tokens behind"),
        ({"status": Status.WAITING}, "holds blocks"),
    ],
)
def test_check_notices_a_contradiction(changes, message):
    sequence = running()
    sequence.append_tokens([7])
    sequence.num_computed = 5
    sequence.check(block_tokens=4)
    for name, value in changes.items():
        setattr(sequence, name, value)
    with pytest.raises(AssertionError, match=message):
        sequence.check(block_tokens=4)
