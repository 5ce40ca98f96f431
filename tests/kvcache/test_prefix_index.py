"""Finding, adding and losing cached blocks; the pool and the index agree after every operation."""

import random

import pytest

from deepinfer.kvcache.block_keys import TokenChain, root_key
from deepinfer.kvcache.block_pool import BlockPool
from deepinfer.kvcache.prefix_index import PrefixIndex

BLOCK = 4
ROOT = root_key("test")


def make_index(num_blocks=20):
    return PrefixIndex(BlockPool(num_blocks, BLOCK))


def chain_of(tokens, **options):
    chain = TokenChain(ROOT, BLOCK, **options)
    chain.extend(list(tokens))
    return chain


def compute(index, tokens):
    """A sequence that takes what is cached, computes the rest, and ends. Returns the number of cached blocks."""
    chain = chain_of(tokens)
    entries = index.walk(chain, len(chain))
    hit = len(entries)
    table = index.take(entries)
    table += index.pool.allocate(len(chain) - hit)
    for at in range(hit, len(chain)):
        added = index.add(chain, at, entries[-1] if entries else None, table[at])
        assert added is not None
        entries.append(added)
    check(index)
    index.pool.free(table)
    check(index)
    return hit


def check(index):
    index.pool.check()
    index.check()


def test_a_prefix_is_found_and_nothing_more():
    index = make_index()
    assert compute(index, range(12)) == 0
    assert compute(index, range(12)) == 3
    assert compute(index, [*range(8), 99, 99, 99, 99]) == 2
    assert compute(index, [50, *range(1, 12)]) == 0
    assert len(index.walk(chain_of(range(12)), 2)) == 2, "no more than asked for"


def test_collisions_are_misses():
    """All keys equal: contents and parents still tell the blocks apart."""
    index = make_index()
    same = {"hasher": lambda data: b"same"}
    one, two = chain_of(range(8), **same), chain_of(range(8, 16), **same)
    (block,) = index.pool.allocate(1)
    first = index.add(one, 0, None, block)
    assert first is not None
    assert index.walk(one, 2) == [first]
    assert index.walk(two, 2) == []
    (other,) = index.pool.allocate(1)
    assert index.add(two, 0, None, other) is None, "the key is taken: the block stays out"
    assert not index.holds(other)


def test_equal_contents_behind_other_parents_are_misses():
    """A key that collides deeper: the content of the block agrees, the tokens before it do not."""
    index = make_index()
    by_content = {"hasher": lambda data: data[-8 * BLOCK :][:16]}  # ignores the parent
    one, two = chain_of([1] * 4 + [7] * 4, **by_content), chain_of([2] * 4 + [7] * 4, **by_content)
    blocks = index.pool.allocate(3)
    first = index.add(one, 0, None, blocks[0])
    index.add(one, 1, first, blocks[1])
    second = index.add(two, 0, None, blocks[2])
    assert one.key(1) == two.key(1)
    assert index.walk(two, 2) == [second]
    assert len(index.walk(one, 2)) == 2


def test_empty_blocks_go_first_then_leaves_by_last_use():
    index = make_index(num_blocks=10)
    compute(index, range(12))
    compute(index, range(100, 112))
    assert index.pool.num_kept == 6
    assert index.pool.num_free == 9
    taken = index.pool.allocate(3)
    assert index.num_evictions == 0, "blocks without content are there"
    compute(index, range(12))  # used again, so the other one is older now
    index.pool.allocate(2)
    check(index)
    assert [len(index.walk(chain_of(tokens), 3)) for tokens in (range(12), range(100, 112))] == [3, 1]
    index.pool.free(taken)


def test_a_parent_never_goes_before_its_child():
    index = make_index(num_blocks=8)
    compute(index, range(28))
    for left in range(6, -1, -1):
        index.pool.allocate(1)
        check(index)
        assert len(index.walk(chain_of(range(28)), 7)) == left


def test_deep_blocks_are_worth_more_than_shallow_ones_of_the_same_age():
    index = make_index(num_blocks=2200)
    compute(index, range(4 * 2100))
    compute(index, range(10**6, 10**6 + 8))
    index.pool.allocate(index.pool.num_free - index.pool.num_kept)
    index.pool.allocate(1)
    assert len(index.walk(chain_of(range(4 * 2100)), 2100)) == 2100
    assert len(index.walk(chain_of(range(10**6, 10**6 + 8)), 2)) == 1


def test_blocks_in_use_are_never_given_up():
    index = make_index(num_blocks=5)
    compute(index, range(8))
    held = index.take(index.walk(chain_of(range(8)), 2))
    index.pool.allocate(2)
    assert index.pool.num_free == 0
    assert len(index.walk(chain_of(range(8)), 2)) == 2
    index.pool.free(held)
    index.pool.allocate(2)
    assert len(index) == 0


def test_forgetting_a_block_forgets_what_builds_on_it():
    index = make_index(num_blocks=20)
    compute(index, range(16))
    compute(index, [*range(8), *range(50, 58)])
    second = index.walk(chain_of(range(16)), 4)[1]
    index.forget(second)
    check(index)
    assert len(index.walk(chain_of(range(16)), 4)) == 1
    assert len(index) == 1
    assert index.pool.num_kept == 1
    index.forget(second)  # once is enough
    assert index.pool.num_free == 19


def test_a_deep_chain_is_forgotten_without_recursion():
    index = make_index(num_blocks=5000)
    compute(index, range(4 * 4900))
    index.forget(index.walk(chain_of(range(4)), 1)[0])
    assert len(index) == 0
    check(index)


def test_replayed_blocks_are_found_by_those_who_accept_them_only():
    index = make_index()
    compute(index, range(8))
    chain = chain_of(range(16))
    entries = index.walk(chain, 4)
    chain.turn(2)
    table = index.take(entries) + index.pool.allocate(2)
    for at in (2, 3):
        entries.append(index.add(chain, at, entries[-1], table[at]))
    check(index)
    assert len(index.walk(chain_of(range(16)), 4)) == 2
    reader = chain_of(range(16))
    assert index.walk_replayed(reader, 4) == entries
    assert reader.replayed_from == 2
    assert len(index.walk_replayed(chain_of(range(8)), 2)) == 2


@pytest.mark.parametrize("seed", range(20))
def test_random_use_keeps_pool_and_index_in_step(seed):
    rng = random.Random(seed)
    index = make_index(num_blocks=rng.randint(8, 30))
    held = []
    texts = [[rng.randrange(3) for _ in range(40)] for _ in range(4)]
    for _ in range(120):
        action, text = rng.random(), rng.choice(texts)[: rng.randrange(4, 40)]
        chain = chain_of(text)
        if action < 0.5:
            entries = index.walk(chain, len(chain))
            missing = len(chain) - len(entries)
            unheld = sum(index.pool.ref_count(entry.block) == 0 for entry in entries)
            if missing + unheld > index.pool.num_free:
                continue
            table = index.take(entries)
            hit = len(table)
            table += index.pool.allocate(missing)
            for at in range(hit, len(chain)):
                added = index.add(chain, at, entries[-1] if entries else None, table[at])
                assert added is not None
                entries.append(added)
            held.append(table)
        elif action < 0.85 and held:
            index.pool.free(held.pop(rng.randrange(len(held))))
        elif action < 0.9:
            found = index.walk(chain, len(chain))
            if found:
                index.forget(rng.choice(found))
        elif index.pool.num_free:
            held.append(index.pool.allocate(1))
        check(index)
    for table in held:
        index.pool.free(table)
    check(index)
    assert index.pool.num_free == index.pool.num_usable
