"""Top-p and top-k against their definition, with the cases where libraries differ: ties, -inf, tiny p, huge k."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from deepinfer.sampling import truncation
from deepinfer.sampling.truncation import first_argmax, keep_top, mass_of, stable_topk
from tests.sampling.reference import naive_keep, naive_probabilities


def _scores(logits) -> torch.Tensor:
    logits = torch.as_tensor(logits, dtype=torch.float32)
    return logits - logits.amax(-1, keepdim=True)


def _kept_ids(scores: torch.Tensor, top_p: list[float] | None, top_k: list[int] | None) -> list[list[int]]:
    """Ids that :func:`keep_top` leaves in each row, in its order."""
    p = None if top_p is None else torch.tensor(top_p, dtype=torch.float64)
    k = None if top_k is None else torch.tensor(top_k)
    kept = keep_top(scores, p, k, max(top_k) if top_k else scores.shape[1])
    return [
        [int(i) for i, s in zip(ids, row, strict=True) if s > -math.inf]
        for ids, row in zip(kept.token_ids, kept.scores, strict=True)
    ]


@pytest.mark.parametrize("top_p", [1e-9, 0.1, 0.5, 0.9, 0.999, 1.0])
@pytest.mark.parametrize("top_k", [1, 3, 40, 64, 10**9])
@pytest.mark.parametrize("levels", [None, 3])
def test_kept_tokens_are_those_of_the_definition(top_p, top_k, levels):
    rng = np.random.default_rng(7)
    rows = rng.normal(size=(12, 64)) * rng.uniform(0.1, 6, size=(12, 1))
    if levels:
        rows = np.round(rows * levels) / levels  # many ties
    rows[:, 5::9] = -np.inf
    rows = rows.astype(np.float32)
    found = _kept_ids(_scores(rows), [top_p] * 12, [min(top_k, 64)] * 12)
    compared = 0
    for row, ids in zip(rows, found, strict=True):
        probabilities = naive_probabilities(row.astype(float))
        expected = naive_keep(probabilities, top_p, top_k)
        if expected is not None:
            compared += 1
            assert ids == [token for token in expected if probabilities[token] > 0]
    assert compared >= 10


def test_token_that_reaches_the_threshold_exactly_does_not_close_the_nucleus():
    uniform = torch.zeros(1, 4)  # the mass before token j is exactly j / 4
    assert _kept_ids(uniform, [0.5], None) == [[0, 1, 2]]
    assert _kept_ids(uniform, [0.4999999], None) == [[0, 1]]
    assert _kept_ids(uniform, [0.75], None) == [[0, 1, 2, 3]]
    assert _kept_ids(uniform, [1e-300], None) == [[0]]


def test_top_k_counts_what_top_p_left_and_prefers_low_ids():
    uniform = torch.zeros(4, 8)
    assert _kept_ids(uniform, [0.25, 0.25, 1.0, 1.0], [2, 5, 3, 8]) == [[0, 1], [0, 1, 2], [0, 1, 2], [*range(8)]]


def test_most_likely_token_always_stays():
    scores = _scores(torch.randn(5, 100) * 50)
    assert [ids[0] for ids in _kept_ids(scores, [1e-12] * 5, None)] == scores.argmax(-1).tolist()


def test_p_of_one_keeps_tokens_whose_mass_rounds_to_zero():
    scores = torch.tensor([[0.0, -60.0, -100.0, -math.inf]])
    assert _kept_ids(scores, [1.0], [4]) == [[0, 1, 2]]
    assert _kept_ids(scores, [math.nextafter(1.0, 0.0)], None) == [[0]]


def test_p_of_one_keeps_everything_when_the_total_has_more_than_53_bits():
    scores = torch.cat([torch.rand(20, 2000) - 1.0, torch.full((20, 1), -60.0)], dim=1)
    scores[:, 0] = 0.0
    assert mass_of(scores).sum(-1).min() > 2**53
    assert [len(ids) for ids in _kept_ids(scores, [1.0] * 20, None)] == [2001] * 20


@pytest.mark.parametrize("spread", [0.0, 0.5, 3.0, 20.0])
def test_candidate_shortcut_changes_nothing(spread, monkeypatch):
    scores = _scores(torch.randn(6, 3000) * spread)
    top_p = [0.001, 0.3, 0.9, 0.99, 0.999999, 1.0]
    quick = _kept_ids(scores, top_p, None)
    monkeypatch.setattr(truncation, "_count_candidates", lambda scores, *rest: scores.shape[1])
    assert quick == _kept_ids(scores, top_p, None)


def test_candidate_shortcut_is_short_for_a_peaked_distribution():
    scores = _scores(torch.randn(2, 50_000) * 8)
    kept = keep_top(scores, torch.tensor([0.9, 0.95], dtype=torch.float64), None, 50_000)
    assert kept.token_ids.shape[1] < 5000


def test_rows_do_not_see_one_another():
    scores = _scores(torch.randn(9, 500) * 3)
    top_p, top_k = [0.9, 1.0, 0.5] * 3, [500, 20, 7] * 3
    together = _kept_ids(scores, top_p, top_k)
    order = torch.randperm(9).tolist()
    shuffled = _kept_ids(scores[order], [top_p[i] for i in order], [top_k[i] for i in order])
    assert shuffled == [together[i] for i in order]
    for row in range(9):
        assert _kept_ids(scores[row : row + 1], [top_p[row]], [top_k[row]]) == [together[row]]


def test_spread_puts_scores_back_at_their_ids():
    scores = _scores(torch.randn(3, 50))
    full = keep_top(scores, None, torch.tensor([1, 10, 50]), 50).spread(50)
    assert (full > -math.inf).sum(-1).tolist() == [1, 10, 50]
    assert torch.equal(full[2], scores[2])
    assert torch.equal(full[1], scores[1].masked_fill(scores[1] < scores[1].topk(10).values[-1], -math.inf))


@pytest.mark.parametrize("k", [0, 1, 5, 40, 200])
def test_stable_topk_orders_equals_by_id(k):
    x = (torch.randn(20, 200) * 2).round()
    x[:, 7] = -math.inf
    x[:, 9:40] = 0.0
    x[:, 11::2] *= -1.0  # both zeros
    values, ids = stable_topk(x, k)
    for row in range(20):
        expected = sorted(range(200), key=lambda i, row=row: (-x[row, i].item(), i))[:k]
        assert ids[row].tolist() == expected
        assert torch.equal(values[row], x[row, expected])


@pytest.mark.parametrize("implementation", [first_argmax, truncation._first_argmax_anywhere])
def test_first_argmax_takes_the_lowest_id_among_equals(implementation):
    x = torch.randn(50, 1003).round()
    x[3] = -math.inf
    x[4, 600] = math.nan
    expected = [row.index(max(row)) for row in x.tolist()]
    found = implementation(x).tolist()
    assert found[:4] + found[5:] == expected[:4] + expected[5:]
    assert 0 <= found[4] < 1003


def test_masses_sum_to_the_same_integer_in_any_order():
    scores = _scores(torch.randn(1, 129_280) * 4)
    mass = mass_of(scores)
    total = mass.sum().item()
    assert total == mass[0, torch.randperm(129_280)].view(-1, 80).sum(0).sum().item()
    assert total * 2.0**-44 == pytest.approx(scores.double().exp().sum().item(), rel=1e-6)
    assert mass_of(torch.tensor([-math.inf, 0.0])).tolist() == [0, 2**44]
