"""What an engine compiles at its start covers what requests launch, on a CPU: launches are recorded in place of run."""

from __future__ import annotations

import importlib.util
import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

from deepinfer.checkpoint.device_loader import DeviceLoader
from deepinfer.checkpoint.reader import open_checkpoint
from deepinfer.messages import Chunk, StepPlan
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


@contextmanager
def nothing(name: str, show_progress: bool) -> Iterator[None]:
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


@pytest.mark.parametrize("keep", [0, 100])
def test_prompts_launch_what_was_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: int) -> None:
    from triton.runtime import interpreter

    from deepinfer.kernels import nvrtc
    from deepinfer.models.fused_loading import load_fused
    from deepinfer.worker import fused_runner

    path = make_checkpoint(tmp_path / "model", max_position_embeddings=4096, **WIDTHS)
    engine = make_engine(path, num_speculative_tokens=0, num_blocks=250, max_num_seqs=64, max_model_len=3000)
    monkeypatch.setattr(fused_runner, "compiling", nothing)
    monkeypatch.setattr("deepinfer.kernels.moe.experts_hopper.is_usable", lambda *_: True)
    recorder = Recorder()
    with recorder.installed(monkeypatch):
        load_kernel, loaded = nvrtc.load_kernel, set[Key]()

        def noted(source: str, entry: str, defines: dict[str, int], *more: Any, **named: Any) -> Any:
            loaded.add((entry, tuple(sorted(defines.items()))))
            return load_kernel(source, entry, defines, *more, **named)

        def launcher(kernel: Any, _: object) -> Any:
            return lambda *values, **named: loaded.add(triton_key(kernel, values, named))

        monkeypatch.setattr(nvrtc, "load_kernel", noted)
        monkeypatch.setattr(interpreter.InterpretedFunction, "__getitem__", launcher)
        loader = DeviceLoader(open_checkpoint(path, parts=("text",), config=engine.model_config), torch.device("cpu"))
        model = load_fused(engine.model_config, loader, torch.device("cpu"), precision="faithful", max_rows=4096)
        geometry = engine.runner.caches.geometry
        runner = fused_runner.FusedRunner(
            engine.model_config.text, model, geometry, torch.device("cpu"), graph_sizes=(1, 4, 16), max_blocks=24
        )
        loaded.clear()
        graphs = runner.graphs
        with hostile_memory(monkeypatch):
            runner.compile_kernels(null_prompts(MOST, keep), show_progress=False)
        assert runner.graphs is graphs
        assert graphs is not None
        assert not any(graphs.graphs.is_captured(size) for size in (1, 4, 16))
        compiled = set(loaded)
        assert len({entry for entry, _ in compiled}) > 8
        runner.graphs = None
        ids = random_ids(2600)
        for count in (
            9,
            17,
            30,
            50,
            70,
            100,
            129,
            170,
            200,
            250,
            300,
            350,
            400,
            500,
            520,
            531,
            600,
            660,
            700,
            1100,
            2501,
        ):
            prompt = replace(
                chunk_of(ids, 0, count, BLOCKS, 3, "p"),
                num_sampled=1,
                decoder_floor=max(0, count - keep) if keep else 0,
            )
            loaded.clear()
            runner.run(StepPlan(0, (prompt,)))
            assert loaded, count
            assert loaded <= compiled, (count, loaded - compiled)
        loaded.clear()
        first = replace(chunk_of(ids, 0, MOST, BLOCKS, 3, "p"), num_sampled=0, decoder_floor=4000 if keep else 0)
        runner.run(StepPlan(0, (first,)))
        assert loaded
        assert loaded <= compiled
        for size in (1, 4, 16):
            loaded.clear()
            graphs.launch(size)
            assert loaded
            assert loaded <= compiled


def test_the_null_prompt_is_a_chunk_of_nobody() -> None:
    prompts: list[Chunk] = null_prompts(64, 0)
    assert {prompt.state_slot for prompt in prompts} == {0}
    assert {block for prompt in prompts for block in prompt.block_table} == {0}
