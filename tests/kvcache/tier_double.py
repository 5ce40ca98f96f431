"""A tier for tests: keeps records in a dictionary, copies slowly, and checks that nobody touches a place meanwhile."""

from __future__ import annotations

import random
from collections.abc import Callable

from deepinfer.kvcache.block_keys import BlockKey
from deepinfer.kvcache.tier import RecordKind, TierRecord

Read = Callable[[TierRecord], object]
Write = Callable[[TierRecord, object], None]


class SlowTier:
    """Copies of either direction end after a random number of calls of ``take_done``, in any order.

    Args:
        read, write: access to what a place on the device holds. Bytes are read when a copy *ends*, so a place that was
            handed on too early gives the wrong ones.
        failure_rate: share of incoming copies that fail.
    """

    def __init__(
        self, read: Read, write: Write, rng: random.Random, slowness: int = 3, failure_rate: float = 0
    ) -> None:
        self.kept: dict[tuple[RecordKind, BlockKey], tuple[bytes, object]] = {}
        self.num_out = self.num_in = 0
        self._read, self._write, self._rng = read, write, rng
        self._slowness, self._failure_rate = slowness, failure_rate
        self._running: list[tuple[TierRecord, bool, int, object]] = []

    @property
    def is_busy(self) -> bool:
        return bool(self._running)

    def put(self, record: TierRecord) -> None:
        self._start(record, True, self._read(record))

    def holds(self, kind: RecordKind, key: BlockKey, content: bytes) -> bool:
        return (kind, key) in self.kept and self.kept[kind, key][0] == content

    def get(self, record: TierRecord) -> None:
        self._start(record, False, None)

    def _start(self, record: TierRecord, is_out: bool, seen: object) -> None:
        self._running.append((record, is_out, self._rng.randint(1, self._slowness), seen))

    def take_done(self) -> list[tuple[TierRecord, bool]]:
        done, running = [], []
        for record, is_out, left, seen in self._running:
            if left > 1:
                running.append((record, is_out, left - 1, seen))
                continue
            is_good = True
            if is_out:
                now = self._read(record)
                assert now == seen, f"{record.kind} place {record.place} changed while it was copied out"
                self.kept[record.kind, record.key] = (record.content, now)
                self.num_out += 1
            else:
                is_good = self._rng.random() >= self._failure_rate
                if is_good:
                    self._write(record, self.kept[record.kind, record.key][1])
                    self.num_in += 1
            done.append((record, is_good))
        self._running = running
        self._rng.shuffle(done)
        return done
