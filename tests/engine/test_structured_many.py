"""Requests with random schemas and patterns through the whole engine: every finished output validates."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from deepinfer.errors import RequestError
from deepinfer.sampling.params import SamplingParams
from deepinfer.structured.spec import JsonSchema, Regex, StructuredSpec
from tests.engine.support import make_engine, random_ids
from tests.structured.generators import random_pattern, random_schema

MAX_TOKENS = 48
_ECMA_SPACE = r"(?:\s|\ufeff)"
_CHECKER = jsonschema.Draft202012Validator.FORMAT_CHECKER


def spec_of(seed: int) -> tuple[StructuredSpec, Any]:
    rng = random.Random(seed)
    if seed % 2:
        pattern = random_pattern(rng)
        return Regex(pattern), pattern
    schema = random_schema(rng)
    return JsonSchema(schema), schema


def is_valid(text: str, wanted: Any) -> bool:
    if isinstance(wanted, str):
        return re.fullmatch(wanted.replace(r"\s", _ECMA_SPACE), text) is not None
    jsonschema.Draft202012Validator(wanted, format_checker=_CHECKER).validate(json.loads(text))
    return True


def run_many(path: Path, first: int, count: int) -> tuple[int, int]:
    """How many requests ended on their own, and how many there were. Raises for an output that does not validate."""
    engine = make_engine(path, max_num_seqs=32, num_blocks=80)
    wanted: dict[str, Any] = {}
    finished = 0
    for seed in range(first, first + count):
        spec, meaning = spec_of(seed)
        params = SamplingParams(structured=spec, max_tokens=MAX_TOKENS, temperature=1.0, seq_seed=seed)
        try:
            wanted[engine.add_request(random_ids(4, seed=seed), params)] = meaning
        except RequestError:
            continue  # refused by name before it was queued
    while engine.has_work():
        for output in engine.step():
            if output.finished and output.outputs[0].finish_reason == "stop":
                finished += 1
                meaning = wanted[output.request_id]
                assert is_valid(output.outputs[0].text, meaning), (output.outputs[0].text, meaning)
            elif output.finished:
                assert output.outputs[0].finish_reason in ("length", "invalid_schema", "schema_too_large"), output.error
    engine.check()
    engine.close()
    return finished, len(wanted)


def test_a_sample_validates(tiny_path: Path) -> None:
    finished, queued = run_many(tiny_path, 0, 40)
    assert queued >= 36
    assert finished >= 12


@pytest.mark.slow
def test_two_thousand_requests_validate(tiny_path: Path) -> None:
    finished, queued = run_many(tiny_path, 1000, 2000)
    print(f"{finished} of {queued} requests ended on their own, and all of them validate")
    assert queued >= 1800
    assert finished >= 600
