"""CUDA graphs of one function, one per size, and what happens where a capture fails."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch
from tqdm import tqdm

logger = logging.getLogger(__name__)

Outputs = TypeVar("Outputs")
_WARM_UPS = 2
_MOST_PADDING = 4
"""Times the rows of a size whose capture failed: a larger graph costs more than launches."""


class Graph(Protocol):
    """What was captured."""

    def replay(self) -> None:
        """Run it, with the contents that its inputs have now."""
        ...


class GraphPool:
    """Memory of all graphs of a runner. Graphs run one after the other, so their temporaries may overlap.

    What a graph leaves behind holds until the next graph of the pool is replayed.
    """

    def __init__(self) -> None:
        self._handle: Any = None
        self._side: torch.cuda.Stream | None = None
        """For warm-ups: the same one, since libraries keep a workspace for each stream."""

    def capture(self, run: Callable[[], Outputs]) -> tuple[Graph, Outputs]:
        """Capture the launches of ``run``, which reads nothing back and changes no state that a step relies on.

        Raises:
            Exception: what ``run`` or the capture raised. The device and the pool can be used as before.
        """
        if self._handle is None:
            self._handle = torch.cuda.graph_pool_handle()
        current = torch.cuda.current_stream()
        if self._side is None:
            self._side = torch.cuda.Stream()
        side = self._side
        side.wait_stream(current)
        try:
            with torch.cuda.stream(side):
                for _ in range(_WARM_UPS):  # kernels are compiled and loaded here, which a capture does not allow
                    run()
        finally:
            current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        try:
            # thread_local: what other threads do with the device meanwhile does not break the capture.
            with torch.cuda.graph(graph, pool=self._handle, capture_error_mode="thread_local"):
                outputs = run()
        except BaseException:
            self._set_back(current)
            raise
        return graph, outputs

    def _set_back(self, current: torch.cuda.Stream) -> None:
        """A capture that was invalidated raises again where it is ended, and leaves torch in the middle of it: its
        current stream, its allocator, and the state of its random numbers."""
        torch.cuda.set_stream(current)
        with contextlib.suppress(RuntimeError):  # where it has been set back after all
            torch._C._cuda_endAllocateToPool(current.device_index, self._handle)
        self._handle = None  # the allocator may believe for ever that a graph is recorded to this one
        with contextlib.suppress(RuntimeError):
            scratch = torch.zeros(1, device="cuda")
            with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
                scratch.add_(1)  # the end of a capture that is in order sets the random numbers back
        torch.cuda.set_stream(current)
        torch.cuda.synchronize()


class GraphSet(Generic[Outputs]):
    """Captures of ``run`` by size. A size whose capture fails is never tried again: its steps run as a larger graph.

    Args:
        name: what is captured, for messages. sizes: of the graphs.
        run: (size) -> its outputs, launches only, over tensors that stay where they are.
        clear: (size) puts these tensors into a state in which ``run`` changes nothing: all rows padding.
        can_capture: (size) whether to try; False where ``run`` needs what another capture failed to give.
    """

    def __init__(
        self,
        name: str,
        sizes: Sequence[int],
        run: Callable[[int], Outputs],
        clear: Callable[[int], None],
        pool: GraphPool,
        can_capture: Callable[[int], bool] = lambda size: True,
    ) -> None:
        self.name, self.sizes = name, sorted(sizes)
        self._run, self._clear, self._pool, self._can_capture = run, clear, pool, can_capture
        self._captured: dict[int, tuple[Graph, Outputs]] = {}
        self._failed: set[int] = set()
        self.num_replays = 0

    def capture_all(self, show_progress: bool) -> None:
        """Capture every size, the largest first, so that the smaller ones live in the memory of the largest.

        One that does not fit into memory takes along all that are left: what is captured behind a failure shares no
        memory with what was captured before.
        """
        for size in tqdm(self.sizes[::-1], desc=f"graphs of {self.name}", disable=not show_progress):
            self._ensure(size, is_start=True)

    def size_for(self, count: int) -> int | None:
        """The size that a step of ``count`` replays, captured by now; None where it has to be launched.

        The smallest that holds it; where its capture failed, the next that is captured, with more padding, unless that
        is far larger. A capture clears the inputs, so fill them behind this.
        """
        holding = [size for size in self.sizes if size >= count]
        if not holding:
            return None
        if not self._captured and not self._failed:
            self._ensure(self.sizes[-1])  # see capture_all
        self._ensure(holding[0])
        near = _MOST_PADDING * holding[0]
        return next((size for size in holding if size <= near and size in self._captured), None)

    def replay(self, size: int) -> Outputs:
        """Run at a size of :meth:`size_for`. Returns the outputs, which hold until the next replay of the pool."""
        graph, outputs = self._captured[size]
        graph.replay()
        self.num_replays += 1
        return outputs

    def is_captured(self, size: int) -> bool:
        """Whether there is a graph of this size by now."""
        return size in self._captured

    def outputs(self, size: int) -> Outputs:
        """What a captured size leaves, without running it: inputs of another graph."""
        return self._captured[size][1]

    def _ensure(self, size: int, is_start: bool = False) -> None:
        if size in self._captured or size in self._failed or not self._can_capture(size):
            return
        self._clear(size)
        try:
            self._captured[size] = self._pool.capture(lambda: self._run(size))
        except Exception as error:
            lost = [size]
            if is_start and _is_out_of_memory(error):
                lost = [other for other in self.sizes if other not in self._captured and other not in self._failed]
            self._failed.update(lost)
            reason = str(error).strip().splitlines() or [""]
            logger.warning(
                "no CUDA graph of %s for size %s, its steps take a larger graph or are launched kernel by kernel, "
                "which is slower: %s: %s",
                self.name, ", ".join(map(str, lost)), type(error).__name__, reason[0],
            )  # fmt: skip


def _is_out_of_memory(error: BaseException | None) -> bool:
    """Also where the end of the capture raised behind it."""
    while error is not None:
        if isinstance(error, torch.cuda.OutOfMemoryError):
            return True
        error = error.__context__
    return False
