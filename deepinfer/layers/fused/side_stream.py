"""A second stream for work that nothing on the main one waits for at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch


class SideStream:
    """Runs launches beside the current stream, in eager steps and in captured ones.

    Memory is the caller's care: what is used on both streams is allocated on the main one and kept until :meth:`join`.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    @contextmanager
    def fork(self) -> Iterator[None]:
        """Launches of the body run beside those that follow it. They see everything that was launched before."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """What is launched from here on waits for the side stream.

        The next launch now has two predecessors, so it must not be one that overlaps the kernel before it.
        """
        torch.cuda.current_stream().wait_stream(self._stream)


@cache
def side_stream(device: torch.device) -> SideStream:
    """The side stream of a device: one for all layers, which use it one after the other."""
    return SideStream(device)
