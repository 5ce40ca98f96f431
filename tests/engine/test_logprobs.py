"""Log-probabilities with speculation against the executable specification."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer.engine.outputs import CompletionOutput
from tests.engine.scripted import ScriptedModel, finish
from tests.engine.support import make_engine, oracle, random_ids

PROMPT = random_ids(20, seed=31)
LENGTH = 12


@pytest.fixture(scope="module")
def greedy(tiny_path: Path) -> CompletionOutput:
    return generate(tiny_path, [], 0, logprobs=0)


def generate(path: Path, known: list[int], num_drafts: int, **params: Any) -> CompletionOutput:
    """A greedy output. ``known`` is what it will be: its drafts are accepted in blocks, but for one in seven."""
    engine = make_engine(path, num_speculative_tokens=num_drafts)
    model = ScriptedModel(engine, wrong_every=7, has_real_target=True)
    values = {"temperature": 0.0, "max_tokens": LENGTH, "ignore_eos": True, **params}
    name = model.submit(PROMPT, known, **values)
    return finish(engine)[name].outputs[0]


@pytest.mark.parametrize("num_top", [None, True, 0, 1, 5, 20])
def test_logprobs_are_those_of_the_specification(
    tiny_path: Path, greedy: CompletionOutput, num_top: bool | int | None
) -> None:
    """D4: the chosen token always, with its true value, and exactly k alternatives, whatever was drafted."""
    output = generate(tiny_path, greedy.token_ids, 4, logprobs=num_top)
    assert output.token_ids == greedy.token_ids
    assert output.num_drafts_accepted >= LENGTH // 2, "blocks have to be accepted, or the test shows nothing"
    if num_top is None:
        assert output.logprobs is None
        return
    assert output.logprobs is not None
    assert len(output.logprobs) == len(output.token_ids) == LENGTH
    ids = PROMPT + output.token_ids[:-1]
    rows = oracle(tiny_path, "faithful").forward(ids).double().log_softmax(-1)[len(PROMPT) - 1 :]
    for token, entry, row in zip(output.token_ids, output.logprobs, rows, strict=True):
        count = int(num_top)
        if num_top is True:
            count = 0
        best = sorted(range(len(row)), key=lambda index: (-float(row[index]), index))[:count]
        assert set(entry) == {token, *best}
        for index, found in entry.items():
            assert found.logprob == pytest.approx(float(row[index]), abs=1e-5)
            assert found.rank == 1 + int((row > row[index]).sum())
    total = sum(entry[token].logprob for token, entry in zip(output.token_ids, output.logprobs, strict=True))
    assert output.cumulative_logprob == pytest.approx(total)


@pytest.mark.parametrize("index", [3, 5])
def test_a_stop_string_inside_a_block_leaves_one_entry_per_token(
    tiny_path: Path, greedy: CompletionOutput, index: int
) -> None:
    """D4: the list ends with the token that completes the stop string, though the block went on."""
    stop = greedy.text[index : index + 2]
    plain = generate(tiny_path, [], 0, logprobs=2, stop=[stop])
    output = generate(tiny_path, greedy.token_ids, 4, logprobs=2, stop=[stop])
    assert (output.token_ids, output.text, output.logprobs) == (plain.token_ids, plain.text, plain.logprobs)
    assert output.logprobs is not None
    assert len(output.logprobs) == len(output.token_ids) < LENGTH
    assert output.finish_reason == "stop"


@pytest.mark.parametrize("params", [{"temperature": 0.7}, {"temperature": 1.0, "logprobs_mode": "raw"}], ids=str)
def test_sampled_tokens_have_the_value_of_their_distribution(tiny_path: Path, params: dict[str, Any]) -> None:
    """D4, sampled: processed values are at the request's temperature, raw ones are the model's own."""
    engine = make_engine(tiny_path, num_speculative_tokens=4)
    model = ScriptedModel(engine, has_real_target=True)
    name = model.submit(PROMPT, [], max_tokens=LENGTH, ignore_eos=True, seq_seed=5, logprobs=0, **params)
    output = finish(engine)[name].outputs[0]
    assert output.logprobs is not None
    logits = oracle(tiny_path, "faithful").forward(PROMPT + output.token_ids[:-1]).double()[len(PROMPT) - 1 :]
    scale = 1.0 if "logprobs_mode" in params else params["temperature"]
    rows = (logits / scale).log_softmax(-1)
    for token, entry, row in zip(output.token_ids, output.logprobs, rows, strict=True):
        assert entry[token].logprob == pytest.approx(float(row[token]), abs=1e-5)
    assert torch.unique(torch.tensor(output.token_ids)).numel() > 3
