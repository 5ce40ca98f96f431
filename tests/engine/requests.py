"""Seeded random requests with everything mixed in, and drivers that run them under different circumstances."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from deepinfer.engine.engine import Engine
from deepinfer.engine.outputs import CompletionOutput
from deepinfer.sampling.params import SamplingParams
from deepinfer.structured.spec import Choice, JsonSchema, Regex


@dataclass(frozen=True)
class Case:
    """One request."""

    prompt: list[int]
    params: SamplingParams


def random_cases(count: int, seed: int, vocab: int = 512, longest: int = 60) -> list[Case]:
    """Prompts of 1 to ``longest`` tokens; greedy and sampled, truncated, penalised, biased, with stops and limits."""
    rng = random.Random(seed)
    cases = []
    for _ in range(count):
        values: dict[str, Any] = {
            "max_tokens": rng.randint(1, 24),
            "temperature": rng.choice([0.0, 0.0, 0.7, 1.0, 1.5]),
            "seq_seed": rng.getrandbits(64),
            "logprobs": rng.choice([None, 0, 3]),
        }
        if rng.random() < 0.3:
            values |= {"top_p": rng.choice([0.5, 0.9]), "top_k": rng.choice([-1, 5, 40])}
        if rng.random() < 0.2:
            values["min_p"] = 0.05
        if rng.random() < 0.3:
            values |= {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2}
        if rng.random() < 0.3:
            values["stop_token_ids"] = rng.sample(range(vocab), 30)
            values["min_tokens"] = rng.randint(0, values["max_tokens"] // 2)
        if rng.random() < 0.2:
            values["stop"] = rng.sample(["a", "e", " t", "in", "x"], 2)
        if rng.random() < 0.2:
            values["logit_bias"] = {rng.randrange(vocab): rng.uniform(-5, 5) for _ in range(5)}
        if rng.random() < 0.1:
            values["golden_token_ids"] = [rng.choice([-1, rng.randrange(vocab)]) for _ in range(6)]
        if rng.random() < 0.2:
            values["ignore_eos"] = True
        prompt = [rng.randrange(vocab) for _ in range(rng.randint(1, longest))]
        cases.append(Case(prompt, SamplingParams(**values)))
    return cases


SPECS = (
    Regex(r"[a-c]{2,5}-[0-9]{1,3}"),
    Choice(["yes", "no", "perhaps"]),
    JsonSchema({"type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"]}, whitespace="compact"),
)


def mixed_cases(count: int, seed: int) -> list[Case]:
    """As :func:`random_cases`; every third prompt begins like one of two long texts, every fourth has a grammar."""
    rng = random.Random(seed + 1)
    texts = [[rng.randrange(512) for _ in range(270)] for _ in range(2)]
    cases = []
    for index, (prompt, params) in enumerate((case.prompt, case.params) for case in random_cases(count, seed)):
        if index % 3 == 0:
            prompt = (
                rng.choice(texts)[: rng.choice([100, 118, 125, 128, 129, 250, 256, 270])]
                + prompt[: rng.choice([1, 20])]
            )
        if index % 4 == 0:
            free = {
                "stop": None,
                "stop_token_ids": None,
                "golden_token_ids": None,
                "min_tokens": 0,
                "ignore_eos": False,
            }
            params = SamplingParams.from_dict({**params.to_dict(), **free, "structured": rng.choice(SPECS)})
        cases.append(Case(prompt, params))
    return cases


def summary(output: CompletionOutput) -> tuple[Any, ...]:
    """Everything of an output that must not depend on circumstances."""
    return output.token_ids, output.text, output.finish_reason, output.stop_reason, output.logprobs


def run_alone(engine: Engine, cases: list[Case]) -> list[tuple[Any, ...]]:
    """One request after the other."""
    results = []
    for case in cases:
        engine.add_request(case.prompt, case.params)
        results.append(summary(_drain(engine)[0]))
    return results


def run_crowd(engine: Engine, cases: list[Case], seed: int) -> list[tuple[Any, ...]]:
    """All requests, arriving in random order and at random steps."""
    rng = random.Random(seed)
    order = list(range(len(cases)))
    rng.shuffle(order)
    place: dict[str, int] = {}
    results: dict[int, tuple[Any, ...]] = {}
    while order or engine.has_work():
        while order and rng.random() < 0.5:
            index = order.pop()
            place[engine.add_request(cases[index].prompt, cases[index].params)] = index
        for output in engine.step():
            if output.finished:
                assert output.error is None, output.error
                results[place[output.request_id]] = summary(output.outputs[0])
        engine.check()
    return [results[index] for index in range(len(cases))]


def _drain(engine: Engine) -> list[CompletionOutput]:
    finished = []
    while engine.has_work():
        finished += [output.outputs[0] for output in engine.step() if output.finished]
    engine.check()
    return finished
