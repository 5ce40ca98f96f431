"""On a GPU: the fused path gives the CPU's tokens, a graph what its launches give, and nobody sees his neighbours.

Run with ``pytest -m gpu tests/gpu``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import deepinfer
from deepinfer import LLM
from deepinfer.engine.engine import Engine
from deepinfer.messages import StepPlan
from deepinfer.sampling.params import SamplingParams
from tests.engine.requests import random_cases, run_crowd
from tests.engine.support import chunk_of, logits_in_pieces, make_engine, random_ids

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MODEL = Path(deepinfer.__file__).parent / "data" / "tiny_v41"
TIE = 2**-6
"""Of the largest logit: what the last roundings of a few layers can move."""


def nvidia(path: Path, **arguments: Any) -> Engine:
    engine = make_engine(path, accelerator="nvidia", num_speculative_tokens=0, **arguments)
    assert type(engine.runner).__name__ == "FusedRunner"
    return engine


def greedy(engine: Engine, prompt: list[int], count: int) -> list[int]:
    engine.add_request(prompt, SamplingParams(temperature=0, max_tokens=count, ignore_eos=True))
    while engine.has_work():
        for output in engine.step():
            if output.finished:
                assert output.error is None, output.error
                tokens: list[int] = output.outputs[0].token_ids
    return tokens


def explain(engine: Engine, prompt: list[int], expected: list[int], found: list[int]) -> None:
    """Tokens are equal, or where they part the CPU's own two best logits are a rounding apart."""
    if expected == found:
        return
    place = next(index for index, pair in enumerate(zip(expected, found, strict=True)) if pair[0] != pair[1])
    ids = prompt + expected[:place]
    logits = engine.runner.run(StepPlan(0, (chunk_of(ids, 0, len(ids), (3, 1, 2), 2),))).sample_logits()[-1]
    gap = float(logits[expected[place]] - logits[found[place]])
    assert 0 <= gap < TIE * float(logits.abs().max()), f"token {place}: {expected[place]} -> {found[place]}, {gap=}"


@pytest.mark.parametrize("name", ["s1_basic", "s2_real_heads"])
def test_golden_cases(golden_dir: Path, name: str) -> None:
    golden: dict[str, Any] = dict(np.load(golden_dir / f"{name}.npz"))
    prompt = golden["prompt_ids"].tolist()
    cpu = make_engine(golden_dir / name, max_model_len=256, num_speculative_tokens=0)
    expected = greedy(cpu, prompt, 24)
    explain(cpu, prompt, expected, greedy(nvidia(golden_dir / name, max_model_len=256), prompt, 24))


def moved_reference(path: Path) -> Engine:
    """The reference with the last bit of one embedding value in a hundred turned over."""
    engine = make_engine(path, num_speculative_tokens=0)
    model: Any = engine.runner.model  # type: ignore[attr-defined]
    torch.manual_seed(0)
    turned = (torch.rand(model.embedding.shape) < 0.01).to(torch.int16)
    model.embedding = (model.embedding.view(torch.int16) ^ turned).view(torch.bfloat16)
    return engine


def test_logits_near_the_reference(path: Path) -> None:
    """A float32 sum may fall on the other side of a rounding; behind it random layers amplify what moved. They do so to
    last bits of the embedding, too: that is the measure."""
    ids = random_ids(150)
    expected = logits_in_pieces(make_engine(path, num_speculative_tokens=0), ids, [150])

    def compare(found: torch.Tensor) -> tuple[float, float]:
        error = ((found - expected).norm(dim=1) / expected.norm(dim=1)).median()
        return float(error), float((found.argmax(-1) == expected.argmax(-1)).float().mean())

    most_error, least_agreement = compare(logits_in_pieces(moved_reference(path), ids, [150]))
    engine = nvidia(path)
    for sizes in ([150], [64, 1, 1, 6, 78]):
        error, agreement = compare(logits_in_pieces(engine, ids, sizes, slot=4).cpu())
        assert error < most_error, f"{sizes}: {error:.4f}"
        assert agreement > least_agreement, f"{sizes}: {agreement:.3f}"


def test_trained_model_gives_the_same_answers() -> None:
    """The shipped model is sure of what it says, so roundings move no token of its answers."""
    questions = ["What is 123 + 456?", "What is 907 + 85?", "What is 614 + 277?", "What is 350 + 49?"]
    chats = [[{"role": "user", "content": question}] for question in questions]
    params = SamplingParams(temperature=0, max_tokens=24)
    texts = {}
    for accelerator in ("cpu", "nvidia"):
        with LLM(
            MODEL, accelerator=accelerator, num_speculative_tokens=0, max_model_len=512, max_num_seqs=4, num_blocks=64
        ) as llm:
            texts[accelerator] = [output.outputs[0].text for output in llm.chat(chats, params)]
    assert all(texts["cpu"])
    assert texts["nvidia"] == texts["cpu"]


def test_graph_equals_launches(path: Path) -> None:
    ids = random_ids(140)
    engine = nvidia(path)
    with_graphs = logits_in_pieces(engine, ids, [100, *[1] * 20, 3, 5, 6, 6])
    engine.runner.graphs = engine.runner.prompt_graphs = None  # type: ignore[attr-defined]
    assert torch.equal(with_graphs, logits_in_pieces(engine, ids, [100, *[1] * 20, 3, 5, 6, 6], slot=5))


def test_graph_of_a_prompt_equals_its_launches(path: Path) -> None:
    """Batch-invariant, since a graph has padding and scores every row of the index on its own."""
    ids, pieces = random_ids(370), [1, 9, 30, 47, 100, 150, 16, 17]
    engine = nvidia(path, batch_invariant=True)
    graphs = engine.runner.prompt_graphs.graphs  # type: ignore[attr-defined]
    num_before = graphs.num_replays
    with_graphs = logits_in_pieces(engine, ids, pieces)
    assert graphs.num_replays == num_before + 7
    engine.runner.prompt_graphs = None  # type: ignore[attr-defined]
    assert torch.equal(with_graphs, logits_in_pieces(engine, ids, pieces, slot=5))


def test_unused_cache_full_of_nan(path: Path) -> None:
    ids = random_ids(150)
    clean = logits_in_pieces(nvidia(path), ids, [140, *[1] * 10])
    engine = nvidia(path)
    for layer in engine.runner.caches.layers:
        for store in (layer.window, layer.entries, layer.index_keys):
            if store is not None:
                store.data.fill_(0xFF)
        if layer.pairs is not None:
            layer.pairs.fill_(torch.nan)
    assert torch.equal(clean, logits_in_pieces(engine, ids, [140, *[1] * 10]))


def test_invariant_mode_knows_no_schedule(path: Path) -> None:
    """Any order of arrival, any chunking, synchronous or chained: the same outputs to the last log-probability."""
    cases = random_cases(12, seed=2)
    expected = run_crowd(nvidia(path, batch_invariant=True, async_scheduling=False), cases, seed=1)
    assert run_crowd(nvidia(path, batch_invariant=True), cases, seed=3) == expected


def test_speculation_changes_no_token(path: Path) -> None:
    prompts = [random_ids(10 + 7 * number, seed=number) for number in range(4)]
    plain = [greedy(nvidia(path), prompt, 20) for prompt in prompts]
    engine = make_engine(path, accelerator="nvidia", num_speculative_tokens=4, adaptive_verification=False)
    same = [greedy(engine, prompt, 20) == expected for prompt, expected in zip(prompts, plain, strict=True)]
    # Rows of a verification step go through kernels for more rows, whose sums round differently.
    assert sum(same) >= 3, same


def speculating(path: Path, **arguments: Any) -> Engine:
    """An engine that drafts in every step."""
    engine = make_engine(
        path, accelerator="nvidia", **{"num_speculative_tokens": 4, "adaptive_verification": False, **arguments}
    )
    assert type(engine.worker.drafter).__name__ == "FusedDrafter"
    return engine


def test_speculation_changes_no_greedy_token_in_invariant_mode(path: Path) -> None:
    """There rows of a verification step are computed as they are alone, so nothing is left to roundings."""
    prompts = [random_ids(10 + 7 * number, seed=number) for number in range(6)]
    plain = [greedy(nvidia(path, batch_invariant=True), prompt, 24) for prompt in prompts]
    engine = speculating(path, batch_invariant=True)
    assert [greedy(engine, prompt, 24) for prompt in prompts] == plain
    # And in a crowd, where the graphs of both kinds have padding.
    names = [engine.add_request(p, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)) for p in prompts]
    done = {}
    while engine.has_work():
        done.update({output.request_id: output.outputs[0].token_ids for output in engine.step() if output.finished})
    assert [done[name] for name in names] == plain
    graphs = engine.worker.drafter.step.graphs  # type: ignore[union-attr]
    assert graphs.num_replays > 20
    assert engine.runner.graphs.graphs.num_replays > 20  # type: ignore[attr-defined]


def run_mixed(engine: Engine, requests: int) -> None:
    """Requests with mixed settings that come one by one and go one by one."""
    for number in range(requests):
        values: dict[str, Any] = {"temperature": (0.0, 1.0, 2.0)[number % 3], "top_p": (1.0, 0.8)[number % 2]}
        params = SamplingParams(max_tokens=6 + 3 * number, seq_seed=number, ignore_eos=True, **values)
        engine.add_request(random_ids(5 + 9 * number, seed=number), params)
        engine.step()
    while engine.has_work():
        assert not any(output.error for output in engine.step())


def drafts_of(engine: Engine, requests: int, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What a drafter is asked for while some requests run, and what it answers: (table, verified, drafts)."""
    step, found = engine.worker.drafter.step, []  # type: ignore[union-attr]
    draft = step.draft

    def noted(table: np.ndarray, verified: Any, choose: Any = None, firsts: Any = None) -> Any:
        outputs = draft(table, verified, choose, firsts)
        rings = [layer.window.data.clone() for layer in engine.runner.caches.draft]
        launched = None
        if choose is None:  # the inputs are still filled in: the same function, launch by launch
            launched = step.run(step.graphs.size_for(table.shape[1]))
        found.append((table, [each.clone() for each in outputs], launched))
        for layer, ring in zip(engine.runner.caches.draft, rings, strict=True):
            assert torch.equal(layer.window.data, ring)
        return outputs

    monkeypatch.setattr(step, "draft", noted)
    run_mixed(engine, requests)
    return found


def test_graph_equals_launches_for_the_draft(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every batch from 1 to 5 sequences, padded or not, with mixed settings: bit for bit. No ring changes."""
    found = drafts_of(speculating(path), 5, monkeypatch)
    assert {table.shape[1] for table, _, _ in found} == {1, 2, 3, 4, 5}
    for table, outputs, launched in found:
        assert launched is not None
        for one, other in zip(outputs, launched, strict=True):
            assert torch.equal(one, other[: table.shape[1]])
            assert one.isfinite().all()


@pytest.mark.parametrize("speculates", [False, True])
def test_graph_equals_launches_for_the_sampler(path: Path, monkeypatch: pytest.MonkeyPatch, speculates: bool) -> None:
    """Of every batch from 1 to 5 sequences, padded or not, with mixed settings: bit for bit."""
    engine = speculating(path) if speculates else nvidia(path)
    step = engine.worker.sample_step
    assert step is not None
    sample, counts = step.sample, []

    def checked(sampling: Any) -> Any:
        found = sample(sampling)
        assert found is not None
        verified, sampled = found
        count, rows = len(sampling.chunks), sampling.num_rows
        before = [each.clone() for each in (verified.token_ids, verified.num_accepted, verified.is_bad, *sampled)]
        state = [getattr(engine.runner.device_tokens, name).clone() for name in ("newest", "next_position")]
        again = step.run(sampling.step.result.graph_size)  # the inputs are still filled in
        parts = again.token_ids[:count], again.num_accepted[:count], again.is_bad[:count]
        after = *parts, again.positions[:rows], again.firsts[:count], again.drafts[:count]
        for one, other in zip(before, after, strict=True):
            assert torch.equal(one, other)
        for name, one in zip(("newest", "next_position"), state, strict=True):
            assert torch.equal(getattr(engine.runner.device_tokens, name)[1:], one[1:]), name
        counts.append(count)
        return found

    monkeypatch.setattr(step, "sample", checked)
    run_mixed(engine, 5)
    assert set(counts) == {1, 2, 3, 4, 5}


def test_no_request_waits_for_a_compiler(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What prompts and decoding launch is there when the engine is, on a machine that has compiled nothing yet (but for
    Triton's kernels that earlier tests of the process had). The index kernels that stand in where the CUDA ones do not
    take a model's widths, as they do not here, are compiled apart by widths of tables."""
    from triton.runtime.jit import JITFunction

    from deepinfer.kernels import nvrtc

    compiled, of_triton, of_cuda = list[str](), JITFunction._do_compile, nvrtc._compile

    def noted(self: Any, *arguments: Any) -> Any:
        compiled.append(self.fn.__name__)
        return of_triton(self, *arguments)

    def noted_cuda(*arguments: Any) -> Any:
        compiled.append(arguments[2])
        return of_cuda(*arguments)

    monkeypatch.setattr(nvrtc, "_cache_directory", tmp_path)
    monkeypatch.setattr(nvrtc, "_compiled", {})
    nvrtc._load.cache_clear()
    monkeypatch.setattr(JITFunction, "_do_compile", noted)
    monkeypatch.setattr(nvrtc, "_compile", noted_cuda)
    engine = nvidia(path)
    assert sum(name.endswith(".cu") for name in compiled) > 10
    compiled.clear()
    for length in (5, 37, 100, 250, 333):
        greedy(engine, random_ids(length), 4)
    assert not set(compiled) - {"_score_chunks_kernel", "_score_rows_kernel", "_publish_entries_kernel"}


def test_chained_steps_with_drafts_are_those_that_wait(path: Path) -> None:
    """The same outputs to the last log-probability, and most steps are launched before the one before is read."""
    cases = random_cases(14, seed=8)
    expected = run_crowd(speculating(path, batch_invariant=True, async_scheduling=False), cases, seed=1)
    engine = speculating(path, batch_invariant=True)
    assert run_crowd(engine, cases, seed=3) == expected
    waits, sample = [], engine.worker.sample
    engine.worker.sample = lambda *arguments: waits.append(0) or sample(*arguments)  # type: ignore[method-assign, func-returns-value]
    free = [case for case in cases if not case.params.uses_penalties and not case.params.golden_token_ids]
    wanted = [output for case, output in zip(cases, expected, strict=True) if case in free]
    assert len(free) > 4
    assert run_crowd(engine, free, seed=4) == wanted
    assert not waits


def test_following_drafts_are_those_behind_the_host(path: Path) -> None:
    """Drafting before the host has seen the accepted tokens changes neither outputs nor acceptance."""
    cases = random_cases(10, seed=5)
    engine, waiting = speculating(path, batch_invariant=True), speculating(path, batch_invariant=True)
    waiting.worker.drafter.can_follow = lambda *_: False  # type: ignore[union-attr, method-assign]
    assert run_crowd(engine, cases, seed=4) == run_crowd(waiting, cases, seed=4)
    accepted = [each.statistics.speculation.report().acceptance_rate for each in (engine, waiting)]
    assert accepted[0] == pytest.approx(accepted[1], abs=0.05)


@pytest.mark.parametrize("mode", ["startup", "lazy", "off"])
def test_a_failed_capture_still_serves(
    path: Path, mode: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A wait inside a capture invalidates it. That size is launched, others are captured, nothing else is hurt."""
    from deepinfer.models.fused_dspark import FusedDSpark
    from deepinfer.worker.fused_runner import FusedRunner
    from deepinfer.worker.sample_step import SampleStep

    prompts = [random_ids(10 + 7 * number, seed=number) for number in range(3)]
    expected = [greedy(speculating(path, batch_invariant=True), prompt, 16) for prompt in prompts]
    forward, draft, sample = FusedRunner.forward, FusedDSpark.draft, SampleStep.run

    def breaking(self: Any, step: Any) -> Any:
        if torch.cuda.is_current_stream_capturing() and step.rows.num_rows == 8:
            torch.cuda.synchronize()
        return forward(self, step)

    def breaking_draft(self: Any, newest: torch.Tensor, *more: Any) -> Any:
        if torch.cuda.is_current_stream_capturing() and len(newest) == 1:
            newest.sum().item()
        return draft(self, newest, *more)

    def breaking_sample(self: Any, size: int) -> Any:
        if torch.cuda.is_current_stream_capturing() and size == 32:
            torch.cuda.synchronize()
        return sample(self, size)

    monkeypatch.setattr(SampleStep, "run", breaking_sample)
    monkeypatch.setattr(FusedRunner, "forward", breaking)
    monkeypatch.setattr(FusedDSpark, "draft", breaking_draft)
    engine = speculating(path, batch_invariant=True, cuda_graphs=mode)
    assert [greedy(engine, prompt, 16) for prompt in prompts] == expected
    names = [engine.add_request(p, SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)) for p in prompts]
    done = {}
    while engine.has_work():
        for output in engine.step():
            if output.finished:
                assert output.error is None
                done[output.request_id] = output.outputs[0].token_ids
    assert [done[name] for name in names] == expected
    told = [record.getMessage() for record in caplog.records if "no CUDA graph" in record.getMessage()]
    if mode == "off":
        assert engine.runner.graphs is None  # type: ignore[attr-defined]
        assert not told
        return
    assert sum("backbone for size 8" in line for line in told) == 1  # five rows of a sequence are padded to eight
    assert sum("draft for size 1" in line for line in told) == 1
    at_start = mode == "startup"  # no step has so many rows
    assert sum("sampler for size 32" in line for line in told) == at_start
    assert len(told) == 2 + at_start  # nobody tries the sampler of size 8, behind no forward
    assert engine.worker.sample_step.graphs.num_replays > 5  # type: ignore[union-attr]
    assert engine.worker.drafter.step.graphs.num_replays > 5  # type: ignore[union-attr]
    assert engine.runner.graphs.graphs.num_replays > 5  # type: ignore[attr-defined]
    torch.rand(3, device="cuda").sum().item()  # torch's own state is back, too


def test_batch_invariance(path: Path) -> None:
    """In batch-invariant mode a row is the same alone, among 7 and among 200."""
    prompts = [random_ids(5 + number % 90, seed=number) for number in range(200)]
    params = [SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0) for _ in prompts]

    def run(indices: list[int]) -> dict[int, Any]:
        engine = nvidia(path, batch_invariant=True, max_num_seqs=200, num_blocks=600)
        place = {engine.add_request(prompts[index], params[index]): index for index in indices}
        found = {}
        while engine.has_work():
            for output in engine.step():
                if output.finished:
                    entries = output.outputs[0].logprobs or []
                    found[place[output.request_id]] = (output.outputs[0].token_ids, [str(entry) for entry in entries])
        return found

    crowd = run(list(range(200)))
    few = run(list(range(7)))
    for index in range(7):
        assert few[index] == crowd[index]
    assert run([3])[3] == crowd[3]
