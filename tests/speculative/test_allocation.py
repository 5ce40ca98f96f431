"""Dividing a fixed number of rows."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.speculative.allocation import allocate, allocate_on_host, silence_finished, survivals_of

confidence_grids = st.integers(1, 7).flatmap(
    lambda slots: st.lists(
        st.lists(st.sampled_from([0.0, 0.3, 0.5, 0.5, 0.99, 1.0]), min_size=slots, max_size=slots),
        min_size=1,
        max_size=6,
    )
)


@given(confidence_grids, st.floats(0, 1))
def test_device_and_host_agree_and_use_every_row(confidences, fill):
    survivals = survivals_of(torch.tensor(confidences))
    requests, slots = survivals.shape
    total = requests + round(fill * requests * slots)
    rows = allocate(survivals, total)
    assert rows.tolist() == allocate_on_host(survivals.tolist(), total)
    assert int(rows.sum()) == total
    assert 1 <= int(rows.min()) <= int(rows.max()) <= 1 + slots
    chosen = [survivals[r, : n - 1].tolist() for r, n in enumerate(rows.tolist())]
    left = [survivals[r, n - 1 :].tolist() for r, n in enumerate(rows.tolist())]
    lowest = min((value for each in chosen for value in each), default=1.0)
    assert lowest >= max((value for each in left for value in each), default=0.0)


@given(confidence_grids, st.floats(0, 1), st.data())
def test_the_value_of_a_draft_has_no_say_in_whether_it_is_verified(confidences, fill, data):
    """Changing what depends on draft k of a request, confidences behind slot k, never changes whether k is chosen."""
    grid = torch.tensor(confidences)
    requests, slots = grid.shape
    total = requests + round(fill * requests * slots)
    request, slot = data.draw(st.integers(0, requests - 1)), data.draw(st.integers(0, slots - 1))
    changed = grid.clone()
    changed[request, slot + 1 :] = data.draw(st.sampled_from([0.0, 0.4, 1.0]))
    before = allocate(survivals_of(grid), total)[request] - 1 > slot
    after = allocate(survivals_of(changed), total)[request] - 1 > slot
    assert bool(before) == bool(after)


def test_ties_go_to_the_earlier_request():
    assert allocate(torch.full((3, 2), 0.5), 5).tolist() == [3, 1, 1]


def test_fresh_requests_come_last():
    survivals = survivals_of(torch.tensor([[0.0, 0.0], [0.2, 0.1], [0.9, 0.9]]))
    assert allocate(survivals, 7).tolist() == [1, 3, 3]
    assert allocate(survivals, 8).tolist() == [2, 3, 3]
    assert allocate(torch.zeros(3, 2), 3).tolist() == [1, 1, 1]


def test_drafts_that_do_not_exist_get_no_row():
    survivals = torch.tensor([[0.9, 0.8, 0.7], [0.1, 0.0, 0.0]])
    limits = torch.tensor([1, 3])
    assert allocate(survivals, 6, limits).tolist() == [2, 4]
    assert allocate(survivals, 4, limits).tolist() == [2, 2]


def test_no_slots():
    assert allocate(torch.zeros(3, 0), 3).tolist() == [1, 1, 1]


def test_broken_confidences_count_as_zero():
    survivals = survivals_of(torch.tensor([[0.5, float("nan"), 1.0], [2.0, 0.5, -1.0]]))
    assert survivals.tolist() == [[0.5, 0.0, 0.0], [1.0, 0.5, 0.0]]


def test_stop_ids_silence_their_request_and_what_is_behind_them():
    confidences = torch.full((4, 3), 0.5)
    emitted = torch.tensor([[7, 2, -1], [3, 4, -1], [5, -1, -1], [-1, -1, -1]])
    stop = torch.tensor([2, 2, -1, -1])
    drafts = torch.tensor([[1, 1, 1], [9, 2, 9], [2, 2, 2], [9, 9, 9]])
    silenced = silence_finished(confidences, emitted, stop, drafts)
    assert silenced.tolist() == [[0.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.5, 0.5, 0.5], [0.5, 0.5, 0.5]]
    assert torch.equal(silence_finished(confidences, emitted, stop)[1:], confidences[1:])
