import pytest

from deepinfer.kvcache.block_keys import MediaSpan, TokenChain, root_key

ROOT = root_key("faithful", "off/0", "")


def keys_of(tokens, root=ROOT, **options):
    chain = TokenChain(root, block_tokens=4, **options)
    chain.extend(tokens)
    return [chain.key(index) for index in range(len(chain))]


def test_only_full_blocks_have_keys_and_growing_changes_none():
    chain = TokenChain(ROOT, block_tokens=4)
    tokens = list(range(11))
    chain.extend(tokens[:3])
    assert len(chain) == 0
    chain.extend(tokens)
    assert len(chain) == 2
    first = [chain.key(0), chain.key(1)]
    chain.extend([*tokens, 11, 12])
    assert [chain.key(0), chain.key(1)] == first
    assert len(chain) == 3


def test_a_key_stands_for_all_tokens_before_it():
    assert keys_of([1, 2, 3, 4, 5, 6, 7, 8])[1] != keys_of([9, 2, 3, 4, 5, 6, 7, 8])[1]
    assert keys_of([1, 2, 3, 4])[0] == keys_of([1, 2, 3, 4, 5, 6, 7, 8])[0]


@pytest.mark.parametrize(
    "parts", [("float32", "off/0", ""), ("faithful", "compact/140", ""), ("faithful", "off/0", "tenant")]
)
def test_numerics_truncation_and_salt_are_part_of_every_key(parts):
    assert keys_of(range(8), root_key(*parts)) != keys_of(range(8))
    assert not set(keys_of(range(8), root_key(*parts))) & set(keys_of(range(8)))


def test_borders_between_parts_count():
    assert root_key("ab", "c") != root_key("a", "bc")


@pytest.mark.parametrize("width", [16, 32])
def test_equal_text_with_another_image_has_another_key(width):
    """Also when the digests agree in their first or last bits: they count at full length."""
    tail = b"\x07" * (width // 8)
    digests = [b"A" * 20 + tail, b"B" * 20 + tail, tail + b"A" * 20, tail + b"B" * 20]
    keys = [keys_of([5] * 12, media=[MediaSpan(2, 6, digest)]) for digest in digests]
    for index in range(3):
        assert len({found[index] for found in keys}) == 4, "the image reaches the first two blocks and all behind"
    assert keys_of([5] * 12, media=[MediaSpan(2, 6, digests[0])]) == keys[0]


def test_an_image_counts_where_it_lies_and_not_before():
    late = keys_of([5] * 12, media=[MediaSpan(9, 11, b"image")])
    plain = keys_of([5] * 12)
    assert late[:2] == plain[:2]
    assert late[2] != plain[2]
    assert keys_of([5] * 12, media=[MediaSpan(8, 10, b"image")])[2] != late[2]
    assert keys_of([5] * 12, media=[MediaSpan(9, 12, b"image")])[2] != late[2]


def test_a_chain_can_turn_before_the_block_is_full():
    whole, growing = TokenChain(ROOT, block_tokens=4), TokenChain(ROOT, block_tokens=4)
    whole.extend(range(16))
    whole.turn(2)
    growing.extend(range(9))
    growing.turn(2)
    growing.extend(range(16))
    assert [growing.key(index) for index in range(4)] == [whole.key(index) for index in range(4)]


def test_blocks_behind_a_replay_have_keys_of_their_own():
    chain = TokenChain(ROOT, block_tokens=4)
    chain.extend(range(16))
    cold = [chain.key(index) for index in range(4)]
    expected = chain.replayed_key(2)
    chain.turn(2)
    assert [chain.key(index) for index in range(2)] == cold[:2]
    assert chain.key(2) == expected != cold[2]
    assert chain.key(3) != cold[3]
    chain.extend(range(20))
    assert len(chain) == 5
    chain.turn(1)
    assert chain.key(1) not in (cold[1], expected)
    chain.turn(None)
    assert [chain.key(index) for index in range(4)] == cold
