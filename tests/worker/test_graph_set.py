"""Which graph runs, in which order they are captured, and that a failed capture costs its size only."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer.worker.graph_set import GraphPool, GraphSet
from tests.worker.draft_support import capture_on_cpu


class Doubling:
    """A function over a buffer: twice its first rows."""

    def __init__(self, failing: tuple[int, ...] = (), error: type[Exception] = RuntimeError) -> None:
        self.buffer = torch.arange(8)
        self.failing, self.error = failing, error
        self.runs: list[int] = []

    def run(self, size: int) -> tuple[Tensor]:
        self.runs.append(size)
        if size in self.failing:
            raise self.error("no capture\nand a long story")
        return (self.buffer[:size] * 2,)

    def clear(self, size: int) -> None:
        self.buffer.fill_(-1)

    def graphs(self) -> GraphSet[tuple[Tensor]]:
        return GraphSet("doubling", (4, 1, 8), self.run, self.clear, GraphPool())


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GraphPool, "capture", capture_on_cpu)


def replayed(doubling: Doubling, graphs: GraphSet[Any], count: int) -> list[int] | None:
    size = graphs.size_for(count)
    if size is None:
        return None
    doubling.buffer[:count] = torch.arange(count) + 10
    return graphs.replay(size)[0].tolist()


def test_the_first_size_that_holds_a_step_runs() -> None:
    doubling = Doubling()
    graphs = doubling.graphs()
    assert replayed(doubling, graphs, 3) == [20, 22, 24, -2]
    assert doubling.runs == [8, 4, 4], "the largest is captured first, for its memory"
    assert replayed(doubling, graphs, 4) == [20, 22, 24, 26]
    assert replayed(doubling, graphs, 1) == [20]
    assert doubling.runs == [8, 4, 4, 4, 1, 1]
    assert graphs.size_for(9) is None
    assert graphs.num_replays == 3


def test_all_are_captured_at_once_where_that_is_wanted() -> None:
    doubling = Doubling()
    graphs = doubling.graphs()
    graphs.capture_all(show_progress=False)
    assert doubling.runs == [8, 4, 1]
    assert (doubling.buffer == -1).all(), "only padding may run while graphs are captured"
    replayed(doubling, graphs, 2)
    assert doubling.runs == [8, 4, 1, 4]


@pytest.mark.parametrize("at_start", [False, True])
def test_a_failed_capture_is_told_once_and_costs_its_size_only(
    at_start: bool, caplog: pytest.LogCaptureFixture
) -> None:
    doubling = Doubling(failing=(4,))
    graphs = doubling.graphs()
    with caplog.at_level(logging.WARNING):
        if at_start:
            graphs.capture_all(show_progress=False)
        for _ in range(3):
            assert replayed(doubling, graphs, 2) == [20, 22, *(-2,) * 6], "in the next larger graph, with more padding"
    (record,) = caplog.records
    assert "doubling for size 4" in record.getMessage()
    assert "no capture" in record.getMessage()
    assert "\n" not in record.getMessage()
    assert replayed(doubling, graphs, 1) == [20]
    assert replayed(doubling, graphs, 7) is not None
    assert doubling.runs.count(4) == 1


@pytest.mark.parametrize("at_start", [False, True])
def test_steps_that_no_captured_graph_holds_are_launched(at_start: bool) -> None:
    doubling = Doubling(failing=(4, 8))
    graphs = doubling.graphs()
    if at_start:
        graphs.capture_all(show_progress=False)
    assert graphs.size_for(2) is None
    assert graphs.size_for(8) is None
    assert replayed(doubling, graphs, 1) == [20]


@pytest.mark.parametrize("is_hidden", [False, True])
def test_the_start_captures_no_more_where_memory_is_out(
    is_hidden: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def end_raises_too(self: GraphPool, run: Callable[[], Any]) -> Any:
        try:
            return capture_on_cpu(self, run)
        except torch.cuda.OutOfMemoryError:
            raise RuntimeError("the capture was invalidated")  # noqa: B904 - as the end of a capture does

    if is_hidden:
        monkeypatch.setattr(GraphPool, "capture", end_raises_too)
    doubling = Doubling(failing=(4,), error=torch.cuda.OutOfMemoryError)
    graphs = doubling.graphs()
    with caplog.at_level(logging.WARNING):
        graphs.capture_all(show_progress=False)
        assert graphs.size_for(3) == graphs.size_for(8) == 8
        assert graphs.size_for(1) is None  # eight times the rows cost more than launches
    assert doubling.runs == [8, 4]
    (record,) = caplog.records
    assert "size 1, 4" in record.getMessage()


class _FakeCuda:
    """As much of torch.cuda as a capture touches; ``log`` says what was done to the device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ends_with: Exception | None) -> None:
        log: list[str] = []
        self.log = log
        endings = [ends_with]

        class Stream:
            device_index = 0

            def wait_stream(self, other: Any) -> None:
                pass

        class Capture:
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                pass

            def __enter__(self) -> None:
                log.append("begin")

            def __exit__(self, *args: Any) -> None:
                log.append("end")
                ending = endings.pop() if endings else None
                if ending is not None:
                    raise ending

        def note(name: str) -> Callable[..., None]:
            return lambda *args: log.append(name)

        names = {
            "graph_pool_handle": lambda: (0, 1), "current_stream": Stream, "Stream": Stream, "CUDAGraph": object,
            "stream": lambda stream: contextlib.nullcontext(), "graph": Capture, "set_stream": note("set back"),
            "synchronize": note("synchronize"),
        }  # fmt: skip
        for name, value in names.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch, "zeros", lambda *args, **kwargs: torch.ones(1))  # there is no such device
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", note("pool"), raising=False)


@pytest.mark.parametrize("where", ["body", "end"])
def test_the_device_is_set_back_behind_a_failed_capture(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    monkeypatch.undo()  # the real capture
    error = RuntimeError("invalidated")
    cuda = _FakeCuda(monkeypatch, error if where == "end" else None)
    calls = 0

    def run() -> int:
        nonlocal calls
        calls += 1
        if where == "body" and calls == 3:
            raise ValueError("in the body")
        return calls

    with pytest.raises(ValueError if where == "body" else RuntimeError):
        GraphPool().capture(run)
    assert cuda.log == ["begin", "end", "set back", "pool", "begin", "end", "set back", "synchronize"]
    assert calls == 3, "two runs before the capture"
