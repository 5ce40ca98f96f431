"""The constants of the n-gram hash: bucket primes, row offsets and multipliers (spec 4.10 b, c)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np


def _is_prime(number: int) -> bool:
    if number < 2:
        return False
    for divisor in (2, 3, 5, 7, 11, 13):
        if number % divisor == 0:
            return number == divisor
    # Deterministic Miller-Rabin: these bases decide every number below 3.4e14.
    odd, twos = number - 1, 0
    while odd % 2 == 0:
        odd //= 2
        twos += 1
    for base in (2, 3, 5, 7, 11, 13, 17):
        if base % number == 0:
            continue
        power = pow(base, odd, number)
        if power in (1, number - 1):
            continue
        for _ in range(twos - 1):
            power = power * power % number
            if power == number - 1:
                break
        else:
            return False
    return True


def _primes_from(start: int) -> Iterator[int]:
    number = max(start, 2)
    while True:
        if _is_prime(number):
            yield number
        number += 1


@lru_cache
def engram_primes(num_layers: int, max_ngram: int, num_heads: int, at_least: int) -> tuple[tuple[int, ...], ...]:
    """Bucket sizes per engram layer in (n-gram size, head) order; no prime is used twice (spec 4.10 b).

    Args:
        num_layers: number of engram layers.
        max_ngram: largest n-gram in tokens; sizes are 2 to this.
        num_heads: hashes per n-gram size.
        at_least: every prime is >= this number.
    """
    # Every size of every layer takes the smallest primes that are left, so together they take the first ones in order.
    fresh = _primes_from(at_least)
    per_layer = (max_ngram - 1) * num_heads
    return tuple(tuple(next(fresh) for _ in range(per_layer)) for _ in range(num_layers))


def engram_multipliers(layer_id: int, max_ngram: int, num_compressed: int) -> tuple[int, ...]:
    """Odd 63-bit multipliers of one layer, one per context position (spec 4.10 c).

    Args:
        layer_id: absolute number of the engram layer; seeds NumPy's PCG64.
        max_ngram: number of multipliers (context positions ``p, p-1, ...``).
        num_compressed: number of distinct compressed ids.
    """
    bound = ((2**63 - 1) // num_compressed) // 2
    draws = np.random.default_rng(10007 * layer_id).integers(0, bound, size=max_ngram, dtype=np.int64)
    return tuple(int(2 * draw + 1) for draw in draws)
