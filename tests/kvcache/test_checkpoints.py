from deepinfer.kvcache.block_keys import TokenChain, root_key
from deepinfer.kvcache.block_pool import BlockPool
from deepinfer.kvcache.checkpoints import Checkpoints
from deepinfer.kvcache.prefix_index import PrefixIndex


def cached_blocks(count, num_blocks=10):
    """An index with a chain of ``count`` blocks that nobody holds."""
    index = PrefixIndex(BlockPool(num_blocks, 4))
    chain = TokenChain(root_key("test"), 4)
    chain.extend(range(4 * count))
    table, entries = index.pool.allocate(count), []
    for at, block in enumerate(table):
        entries.append(index.add(chain, at, entries[-1] if entries else None, block))
    index.pool.free(table)
    return index, entries


def keep(checkpoints, entry):
    place = checkpoints.reserve()
    assert place is not None
    assert checkpoints.attach(entry, place)
    checkpoints.check()
    return place


def test_least_used_checkpoint_makes_room():
    index, entries = cached_blocks(4)
    checkpoints = Checkpoints(index, 2)
    first, second = keep(checkpoints, entries[0]), keep(checkpoints, entries[1])
    assert checkpoints.use(entries[0]) == first
    assert keep(checkpoints, entries[2]) == second
    assert [entry.checkpoint for entry in entries] == [first, None, second, None]
    assert len(checkpoints) == 2


def test_without_places_nothing_is_kept():
    index, _entries = cached_blocks(1)
    assert Checkpoints(index, 0).reserve() is None


def test_places_that_are_all_reserved_are_not_taken_away():
    index, entries = cached_blocks(1)
    checkpoints = Checkpoints(index, 1)
    place = checkpoints.reserve()
    assert checkpoints.reserve() is None
    checkpoints.cancel(place)
    checkpoints.check()
    assert keep(checkpoints, entries[0]) == place


def test_second_checkpoint_of_a_block_is_not_needed():
    index, entries = cached_blocks(1)
    checkpoints = Checkpoints(index, 2)
    place = keep(checkpoints, entries[0])
    assert not checkpoints.attach(entries[0], checkpoints.reserve())
    assert entries[0].checkpoint == place
    checkpoints.check()
    checkpoints.drop(entries[0])
    checkpoints.drop(entries[0])
    assert len(checkpoints) == 0
    checkpoints.check()


def test_a_checkpoint_goes_with_its_block():
    index, entries = cached_blocks(4, num_blocks=5)
    checkpoints = Checkpoints(index, 3)
    for entry in entries[1:]:
        keep(checkpoints, entry)
    index.pool.allocate(2)
    assert len(checkpoints) == 1
    checkpoints.check()
    index.forget(entries[0])
    assert len(checkpoints) == 0
    checkpoints.check()
