"""What an engine compiles at its start covers what requests launch, on a CPU: launches are recorded in place of run."""

from __future__ import annotations

import importlib.util
import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

from deepinfer.checkpoint.device_loader import DeviceLoader
from deepinfer.checkpoint.reader import open_checkpoint
from deepinfer.config.scheduler import SchedulerConfig
from deepinfer.messages import StepPlan
from deepinfer.sampling.params import SamplingParams
from deepinfer.sampling.state import SamplingState
from deepinfer.worker.graph_set import GraphPool
from deepinfer.worker.warm_up import null_prompts
from tests.engine.support import chunk_of, make_checkpoint, make_engine, random_ids
from tests.worker.launch_recorder import Recorder
from tests.worker.test_launch_order import WIDTHS

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="launches are recorded in place of the interpreter"),
]
MOST = 2600
BLOCKS = tuple(range(1, 25))
Key = tuple[str, tuple[Any, ...]]


LENGTHS = (2, 3, 5, 9, 14, 17, 30, 50, 70, 100, 129, 170, 200, 250, 300, 350, 400, 500, 520, 531, 600, 700, 1100, 2501)
SIZES = (1, 4, 16)


@contextmanager
def only_noting(name: str, show_progress: bool) -> Iterator[None]:
    """In the place of ``compiling``, without compiling."""
    from deepinfer.kernels import nvrtc

    with nvrtc.noting(lambda compilation: None):
        yield


@contextmanager
def hostile_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """New memory holds numbers that are no index of anything, as it may where nothing has run. A CPU says if they are
    used as one; a GPU would end the process."""

    def filled(make: Any) -> Any:
        def run(*arguments: Any, **named: Any) -> torch.Tensor:
            tensor: torch.Tensor = make(*arguments, **named)
            if tensor.dtype.is_floating_point and tensor.element_size() > 1:
                tensor.fill_(torch.nan)
            elif tensor.dtype in (torch.int16, torch.int32, torch.int64, torch.uint8):
                tensor.fill_(torch.iinfo(tensor.dtype).max)
            return tensor

        return run

    with monkeypatch.context() as patch:
        for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
            patch.setattr(owner, name, filled(getattr(owner, name)))
        yield


def triton_key(kernel: Any, values: tuple[Any, ...], named: dict[str, Any]) -> Key:
    """What Triton compiles apart: types, constants, and of numbers and addresses whether they are multiples of 16."""
    free = kernel.kwargs.get("do_not_specialize") or ()
    arguments = dict(zip(kernel.arg_names, values, strict=False)) | named
    constants = {
        name for name, parameter in inspect.signature(kernel.fn).parameters.items() if "constexpr" in str(parameter)
    }
    found: list[Any] = []
    for name, value in sorted(arguments.items()):
        if isinstance(value, torch.Tensor):
            found.append((name, value.dtype, value.data_ptr() % 16 == 0))
        elif name in constants or not isinstance(value, int) or isinstance(value, bool):
            found.append((name, value))
        elif name not in free:
            found.append((name, value == 1, value % 16 == 0))
    return kernel.fn.__name__, tuple(found)


@contextmanager
def recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_drafts: int = 0, sizes: tuple[int, ...] = SIZES
) -> Iterator[tuple[Any, set[Key]]]:
    """A runner with graphs to capture whose launches do nothing, and what they were of."""
    from triton.runtime import interpreter

    from deepinfer.kernels import nvrtc
    from deepinfer.models.fused_loading import load_fused, load_fused_draft
    from deepinfer.worker import draft_step, fused_runner, sample_step

    path = make_checkpoint(tmp_path / "model", max_position_embeddings=4096, **WIDTHS)
    engine = make_engine(path, num_speculative_tokens=0, num_blocks=250, max_num_seqs=64, max_model_len=3000)
    for module in (fused_runner, sample_step, draft_step):
        monkeypatch.setattr(module, "compiling", only_noting)
    monkeypatch.setattr("deepinfer.kernels.moe.experts_hopper.is_usable", lambda *_: True)
    recorder = Recorder()
    with recorder.installed(monkeypatch), monkeypatch.context() as patch:  # undone before what the recorder set
        load_kernel, loaded = nvrtc.load_kernel, set[Key]()

        def noted(source: str, entry: str, defines: dict[str, int], *more: Any, **named: Any) -> Any:
            loaded.add((entry, tuple(sorted(defines.items()))))
            return load_kernel(source, entry, defines, *more, **named)

        def launcher(kernel: Any, _: object) -> Any:
            return lambda *values, **named: loaded.add(triton_key(kernel, values, named))

        patch.setattr(nvrtc, "load_kernel", noted)
        patch.setattr(interpreter.InterpretedFunction, "__getitem__", launcher)
        config, cpu = engine.model_config, torch.device("cpu")
        loader = DeviceLoader(open_checkpoint(path, parts=("text", "draft"), config=config), cpu)
        model = load_fused(config, loader, cpu, precision="faithful", max_rows=4096)
        draft = load_fused_draft(model, loader, "faithful") if num_drafts else None
        runner = fused_runner.FusedRunner(
            config.text, model, engine.runner.caches.geometry, cpu, draft=draft, graph_sizes=sizes,
            draft_sizes=(1, 3) if num_drafts else (), max_blocks=24, num_drafts=num_drafts,
        )  # fmt: skip
        loaded.clear()
        run, mark = runner.run, recorder.mark()

        def run_and_forget(plan: StepPlan) -> Any:
            result = run(plan)
            recorder.forget(mark)
            return result

        monkeypatch.setattr(runner, "run", run_and_forget)
        yield runner, loaded


@pytest.mark.parametrize(("keep", "sizes"), [(0, SIZES), (100, (1,))])
def test_prompts_launch_what_was_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: int, sizes: tuple[int, ...]
) -> None:
    with recorded(tmp_path, monkeypatch, sizes=sizes) as (runner, loaded):
        graphs = runner.graphs
        with hostile_memory(monkeypatch):
            runner.compile_kernels(null_prompts(MOST, keep, runner.row_limits), show_progress=False)
        assert runner.graphs is graphs
        assert not any(graphs.graphs.is_captured(size) for size in sizes)
        compiled = set(loaded)
        assert len({entry for entry, _ in compiled}) > 8
        runner.graphs = None
        ids = random_ids(2600)
        prompts = [
            chunk_of(ids, 0, count, BLOCKS, 3, "p")._replace(num_sampled=1, decoder_floor=keep and max(0, count - keep))
            for count in LENGTHS
        ]
        prompts.append(chunk_of(ids, 0, MOST, BLOCKS, 3, "p")._replace(num_sampled=0, decoder_floor=keep and 4000))
        for prompt in prompts:
            loaded.clear()
            runner.run(StepPlan(0, (prompt,)))
            assert loaded
            assert loaded <= compiled, (prompt.num_rows, loaded - compiled)
        for count, rows in ((20, 1), (60, 6), (60, 10), (60, 30)):  # verification that no graph is large enough for
            chunks = [chunk_of(ids, 500, rows, BLOCKS, slot, str(slot)) for slot in range(count)]
            loaded.clear()
            runner.run(StepPlan(0, tuple(chunk._replace(is_prefill=False, num_sampled=rows) for chunk in chunks)))
            assert loaded
            assert loaded <= compiled, (count, rows, loaded - compiled)
        for size in sizes:
            loaded.clear()
            graphs.launch(size)
            assert loaded
            assert loaded <= compiled


def test_sampler_and_draft_are_noted_before_they_are_captured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from deepinfer.kernels import nvrtc
    from deepinfer.sampling.device_choice import DeviceChoice
    from deepinfer.worker.draft_step import DraftStep
    from deepinfer.worker.sample_step import SampleStep

    noted: set[Key] = set()
    with recorded(tmp_path, monkeypatch, num_drafts=5) as (runner, loaded):

        def capture(pool: GraphPool, run: Any) -> tuple[Any, Any]:
            assert not nvrtc.is_noting()
            before = set(noted)
            with only_noting("", False):  # nothing runs here, so the draft's tokens would be no tokens
                outputs = run()
            assert noted == before
            return None, outputs

        monkeypatch.setattr(GraphPool, "capture", capture)
        runner.capture_graphs(show_progress=False)
        vocab, cpu = runner.config.vocab_size, torch.device("cpu")
        sampler = SampleStep(runner, DeviceChoice(vocab, [], cpu))
        draft = DraftStep(runner, 5, torch.ones(5), DeviceChoice(vocab, [], cpu))
        for step in (sampler, draft):
            run, sizes = step.run, set[int]()

            def spied(size: int, *more: Any, run: Any = run, sizes: set[int] = sizes) -> Any:
                assert nvrtc.is_noting()
                sizes.add(size)
                loaded.clear()
                with hostile_memory(monkeypatch):
                    outputs = run(size, *more)
                assert loaded
                noted.update(loaded)
                return outputs

            noted.clear()
            step.run = spied  # type: ignore[method-assign]
            assert step.graphs is not None
            step.graphs._run = spied
            step.prepare(show_progress=False)
            assert noted
            assert all(step.graphs.is_captured(size) for size in step.graphs.sizes)
            assert sizes >= set(step.graphs.sizes)
        assert max(sizes) == draft.max_requests  # the largest is no graph's


@pytest.mark.parametrize("most", [3, 24, 300])
def test_any_number_of_rows_is_drawn_by_what_the_graphs_launch(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Steps that no graph samples have other numbers of rows, of requests, and rows that truncate or not."""
    from triton.runtime import interpreter

    from deepinfer.engine.fused_setup import graph_sizes
    from deepinfer.kernels.sampling.verification import accept_prefix
    from deepinfer.sampling.device_choice import DeviceChoice
    from deepinfer.sampling.edits import GrammarMask
    from deepinfer.sampling.row_parameters import RowParameters

    loaded, vocab, cpu = set[Key](), 129_280, torch.device("cpu")
    graphs, eager = DeviceChoice(vocab, [], cpu), DeviceChoice(vocab, [], cpu)
    graphs.reserve(most)
    logits, parameters = torch.empty(most, vocab), RowParameters.neutral(most, vocab, cpu)
    grammar = GrammarMask(torch.arange(1), torch.zeros(1, vocab // 32, dtype=torch.int32))

    def launches(choice: DeviceChoice, rows: int, given: RowParameters) -> set[Key]:
        loaded.clear()
        for mask in (None, grammar):
            token_ids, is_bad = choice.draw(logits[:rows], given, torch.zeros(rows, dtype=torch.int64), mask)
        drafts = torch.zeros(rows, 5, dtype=torch.int64)
        accept_prefix(token_ids, is_bad, drafts, torch.ones(rows, dtype=torch.int64))
        return set(loaded)

    monkeypatch.setattr(
        interpreter.InterpretedFunction,
        "__getitem__",
        lambda kernel, _grid: lambda *values, **named: loaded.add(triton_key(kernel, values, named)),
    )
    sizes = graph_sizes(SchedulerConfig(max_num_seqs=most))
    compiled = set[Key]().union(*(launches(graphs, size, parameters.first(size)) for size in sizes))
    assert {name for name, _ in compiled} == {"maximum_kernel", "race_kernel", "chain_kernel", "_accept_kernel"}
    states = [SamplingState(SamplingParams(**each), [1], vocab_size=vocab) for each in ({}, {"top_k": 5})]
    for rows in range(1, most + 1):
        given = RowParameters.of([states[rows % 2]] * rows, vocab, cpu)
        assert given.truncates == rows % 2
        found = launches(eager, rows, given)
        assert found <= compiled, (rows, found - compiled)


def test_a_sampler_without_graphs_is_compiled_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with recorded(tmp_path, monkeypatch, num_drafts=5) as (runner, loaded):
        runner.compile_sampler(show_progress=False)
        names = {name for name, _ in loaded}
        assert names >= {"_collapse_kernel", "maximum_kernel", "race_kernel", "chain_kernel", "_accept_kernel"}
        of_race = {value for name, values in loaded if name == "race_kernel" for value in values}
        assert of_race >= {("MASKED", True), ("MASKED", False)}
        assert not any(runner.graphs.graphs.is_captured(size) for size in SIZES)
