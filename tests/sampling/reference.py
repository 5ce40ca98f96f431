"""Plain-Python meanings of what the sampler computes, written without looking at speed."""

from __future__ import annotations

import math
from collections import Counter

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15


def naive_mix(x: int) -> int:
    x &= MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def naive_bits(seed: int, position: int, purpose: int, index: int) -> int:
    key = naive_mix(naive_mix(seed + purpose * 0xD1342543DE82EF95) + position * GOLDEN)
    return naive_mix(key + (index + 1) * GOLDEN)


def naive_probabilities(logits, temperature=1.0, min_p=0.0) -> list[float]:
    top = max(logits)
    weights = [math.exp((x - top) / temperature) if x > -math.inf else 0.0 for x in logits]
    weights = [w if w >= min_p else 0.0 for w in weights]
    return [w / sum(weights) for w in weights]


def naive_keep(probabilities, top_p=1.0, top_k=-1, doubt=1e-9) -> list[int] | None:
    """Ids that stay, most likely first; None if rounding decides (mass before a token within ``doubt`` of top_p)."""
    order = sorted(range(len(probabilities)), key=lambda i: (-probabilities[i], i))
    kept, before = [], 0.0
    for token in order:
        if top_p < 1.0 and abs(before - top_p) < doubt:
            return None
        if top_p < 1.0 and before > top_p:
            break
        kept.append(token)
        before += probabilities[token]
    return kept[:top_k] if top_k > 0 else kept


def naive_distribution(logits, params) -> list[float]:
    """What ``params`` sample from."""
    probabilities = naive_probabilities(logits, params.temperature, params.min_p)
    kept = naive_keep(probabilities, params.top_p, params.top_k)
    assert kept is not None, "choose other numbers: rounding decides here"
    total = sum(probabilities[i] for i in kept)
    return [p / total if i in kept else 0.0 for i, p in enumerate(probabilities)]


def naive_penalties(logits, prompt, output, params) -> list[float]:
    counts, result = Counter(output), list(logits)
    for token in set(prompt) | set(output):
        if token < len(result):
            repetition = params.repetition_penalty
            result[token] = result[token] / repetition if result[token] > 0 else result[token] * repetition
    for token, count in counts.items():
        result[token] -= params.frequency_penalty * count + params.presence_penalty
    return result


def chi_square_bound(freedom: int) -> float:
    """The 99.99 % point of chi-square (Wilson and Hilferty's approximation)."""
    spread = 2.0 / (9.0 * freedom)
    return freedom * (1.0 - spread + 3.719 * math.sqrt(spread)) ** 3


def chi_square(counts, probabilities) -> tuple[float, int]:
    """Statistic and degrees of freedom; categories expecting fewer than 5 are pooled."""
    total = sum(counts)
    statistic, categories, rest_seen, rest_expected = 0.0, 0, 0.0, 0.0
    for seen, probability in zip(counts, probabilities, strict=True):
        expected = total * probability
        if expected < 5:
            rest_seen, rest_expected = rest_seen + seen, rest_expected + expected
            continue
        statistic += (seen - expected) ** 2 / expected
        categories += 1
    if rest_expected >= 5:
        statistic += (rest_seen - rest_expected) ** 2 / rest_expected
        categories += 1
    else:
        assert rest_seen <= 30, f"{rest_seen} draws where {rest_expected} were expected"
    return statistic, categories - 1
