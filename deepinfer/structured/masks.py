"""``MaskBatch``: the masks of all rows of a step, computed beside the forward in parallel over sequences."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from deepinfer.sampling.edits import GrammarMask
from deepinfer.structured.matcher import GrammarMatcher, Words


@dataclass(frozen=True, slots=True)
class MaskRows:
    """The rows of one sequence: ``first_row`` after the tokens so far, and one more after each draft."""

    matcher: GrammarMatcher
    first_row: int
    drafts: tuple[int, ...] = ()

    @property
    def num_rows(self) -> int:
        return 1 + len(self.drafts)


class PendingMasks:
    """Masks that are being computed. The matchers must not be touched before :meth:`result`."""

    def __init__(
        self, owner: MaskBatch, rows: Sequence[MaskRows], bits: Tensor, parts: list[Future[list[int]]]
    ) -> None:
        self._owner = owner
        self._rows = rows
        self._bits = bits
        self._parts = parts

    def result(self) -> GrammarMask | None:
        """Wait and return the masks on the device; None if no row is constrained.

        The tensors are valid until the step after the next is started.
        """
        taken = sorted(slot for part in self._parts for slot in part.result())
        if not taken:
            return None
        owners = [row for rows in self._rows for row in range(rows.first_row, rows.first_row + rows.num_rows)]
        bits = self._bits[: len(owners)]
        if len(taken) < len(owners):
            bits = bits[torch.tensor(taken)]
        numbers = torch.tensor([owners[slot] for slot in taken], dtype=torch.int64)
        device = self._owner.device
        return GrammarMask(rows=numbers.to(device, non_blocking=True), bits=bits.to(device, non_blocking=True))


class MaskBatch:
    """Owns two buffers (a step's masks are in use while the next are computed) and a pool of threads.

    Args:
        vocab_size: width of the logits. num_threads: default, the processors up to 8.
    """

    def __init__(self, vocab_size: int, device: torch.device | None = None, num_threads: int | None = None) -> None:
        self.device = device or torch.device("cpu")
        self.num_words = -(-vocab_size // 32)
        self.num_threads = num_threads or min(8, os.cpu_count() or 1)
        self._pool: ThreadPoolExecutor | None = None
        self._buffers = [self._allocate(0), self._allocate(0)]
        self._turn = 0

    def _allocate(self, num_rows: int) -> Tensor:
        pinned = self.device.type == "cuda"
        return torch.zeros((num_rows, self.num_words), dtype=torch.int32, pin_memory=pinned)

    def start(self, rows: Sequence[MaskRows]) -> PendingMasks:
        """Begin to compute; returns at once. A sequence's rows are walked one after another, sequences in parallel."""
        num_slots = sum(each.num_rows for each in rows)
        self._turn = 1 - self._turn
        if self._buffers[self._turn].shape[0] < num_slots:
            self._buffers[self._turn] = self._allocate(max(num_slots, 2 * self._buffers[self._turn].shape[0]))
        bits = self._buffers[self._turn]
        words: Words = bits.numpy()
        starts = np.cumsum([0, *(each.num_rows for each in rows)]).tolist()
        pairs = list(zip(rows, starts, strict=False))
        if self._pool is None and rows:
            self._pool = ThreadPoolExecutor(self.num_threads, thread_name_prefix="grammar-mask")
        num_parts = min(self.num_threads, len(rows))
        parts = [self._submit(pairs[index::num_parts], words) for index in range(num_parts)]
        return PendingMasks(self, rows, bits, parts)

    def _submit(self, pairs: list[tuple[MaskRows, int]], words: Words) -> Future[list[int]]:
        assert self._pool is not None
        return self._pool.submit(_walk_all, pairs, words)

    def compute(self, rows: Sequence[MaskRows]) -> GrammarMask | None:
        """:meth:`start` and wait."""
        return self.start(rows).result()

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None


def _walk_all(pairs: list[tuple[MaskRows, int]], words: Words) -> list[int]:
    return [slot for rows, first in pairs for slot in walk(rows, first, words)]


def walk(rows: MaskRows, first_slot: int, words: Words) -> list[int]:
    """Write the masks of one sequence's rows and leave its matcher as it was.

    Rows after a draft that is not allowed get none: verification rejects that draft, so they are never used.

    Returns:
        The slots that hold a mask.
    """
    matcher, slots, accepted = rows.matcher, [], 0
    for index in range(rows.num_rows):
        if index:
            if not matcher.accept(rows.drafts[index - 1]):
                break
            accepted += 1
        if matcher.fill_mask(words[first_slot + index]):
            slots.append(first_slot + index)
    matcher.rollback(accepted)
    return slots
