"""The constants of the n-gram hash against Appendix A.1, A.2 and section 11 of the specification."""

from __future__ import annotations

import pytest

from deepinfer.config.engram_hashing import engram_multipliers, engram_primes

RELEASED_PRIMES = (
    """
    16000057 16000079 16000081 16000097 16000121 16000129 16000133 16000183
    16000189 16000207 16000211 16000253 16000277 16000289 16000307 16000321
    16000339 16000381 16000393 16000399 16000403 16000409 16000447 16000463
    """,
    """
    16000477 16000487 16000499 16000507 16000511 16000573 16000609 16000627
    16000667 16000669 16000693 16000697 16000711 16000729 16000759 16000769
    16000781 16000799 16000813 16000819 16000841 16000877 16000879 16000889
    """,
)


def test_released_primes_and_row_counts():
    layers = engram_primes(2, 4, 8, 16_000_000)
    for found, expected in zip(layers, RELEASED_PRIMES, strict=True):
        assert found == tuple(int(number) for number in expected.split())
    assert [sum(layer) for layer in layers] == [384006168, 384016682]


def test_tiny_primes():
    first, second = engram_primes(2, 4, 2, 1000)
    assert first == (1009, 1013, 1019, 1021, 1031, 1033)
    assert second == (1039, 1049, 1051, 1061, 1063, 1069)


@pytest.mark.parametrize("at_least", [0, 1, 2, 3, 10])
def test_small_primes_match_trial_division(at_least):
    (found,) = engram_primes(1, 2, 30, at_least)
    expected = [n for n in range(max(at_least, 2), 200) if all(n % d for d in range(2, n))][:30]
    assert list(found) == expected


@pytest.mark.parametrize(
    ("layer", "num_compressed", "expected"),
    [
        (1, 99092, (76632096046245, 4839876093313, 35959672319349, 73987337458391)),
        (14, 99092, (67716810739261, 51510806800915, 30921347202721, 82619226485591)),
        (1, 512, (14831304026200453, 936705081716061, 6959601268494069, 14319439928568407)),
        (3, 512, (5327545137947969, 15804252993068197, 2105304604748359, 13605204602324401)),
    ],
)
def test_multipliers(layer, num_compressed, expected):
    assert engram_multipliers(layer, 4, num_compressed) == expected


def test_products_with_compressed_ids_fit_in_signed_64_bits():
    for multiplier in engram_multipliers(14, 4, 99092):
        assert multiplier % 2 == 1
        assert multiplier * 99091 < 2**63
