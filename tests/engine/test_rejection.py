"""The classic rejection sampler in the engine: the output has the target's distribution, whatever is drafted."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer.sampling.logprobs import token_logprobs
from deepinfer.sampling.params import SamplingParams
from tests.engine.requests import random_cases, run_crowd
from tests.engine.support import logits_in_pieces, make_engine, random_ids

NUM_SAMPLES = 900
PARAMS = {"temperature": 1.3, "top_k": 3, "max_tokens": 3, "ignore_eos": True}


def exact_distribution(path: Path, prompt: list[int]) -> dict[tuple[int, ...], float]:
    """Probability of every continuation of three tokens under ``PARAMS``."""
    engine = make_engine(path)
    params = SamplingParams(**PARAMS)
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        longer: dict[tuple[int, ...], float] = {}
        for tokens, probability in found.items():
            logits = logits_in_pieces(engine, prompt + list(tokens), [len(prompt) + len(tokens)])[-1:]
            top = token_logprobs(logits, torch.tensor([0]), 3, params=params)
            for token, logprob in zip(top.top_ids[0].tolist(), top.top_logprobs[0].exp().tolist(), strict=True):
                longer[(*tokens, token)] = probability * logprob
        found = longer
    return found


@pytest.mark.parametrize("arguments", [{}, {"adaptive_verification": True}, {"async_scheduling": False}], ids=str)
def test_three_tokens_have_the_exact_distribution(tiny_path: Path, arguments: dict[str, Any]) -> None:
    prompt = random_ids(9, seed=4)
    expected = exact_distribution(tiny_path, prompt)
    engine = make_engine(tiny_path, sampler="rejection", num_speculative_tokens=4, max_num_seqs=64, **arguments)
    counts: Counter[tuple[int, ...]] = Counter()
    accepted = 0
    for seed in range(NUM_SAMPLES):
        engine.add_request(prompt, SamplingParams(**PARAMS, seq_seed=seed))
    while engine.has_work():
        for output in engine.step():
            if output.finished:
                counts[tuple(output.outputs[0].token_ids)] += 1
                accepted += output.outputs[0].num_drafts_accepted
    assert sum(counts.values()) == NUM_SAMPLES
    assert set(counts) <= set(expected)
    assert accepted > 0, "some drafts have to stand, or the test sees only the fresh draws"
    statistic = sum((counts[key] - NUM_SAMPLES * p) ** 2 / (NUM_SAMPLES * p) for key, p in expected.items())
    degrees = len(expected) - 1
    # 99.9 % quantile of chi-square by Wilson and Hilferty
    limit = degrees * (1 - 2 / (9 * degrees) + 3.09 * (2 / (9 * degrees)) ** 0.5) ** 3
    assert statistic < limit, f"chi-square {statistic:.1f} with {degrees} degrees of freedom, limit {limit:.1f}"


def test_greedy_and_forced_requests_do_not_depend_on_the_sampler(tiny_path: Path) -> None:
    cases = [case for case in random_cases(30, seed=21) if case.params.temperature == 0]
    assert len(cases) > 5
    plain = run_crowd(make_engine(tiny_path, num_speculative_tokens=0), cases, seed=1)
    assert run_crowd(make_engine(tiny_path, num_speculative_tokens=4, sampler="rejection"), cases, seed=2) == plain
