import random

import pytest

from deepinfer.kvcache.block_pool import BLOCK_TOKENS, NULL_BLOCK, BlockPool


def test_null_block_is_never_handed_out():
    pool = BlockPool(9)
    assert sorted(pool.allocate(pool.num_free)) == list(range(1, 9))
    assert NULL_BLOCK == 0
    assert pool.num_free == 0
    assert pool.usage == 1.0
    pool.check()


def test_blocks_are_handed_out_in_the_order_in_which_they_became_free():
    pool = BlockPool(6)
    first, second = pool.allocate(2), pool.allocate(3)
    pool.free(second)
    pool.free(first)
    # Each table from its tail: the beginning of a sequence survives longest.
    assert pool.allocate(5) == [*reversed(second), *reversed(first)]


def test_shared_block_becomes_free_with_its_last_owner():
    pool = BlockPool(4)
    [block] = pool.allocate(1)
    pool.share(block)
    pool.free([block])
    assert pool.ref_count(block) == 1
    assert pool.num_used == 1
    pool.free([block])
    assert pool.num_used == 0
    pool.check()


def test_free_block_can_be_brought_back_with_its_content():
    pool = BlockPool(4)
    lost = []
    pool.on_reuse = lost.append
    kept, other = pool.allocate(2)
    lost.clear()
    pool.free([kept, other])
    pool.share(kept)
    assert pool.num_free == 2
    assert kept not in pool.allocate(2)
    assert lost == [3, other], "never-used first, then the one freed first; not the revived one"
    pool.check()


def test_double_free_names_the_block():
    pool = BlockPool(4)
    [block] = pool.allocate(1)
    pool.free([block])
    with pytest.raises(AssertionError, match=f"block={block} freed twice"):
        pool.free([block])


@pytest.mark.parametrize("block", [NULL_BLOCK, -1, 4])
def test_blocks_outside_the_pool_are_refused(block):
    pool = BlockPool(4)
    with pytest.raises(AssertionError, match="is not in"):
        pool.free([block])
    with pytest.raises(AssertionError, match="is not in"):
        pool.share(block)


def test_allocating_more_than_is_free_changes_nothing():
    pool = BlockPool(4)
    with pytest.raises(AssertionError, match="num_free=3"):
        pool.allocate(4)
    assert pool.num_free == 3
    pool.check()


def test_blocks_for_rounds_up():
    pool = BlockPool(4)
    assert [pool.blocks_for(n) for n in (0, 1, BLOCK_TOKENS, BLOCK_TOKENS + 1)] == [0, 1, 1, 2]


def test_check_notices_a_lost_block():
    pool = BlockPool(4)
    [block] = pool.allocate(1)
    pool._refs[block] = 0
    with pytest.raises(AssertionError, match=r"differ in blocks \[1\]"):
        pool.check()


def test_counts_stay_right_over_random_operations():
    pool, rng, owned = BlockPool(12), random.Random(1), []
    for _ in range(2000):
        action = rng.randrange(3)
        if action == 0 and pool.num_free:
            owned += pool.allocate(rng.randint(1, pool.num_free))
        elif action == 1 and owned:
            block = rng.choice(owned)
            pool.share(block)
            owned.append(block)
        elif owned:
            pool.free([owned.pop(rng.randrange(len(owned)))])
        pool.check()
        assert pool.num_used == len(set(owned))
        assert all(pool.ref_count(block) == owned.count(block) for block in set(owned))
