"""Kernels that are compiled before they are launched."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepinfer.kernels import nvrtc
from deepinfer.worker.warm_up import null_prompt, null_prompts, typical_lengths

DEFINES = {"GATHER": 0, "LINES": 1, "BLOCK": 8, "EXPERTS": 2}
DEVICE = torch.device("cuda", 0)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, dict[str, int], str]]:
    """Calls of the compiler, which makes nothing."""
    calls: list[tuple[str, dict[str, int], str]] = []

    def compile_cubin(source: str, defines: dict[str, int], architecture: str) -> bytes:
        calls.append((source, defines, architecture))
        if defines.get("WRONG"):
            raise nvrtc.KernelError("no", why="no", fix="no")
        return f"{source} {sorted(defines.items())}".encode()

    monkeypatch.setattr(nvrtc, "compile_cubin", compile_cubin)
    monkeypatch.setattr(nvrtc, "_compiled", {})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    return calls


def load(**defines: int) -> nvrtc.Kernel:
    return nvrtc.load_kernel("moe_fp8_rows.cu", "moe_fp8_align", DEFINES | defines, DEVICE)


def test_kernels_are_noted_once_and_not_launched(compiled: list[tuple[str, dict[str, int], str]]) -> None:
    jobs: list[Callable[[], None]] = []
    with nvrtc.noting(jobs.append):
        for _ in range(3):
            load().launch((1, 1, 1), 32, (None,), shared_bytes=10**9, cluster=16, overlap=True)
        load(BLOCK=16).launch((1, 1, 1), 32, ())
    assert len(jobs) == 2
    assert not compiled
    for job in jobs:
        job()
    assert [call[1]["BLOCK"] for call in compiled] == [8, 16]
    assert {call[0] for call in compiled} == {"moe_fp8_rows.cu"}
    assert {call[2] for call in compiled} == {"sm_90a"}
    assert len(nvrtc._compiled) == 2


def test_other_threads_launch_as_ever(
    compiled: list[tuple[str, dict[str, int], str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[object] = []
    monkeypatch.setattr(nvrtc, "_load", lambda *kernel: loaded.append(kernel))
    with nvrtc.noting(lambda job: None):
        thread = threading.Thread(target=load)
        thread.start()
        thread.join()
    assert len(loaded) == 1
    load()
    assert len(loaded) == 2


def test_what_was_compiled_is_loaded(
    compiled: list[tuple[str, dict[str, int], str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts: list[bytes] = []

    def load_data(module: object, cubin: bytes) -> int:
        texts.append(cubin)
        return 1  # ends the load

    driver = SimpleNamespace(cuModuleLoadData=load_data, cuGetErrorString=lambda result, text: 0)
    monkeypatch.setattr(nvrtc, "_driver", lambda: driver)
    monkeypatch.setattr(nvrtc, "_bind_context", lambda index: None)
    nvrtc._load.cache_clear()
    with nvrtc.noting(lambda job: job()):
        load()
    assert len(compiled) == 1
    with pytest.raises(nvrtc.KernelError):
        load()
    assert len(compiled) == 1
    assert len(texts) == 1
    with nvrtc.noting(lambda job: job()):  # a second engine
        load()
    assert len(compiled) == 1
    with pytest.raises(nvrtc.KernelError):
        load(BLOCK=16)  # not noted before
    assert len(compiled) == 2


# ---- threads ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``compile_ahead`` and Triton's kernels, of which none runs."""
    pytest.importorskip("triton")
    from triton.runtime import _async_compile
    from triton.runtime.jit import JITFunction

    from deepinfer.kernels import compile_ahead

    run = JITFunction.run
    monkeypatch.setattr(compile_ahead, "num_processors", lambda: 2)
    yield SimpleNamespace(ahead=compile_ahead, kernels=JITFunction, mode=_async_compile.active_mode)
    assert JITFunction.run is run
    assert _async_compile.active_mode.get() is None
    assert not nvrtc.is_noting()


def test_everything_noted_is_compiled_at_the_end(
    modules: Any, compiled: list[tuple[str, dict[str, int], str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[bool] = []
    kernel = object.__new__(modules.kernels)
    with monkeypatch.context() as patch:
        patch.setattr(modules.kernels, "run", lambda self, *values, grid, warmup: launched.append(warmup))
        with modules.ahead.compiling("kernels"):
            for block in (8, 16, 32, 8):
                load(BLOCK=block).launch((1, 1, 1), 32, ())
            kernel[(1,)]()
            thread = threading.Thread(target=kernel[(1,)])
            thread.start()
            thread.join()
        assert sorted(call[1]["BLOCK"] for call in compiled) == [8, 16, 32]
        kernel[(1,)]()
    assert launched == [True, False, False]  # this thread's inside, another's, this one's behind


def test_what_does_not_compile_is_told_and_left_to_its_launch(
    modules: Any, compiled: list[tuple[str, dict[str, int], str]], caplog: pytest.LogCaptureFixture
) -> None:
    with modules.ahead.compiling("kernels"):
        load()
        load(WRONG=1)
    assert len(compiled) == 2
    assert "1 of 2 kernels could not be compiled ahead" in caplog.text
    assert [dict(defines).get("WRONG") for _, defines, _ in nvrtc._compiled] == [None]


def test_an_interrupt_does_not_wait_for_what_is_queued(modules: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[object] = []
    monkeypatch.setattr(nvrtc, "_compile_for", lambda *kernel: (time.sleep(0.2), done.append(kernel)))

    def interrupted() -> None:
        with modules.ahead.compiling("kernels"):
            for block in range(40):
                load(BLOCK=block)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert len(done) < 10
    with modules.ahead.compiling("kernels"):
        load()
    assert len(done) < 12


# ---- prompts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_rows", [1, 5, 16, 100, 8192])
def test_typical_lengths_cover_the_range(max_rows: int) -> None:
    lengths = typical_lengths(max_rows)
    assert lengths == sorted(set(lengths))
    assert lengths[-1] == max_rows
    assert lengths[0] > 0
    for rows in range(16, max_rows + 1, max(1, max_rows // 50)):
        above = next(length for length in lengths if length >= rows)
        assert above < 2 * rows + 2
    assert max_rows < 32 or any(length % 16 for length in lengths)
    more = set(typical_lengths(max_rows, (3, 700, 10**6)))
    assert more - set(lengths) == {length for length in (699, 700, 701) if length <= max_rows}


def test_null_prompts() -> None:
    prompt = null_prompt(300)
    assert (prompt.num_rows, prompt.block_table, prompt.state_slot) == (300, (0, 0, 0), 0)
    assert (prompt.start, prompt.num_sampled, prompt.is_prefill, prompt.decoder_floor) == (0, 1, True, 0)
    assert [null_prompt(rows, 150).decoder_floor for rows in (100, 150, 300)] == [0, 0, 150]
    assert all(not prompt.decoder_floor and prompt.num_sampled for prompt in null_prompts(500, 0))
    *whole, first_part = null_prompts(500, 150)
    assert [prompt.num_rows for prompt in whole] == typical_lengths(500)
    assert whole[-1].decoder_floor == 350
    assert (first_part.num_rows, first_part.num_sampled) == (500, 0)
    assert first_part.decoder_floor > first_part.end
