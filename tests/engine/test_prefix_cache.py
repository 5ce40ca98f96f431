"""The prefix cache and decoder bounded replay in the whole engine: real rings, real records, real drafts."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer.engine.engine import Engine
from deepinfer.engine.outputs import RequestOutput
from deepinfer.errors import ConfigError, RequestError
from deepinfer.sampling.params import SamplingParams
from deepinfer.structured.spec import Regex
from tests.engine.requests import Case, random_cases, run_alone, run_crowd
from tests.engine.support import make_checkpoint, make_engine, oracle, random_ids
from tests.worker.replay_support import block_bytes, spoil_states

PLAIN: dict[str, Any] = {"prefix_cache": "off", "num_speculative_tokens": 0, "async_scheduling": False}
BLOCK = 128


def generate(engine: Engine, prompt: list[int], max_tokens: int = 8, **params: Any) -> RequestOutput:
    """One greedy request, alone."""
    sampling = SamplingParams(max_tokens=max_tokens, **{"temperature": 0, "ignore_eos": True, **params})
    engine.add_request(prompt, sampling)
    while engine.has_work():
        for output in engine.step():
            if output.finished:
                result = output
    engine.check()
    assert result.error is None
    return result


def tokens_of(output: RequestOutput) -> list[int]:
    return output.outputs[0].token_ids


def forked_cases(count: int, seed: int) -> list[Case]:
    """Requests whose prompts share beginnings of a few texts and leave them anywhere."""
    rng = random.Random(seed)
    texts = [random_ids(270, seed=seed + index) for index in range(2)]
    cases = []
    for case in random_cases(count, seed):
        shared = rng.choice(texts)[: rng.choice([100, 128, 129, 256, 260, 270])]
        cases.append(Case(shared + case.prompt[: rng.choice([0, 1, 20])], case.params))
    grammar = SamplingParams(max_tokens=12, temperature=1.0, seq_seed=7, structured=Regex("[a-c]{2,5}-[0-9]{1,3}"))
    cases.append(Case(cases[0].prompt, grammar))
    return cases


@pytest.fixture(scope="module")
def forked(tiny_path: Path) -> tuple[list[Case], list[Any]]:
    """Requests, and their results one after the other without cache, drafts and asynchrony."""
    cases = forked_cases(6, seed=21)
    engine = make_engine(tiny_path, **PLAIN)
    results = run_alone(engine, cases)
    engine.close()
    return cases, results


# ---- exact -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "rough"),
    [
        ({"num_speculative_tokens": 0, "async_scheduling": False}, False),
        ({"num_speculative_tokens": 4, "max_num_batched_tokens": 200}, False),
        ({"num_speculative_tokens": 4, "num_blocks": 7, "prefix_checkpoints": 3}, True),
        ({"num_speculative_tokens": 2, "prefix_cache": "bounded"}, False),
    ],
    ids=["plain", "drafts", "few blocks", "seeds in a bounded engine"],
)
def test_seeded_outputs_are_those_of_an_empty_cache(
    tiny_path: Path, forked: tuple[list[Case], list[Any]], arguments: dict[str, Any], rough: bool
) -> None:
    cases, expected = forked
    engine = make_engine(tiny_path, **arguments)
    for repeat in range(2 if rough else 1):
        assert run_crowd(engine, cases, seed=repeat) == expected
    prefix = engine.scheduler.prefix
    assert prefix is not None
    assert prefix.statistics.num_cached_tokens > 0
    if rough:
        assert prefix.index.num_evictions > 0
    engine.close()


def test_turn_by_turn_equals_all_at_once(tiny_path: Path) -> None:
    """Known failure C3: recomputed at each token, in one go, and in 4 turns with new tokens between: the same."""
    plain, cached = make_engine(tiny_path, **PLAIN), make_engine(tiny_path, num_speculative_tokens=3)
    history, whole = random_ids(120, seed=1), random_ids(120, seed=1)
    for turn in range(4):
        new = random_ids(30, seed=50 + turn)
        reply = generate(cached, history := history + new, 12)
        history += tokens_of(reply)
        assert reply.num_cached_tokens == (0 if turn == 0 else (len(whole) - 1) // BLOCK * BLOCK)
        whole += new
        whole += tokens_of(generate(plain, whole, 12))
        assert history == whole
    model = oracle(tiny_path, "faithful")
    with torch.no_grad():
        assert int(model.forward(whole[:-1])[-1].argmax()) == whole[-1]


@pytest.mark.parametrize("policy", ["exact", "bounded"])
@pytest.mark.parametrize("extra", [0, 1, 15, 17])
def test_hit_after_another_request_used_the_slot(tiny_path: Path, policy: str, extra: int) -> None:
    """Known failure P1: A, then B = A and a few tokens, then B again after another request and rings full of NaN."""
    engine = make_engine(tiny_path, prefix_cache=policy, max_num_seqs=1, num_speculative_tokens=3)
    first = random_ids(256, seed=3)
    second = first + random_ids(1 + extra, seed=4)
    generate(engine, first, 3)
    one = generate(engine, second, 6)
    generate(engine, random_ids(140, seed=5), 6)
    for slot in range(1, engine.runner.caches.geometry.num_slots):
        spoil_states(engine, slot)
    two = generate(engine, second, 6)
    assert two.num_cached_tokens == 256
    assert tokens_of(two) == tokens_of(one)
    if policy == "exact":
        cold = generate(make_engine(tiny_path, **{**PLAIN, "num_speculative_tokens": 3}), second, 6)
        assert tokens_of(one) == tokens_of(cold)
        steps = [(each.outputs[0].num_steps, each.outputs[0].num_drafts_accepted) for each in (one, two, cold)]
        assert steps[0] == steps[1] == steps[2], "the draft's rings came back, too"


# ---- bounded -----------------------------------------------------------------------------------------------------


def test_bounded_hit_is_that_of_the_specification(tiny_path: Path) -> None:
    engine = make_engine(tiny_path, **{**PLAIN, "prefix_cache": "bounded"})
    prompt = random_ids(2 * BLOCK + 7, seed=6)
    generate(engine, prompt, 1)
    prefix = engine.scheduler.prefix
    assert prefix is not None
    blocks = [entry.block for entry in prefix.index._by_key.values()]
    before = {block: block_bytes(engine, block) for block in blocks}
    result = generate(engine, prompt, 1, logprobs=0)
    assert result.num_cached_tokens == 2 * BLOCK
    with torch.no_grad():
        logits = oracle(tiny_path, "faithful").forward(prompt, prefix_hit=2 * BLOCK)[-1]
    assert tokens_of(result) == [int(logits.argmax())]
    for block in blocks:
        for old, new in zip(before[block], block_bytes(engine, block), strict=True):
            assert torch.equal(old, new), "replayed rows wrote into cached blocks"


def test_bounded_hit_inside_the_first_window_is_exact(tmp_path: Path) -> None:
    """The window is longer than the hit, so nothing is missing from it."""
    path = make_checkpoint(tmp_path / "wide", sliding_window=160)
    engine = make_engine(path, prefix_cache="bounded", num_speculative_tokens=0)
    prompt = random_ids(BLOCK + 9, seed=7)
    cold = generate(engine, prompt)
    warm = generate(engine, prompt)
    assert warm.num_cached_tokens == BLOCK
    assert tokens_of(warm) == tokens_of(cold)


# ---- what may be read --------------------------------------------------------------------------------------------


def test_prompt_logprobs_are_complete_in_spite_of_the_cache(tiny_path: Path) -> None:
    engine, prompt = make_engine(tiny_path), random_ids(140, seed=8)
    cold = generate(engine, prompt, prompt_logprobs=0)
    again = generate(engine, prompt, prompt_logprobs=0)
    assert again.prompt_logprobs == cold.prompt_logprobs
    assert again.prompt_logprobs is not None
    assert len(again.prompt_logprobs) == 140
    assert again.num_cached_tokens == 0
    assert generate(engine, prompt).num_cached_tokens == BLOCK


def test_salts_keep_tenants_apart(tiny_path: Path) -> None:
    engine, prompt = make_engine(tiny_path, num_speculative_tokens=0), random_ids(140, seed=9)
    found = []
    for salt in ("a", "b", "a"):
        engine.add_request(prompt, SamplingParams(max_tokens=1), cache_salt=salt)
        while engine.has_work():
            found += [output.num_cached_tokens for output in engine.step() if output.finished]
    assert found == [0, 0, BLOCK]


def test_outputs_of_one_request_compute_its_prompt_once(tiny_path: Path) -> None:
    engine, prompt = make_engine(tiny_path, num_speculative_tokens=0), random_ids(200, seed=10)
    generate(engine, prompt, n=4)
    assert engine.statistics.num_prefill_tokens == 200 + 3 * (200 - BLOCK)


def test_results_of_a_failed_step_are_not_cached(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, prompt = make_engine(tiny_path, num_speculative_tokens=0), random_ids(300, seed=12)
    forward = engine.runner.model.forward

    def fail(*_args: Any) -> Any:
        raise RuntimeError("simulated")

    monkeypatch.setattr(engine.runner.model, "forward", fail)
    engine.add_request(prompt, SamplingParams(max_tokens=1))
    while engine.has_work():
        engine.step()
    monkeypatch.setattr(engine.runner.model, "forward", forward)
    assert generate(engine, prompt).num_cached_tokens == 0
    assert generate(engine, prompt).num_cached_tokens == 2 * BLOCK


def test_hit_statistics_are_logged(tiny_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine(tiny_path, num_speculative_tokens=0, logging_interval_steps=1)
    prompt = random_ids(160, seed=13)
    generate(engine, prompt, 2)
    with caplog.at_level(logging.INFO):
        generate(engine, prompt, 2)
    assert "prefix cache 128 of 160 prompt tokens (80 %)" in caplog.text


# ---- decoder bounded replay --------------------------------------------------------------------------------------


def test_mask_and_compact_generate_the_same_tokens(tiny_path: Path) -> None:
    prompts = [random_ids(length, seed=3) for length in (5, 60, 140)]
    results = []
    for truncation, cache, size, drafts in (
        ("mask", "off", 512, 0),
        ("compact", "off", 40, 0),
        ("compact", "exact", 40, 4),
    ):
        engine = make_engine(
            tiny_path,
            prefill_truncation=truncation,
            prefill_keep_tokens=24,
            prefix_cache=cache,
            max_num_batched_tokens=size,
            num_speculative_tokens=drafts,
        )
        results += [[tokens_of(generate(engine, prompt, 5)) for prompt in prompts] for _ in range(1 + (cache != "off"))]
    assert all(result == results[0] for result in results)
    off = make_engine(tiny_path, **PLAIN)
    assert tokens_of(generate(off, prompts[0], 5)) == results[0][0], "a prompt that is kept whole is not truncated"
    assert [tokens_of(generate(off, prompt, 5)) for prompt in prompts[1:]] != results[0][1:]


def test_truncated_prompt_continues_as_the_specification_says(tiny_path: Path) -> None:
    keep = 26
    engine = make_engine(
        tiny_path, prefill_truncation="compact", prefill_keep_tokens=keep, max_num_batched_tokens=50, max_num_seqs=4
    )
    prompt = random_ids(150, seed=14)
    tokens = tokens_of(generate(engine, prompt, 8))
    with torch.no_grad():
        logits = oracle(tiny_path, "faithful").forward(prompt + tokens[:-1], decoder_keep=keep + 7)
    assert tokens == logits[149:].argmax(1).tolist()


def test_preemption_of_truncated_requests_changes_nothing(tiny_path: Path) -> None:
    cases = [
        Case(random_ids(120 + index, seed=index), SamplingParams(max_tokens=12, temperature=0.8, seq_seed=index))
        for index in range(4)
    ]
    truncation = {"prefill_truncation": "compact", "prefill_keep_tokens": 24}
    expected = run_alone(make_engine(tiny_path, **{**PLAIN, **truncation}), cases)
    for cache in ("off", "exact"):
        engine = make_engine(tiny_path, num_blocks=6, prefix_cache=cache, num_speculative_tokens=3, **truncation)
        assert run_crowd(engine, cases, seed=1) == expected
        assert engine.scheduler.num_preemptions > 0


def test_turns_behind_truncated_prompts_equal_a_cold_run(tiny_path: Path) -> None:
    truncation = {"prefill_truncation": "compact", "prefill_keep_tokens": 24}
    cached = make_engine(tiny_path, num_speculative_tokens=3, **truncation)
    cold = make_engine(tiny_path, **{**PLAIN, **truncation})
    history, found = random_ids(140, seed=15), []
    for turn in range(3):  # each turn adds more tokens than are kept, so the state before it is of use
        history += random_ids(60, seed=70 + turn)
        reply = generate(cached, history, 10)
        found.append(reply.num_cached_tokens)
        assert tokens_of(reply) == tokens_of(generate(cold, history, 10))
        history += tokens_of(reply)
    assert found == [0, BLOCK, 2 * BLOCK]


def test_prompt_logprobs_are_refused_with_truncation(tiny_path: Path) -> None:
    engine = make_engine(tiny_path, prefill_truncation="compact", prefill_keep_tokens=24)
    with pytest.raises(RequestError, match=r"prompt_logprobs.*last 24 prompt tokens.*prefill_truncation=off"):
        engine.add_request([1, 2, 3], SamplingParams(prompt_logprobs=1))
    assert not engine.has_work()


def test_too_few_kept_tokens_stop_the_start(tiny_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"prefill_keep_tokens is 21.*16 \+ 6 = 22"):
        make_engine(tiny_path, prefill_truncation="compact", prefill_keep_tokens=21)
    with pytest.raises(ConfigError, match="prefill_keep_tokens is 0"):
        make_engine(tiny_path, prefill_truncation="mask")
    make_engine(tiny_path, prefill_keep_tokens=3)  # of no consequence while the mode is off


# ---- the first compressed entries --------------------------------------------------------------------------------


@pytest.mark.parametrize("length", range(1, 7))
def test_first_entries_are_written_and_used(tiny_path: Path, length: int) -> None:
    """Known failure C2: prompts around the compress ratio, alone and in a batch of several lengths."""
    engine = make_engine(tiny_path, num_speculative_tokens=0)
    prompt = random_ids(length, seed=length)
    tokens = tokens_of(generate(engine, prompt, 6))
    with torch.no_grad():
        logits = oracle(tiny_path, "faithful").forward(prompt + tokens[:-1])
    assert tokens == logits[length - 1 :].argmax(1).tolist()
    num_rows = length + 5
    for plan, layer in zip(engine.model_config.text.layers, engine.runner.caches.layers, strict=True):
        if layer.entries is not None:
            (block,) = [at for at in range(1, 64) if layer.entries.data.unflatten(0, (64, -1))[at].any()]
            entries = layer.entries.read(torch.arange(num_rows // plan.ratio) + block * BLOCK // plan.ratio)
            assert torch.isfinite(entries).all()
            assert entries.abs().sum(1).min() > 0
