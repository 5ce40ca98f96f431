"""Draft state belongs to its request: what one request reaches does not touch the acceptance of another."""

from __future__ import annotations

from pathlib import Path

from deepinfer.engine.engine import Engine
from deepinfer.engine.outputs import CompletionOutput
from deepinfer.sampling.params import SamplingParams
from tests.engine.support import make_engine, random_ids

# Hot: the distributions of random weights are nearly flat then, and the shared noise makes drafts agree now and then.
NUM_RUNS = 3
HOT = {"temperature": 3.0, "ignore_eos": True}


def run(engine: Engine, requests: list[tuple[list[int], SamplingParams]]) -> list[CompletionOutput]:
    names = [engine.add_request(prompt, params) for prompt, params in requests]
    found = {}
    while engine.has_work():
        found.update({output.request_id: output.outputs[0] for output in engine.step() if output.finished})
    engine.check()
    return [found[name] for name in names]


def test_a_request_at_its_position_limit_does_not_touch_the_acceptance_of_others(tiny_path: Path) -> None:
    """S6: one request runs past 64 positions (YaRN's original length) and into max_model_len; the others stay short.

    Everyone else's drafts are accepted exactly as often as without it, in the same steps, during and after.
    """
    short = [(random_ids(8, seed=index), SamplingParams(max_tokens=40, seq_seed=index, **HOT)) for index in range(4)]
    long = (random_ids(50, seed=9), SamplingParams(max_tokens=500, seq_seed=9, **HOT))
    without = run(make_engine(tiny_path, max_model_len=96, num_speculative_tokens=4), short)
    engine = make_engine(tiny_path, max_model_len=96, num_speculative_tokens=4)
    *beside, limited = run(engine, [*short, long])
    after = run(engine, short)
    for one, two, three in zip(without, beside, after, strict=True):
        assert one.token_ids == two.token_ids == three.token_ids
        counts = (one.num_steps, one.num_drafts_verified, one.num_drafts_accepted)
        assert counts == (two.num_steps, two.num_drafts_verified, two.num_drafts_accepted)
        assert counts == (three.num_steps, three.num_drafts_verified, three.num_drafts_accepted)
    assert sum(each.num_drafts_accepted for each in without) > 0
    assert limited.finish_reason == "length"
    assert len(limited.token_ids) == 96 - 50 + 1


def test_acceptance_does_not_die_past_the_original_length(tiny_path: Path) -> None:
    """S6: of one request's own drafts, those behind position 64 are accepted about as often as those before it."""
    engine = make_engine(tiny_path, max_model_len=512, num_speculative_tokens=4)
    accepted = {False: 0, True: 0}
    for seed in range(NUM_RUNS):
        prompt = random_ids(20, seed=seed)
        name = engine.add_request(prompt, SamplingParams(max_tokens=100, seq_seed=seed, **HOT))
        before = (0, 0)
        while engine.has_work():
            for output in engine.step():
                assert output.request_id == name
                each = output.outputs[0]
                now = (len(each.token_ids), each.num_drafts_accepted)
                accepted[len(prompt) + now[0] > 64] += now[1] - before[1]
                before = now
    per_token = {late: count / (NUM_RUNS * (56 if late else 44)) for late, count in accepted.items()}
    assert accepted[False] > 5
    assert per_token[True] > 0.4 * per_token[False], accepted
