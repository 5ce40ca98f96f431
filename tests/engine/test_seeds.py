"""Where random numbers come from: a seed of the request, else of the engine; each of several outputs has its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from deepinfer.sampling.params import SamplingParams
from tests.engine.support import make_engine, random_ids

PROMPT = random_ids(6, seed=1)


def outputs(path: Path, requests: list[dict[str, Any]], **arguments: Any) -> list[list[list[int]]]:
    """Tokens of all outputs of requests that are added in this order and run together."""
    engine = make_engine(path, num_speculative_tokens=2, **arguments)
    common = {"max_tokens": 6, "ignore_eos": True}
    names = [engine.add_request(PROMPT, SamplingParams(**common, **values)) for values in requests]
    found = {}
    while engine.has_work():
        for output in engine.step():
            if output.finished:
                found[output.request_id] = [each.token_ids for each in output.outputs]
    return [found[name] for name in names]


def test_requests_without_a_seed_take_theirs_from_the_engine_in_order_of_arrival(tiny_path: Path) -> None:
    first = outputs(tiny_path, [{}, {}, {}], seed=7)
    assert outputs(tiny_path, [{}, {}, {}], seed=7, async_scheduling=False) == first
    assert len({str(each) for each in first}) == 3, "each has its own"
    assert outputs(tiny_path, [{}, {}, {}], seed=8) != first


def test_a_request_with_a_seed_takes_none_from_the_engine(tiny_path: Path) -> None:
    plain = outputs(tiny_path, [{}, {}], seed=7)
    first, own, second = outputs(tiny_path, [{}, {"seq_seed": 3}, {}], seed=7)
    assert [first, second] == plain
    assert outputs(tiny_path, [{"seq_seed": 3}], seed=99) == [own], "the engine's seed has no say in it"


def test_output_zero_of_several_is_that_of_one(tiny_path: Path) -> None:
    (several,) = outputs(tiny_path, [{"n": 4, "seq_seed": 5}])
    assert outputs(tiny_path, [{"seq_seed": 5}]) == [several[:1]]
    assert len({str(each) for each in several}) == 4
    assert outputs(tiny_path, [{"n": 2, "seq_seed": 5}]) == [several[:2]]


def test_seeds_count_modulo_two_to_the_64(tiny_path: Path) -> None:
    assert outputs(tiny_path, [{"seq_seed": -1}]) == outputs(tiny_path, [{"seq_seed": 2**64 - 1}])
