"""A step while it is being planned, and a plan while it is not yet committed."""

from __future__ import annotations

from dataclasses import dataclass, field

from deepinfer.messages import StepPlan
from deepinfer.scheduler.prefix_planner import PlannedSave
from deepinfer.scheduler.sequence import Sequence


class StepDraft:
    """Which sequences get how many rows. Nothing in a sequence's counters changes until the draft becomes a plan."""

    def __init__(self, max_rows: int) -> None:
        self.rows_left = max_rows
        self.rows: dict[Sequence, int] = {}
        """Rows per sequence, in batch order."""
        self.preempted: list[str] = []

    def add(self, sequence: Sequence, num_rows: int) -> None:
        """Give ``sequence`` more rows behind those it has in this step."""
        assert 1 <= num_rows <= self.rows_left, f"{sequence.request_id}: {num_rows=}, {self.rows_left=}"
        self.rows[sequence] = self.rows.get(sequence, 0) + num_rows
        self.rows_left -= num_rows

    def remove(self, sequence: Sequence) -> None:
        """Take the rows of ``sequence`` back, if it has any."""
        self.rows_left += self.rows.pop(sequence, 0)

    def next_row(self, sequence: Sequence) -> int:
        """Position of the row that the sequence would get next."""
        return sequence.num_scheduled + self.rows.get(sequence, 0)

    def prefill_left(self, sequence: Sequence) -> int:
        """Prompt rows that are not scheduled yet, this step's included in the scheduled ones."""
        return sequence.num_prefill - self.next_row(sequence)


@dataclass(slots=True)
class UncommittedPlan:
    """A plan that the worker may be running, with what its commit has to look after."""

    plan: StepPlan
    owners: tuple[tuple[Sequence, int], ...]
    """Sequence and epoch of each chunk: a chunk whose sequence moved on to a later epoch is ignored at commit."""
    saves: tuple[PlannedSave, ...] = ()
    """State copies that the plan takes."""
    releases: list[tuple[list[int], int]] = field(default_factory=list)
    """Blocks and state slot of sequences that lost them meanwhile; they go back to their pools at commit."""
