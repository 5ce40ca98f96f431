"""What the fused layers of one forward share."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from deepinfer.layers.fused.device_rows import DeviceRows


@dataclass(slots=True)
class FusedStep:
    """Scratch of one forward; everything is on the device."""

    rows: DeviceRows
    ids: Tensor
    """``[rows]`` int32 token ids."""
    ngram_ids: Tensor | None = None
    """``[rows, n]`` int32, newest first, -1 is a barrier; None in models without n-gram memory."""
    table: Tensor | None = None
    """``[len(Column), rows]`` int32: what the rows were made from; None for those of a draft."""
    selections: dict[int, Tensor] = field(default_factory=dict)
    """By selection source: ``[rows, k]`` int32 physical entry slots, -1 = none."""
    candidate_blocks: Tensor | None = None
    """``[rows, blocks]`` int32 logical candidate blocks, -1 = none."""
    features: list[Tensor] | None = None
    """``[rows, hidden]`` bf16 per target layer, collected when there is a draft."""
    cut: FusedCut | None = None
    """Set when the decoder layers run on fewer rows or see other windows."""

    def narrow(self) -> None:
        """Go on with the rows of the cut. Selections are not carried over: the first decoder layer makes its own."""
        assert self.cut is not None
        assert self.cut.rows is not None
        self.rows = self.cut.rows  # token ids are used up
        self.selections, self.candidate_blocks, self.cut = {}, None, None


@dataclass(frozen=True, slots=True)
class FusedCut:
    """The rows that go on behind the entries of the first decoder layer (spec 6.1)."""

    layer_id: int
    kept: Tensor
    """``[kept]`` int64, ascending."""
    rows: DeviceRows | None
    """Of the kept rows; None when there are none, which ends the forward."""
