import pytest

from deepinfer.kvcache.state_slots import NULL_SLOT, StateSlots


def test_null_slot_is_never_handed_out():
    slots = StateSlots(4)
    assert [slots.allocate() for _ in range(3)] == [1, 2, 3]
    assert NULL_SLOT == 0
    assert slots.num_free == 0
    with pytest.raises(AssertionError, match="no free state slot of 3"):
        slots.allocate()
    slots.check()


def test_late_reader_notices_that_a_slot_was_reused():
    slots = StateSlots(2)
    slot = slots.allocate()
    seen = slots.generation(slot)
    assert slots.is_current(slot, seen)
    slots.free(slot)
    assert not slots.is_current(slot, seen), "nobody owns it"
    assert slots.allocate() == slot
    assert not slots.is_current(slot, seen), "somebody else owns it"
    assert slots.generation(slot) == seen + 1


def test_slot_freed_last_is_reused_last():
    slots = StateSlots(4)
    first, second, third = (slots.allocate() for _ in range(3))
    for slot in (second, first, third):
        slots.free(slot)
    assert [slots.allocate() for _ in range(3)] == [second, first, third]


def test_double_free_names_slot_and_generation():
    slots = StateSlots(3)
    slot = slots.allocate()
    slots.free(slot)
    with pytest.raises(AssertionError, match=r"slot=1 freed twice \(generation 1\)"):
        slots.free(slot)
    with pytest.raises(AssertionError, match="is not in"):
        slots.free(NULL_SLOT)


def test_check_notices_a_lost_slot():
    slots = StateSlots(3)
    slots._free.popleft()
    with pytest.raises(AssertionError, match="is not the list of unused slots"):
        slots.check()
