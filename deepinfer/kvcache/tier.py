"""The border of the device's prefix cache: what a tier below it (host memory, disk, remote) has to offer."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Protocol

from deepinfer.kvcache.block_keys import BlockKey


class RecordKind(enum.Enum):
    """What a record holds."""

    BLOCK = "block"  # main entries and index keys of 128 tokens, all streams
    STATE = "state"  # the rings of one sequence at the end of a block


@dataclass(frozen=True, slots=True)
class TierRecord:
    """One thing that leaves or enters by its key."""

    kind: RecordKind
    key: BlockKey
    """Of the block, or of the block at whose end the state is."""
    content: bytes
    """Token ids and image hashes of the block, stored with it and compared when it is looked for."""
    place: int
    """Physical block, or number of the checkpoint. It keeps its content until the copy is reported as done."""


class CacheTier(Protocol):
    """A place for records, off the critical path: no call waits for a copy.

    ``put`` is called only after the rows that wrote the record were committed, so whoever copies on another stream sees
    all of it. Losing a record is allowed at any time: a copy that fails is reported as done with ``False``.
    """

    def put(self, record: TierRecord) -> None:
        """Begin to copy a record out."""

    def holds(self, kind: RecordKind, key: BlockKey, content: bytes) -> bool:
        """Whether a record is there, with this content."""

    def get(self, record: TierRecord) -> None:
        """Begin to copy a record in, to its place. It is there, or was a moment ago."""

    def take_done(self) -> list[tuple[TierRecord, bool]]:
        """Copies of either direction that ended since the last call, each with its success."""
