"""What the layers of one forward share: views of the batch, rotation angles, selections, and an optional trace."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from deepinfer.ops.step_views import RingView, StreamView

Angles = tuple[Tensor, Tensor]


@dataclass(slots=True)
class StepState:
    """Scratch of one forward. Tensors are on the model's device."""

    ids: Tensor
    """``[rows]`` token ids."""
    ngram_ids: Tensor
    """``[rows, n]`` each row's id and the ones before it, newest first; -1 is a barrier (spec 4.10 d)."""
    window: RingView
    streams: dict[int, StreamView]
    """By compress ratio."""
    plain_angles: Angles
    """Rotation of ratio-0 layers at each row's position."""
    compressed_angles: Angles
    """Rotation of ratio-1 and ratio-2 layers at each row's position."""
    entry_angles: dict[int, Angles]
    """By ratio: rotation of the entries that this step completes."""
    is_image: Tensor | None = None
    """``[rows]`` bool, or None when no row belongs to an image."""
    selections: dict[int, Tensor] = field(default_factory=dict)
    """By selection source: ``[rows, k]`` entries, ascending, padded with -1."""
    candidate_blocks: Tensor | None = None
    """``[rows, blocks]`` chosen at the candidate source; None while every visible entry is a candidate."""
    features: list[Tensor] | None = None
    """Mean of the streams ``[rows, hidden]`` at the entrance of each target layer, collected when there is a draft."""
    trace: dict[str, Tensor] | None = None
    """Collects intermediates by name when a test asks for them."""
    decoder: DecoderCut | None = None
    """Set when the decoder layers see other windows or fewer rows than the encoder layers (spec 6.1)."""

    @property
    def tail(self) -> StepState:
        """The state of the rows that the last layers run on: results, features and samples are numbered like it."""
        return self if self.decoder is None else self.decoder.state

    def record(self, name: str, value: Tensor | None) -> None:
        """Keep ``value`` under ``name`` if this step is traced."""
        if self.trace is not None and value is not None:
            self.trace[name] = value.clone()


@dataclass(slots=True)
class DecoderCut:
    """What changes inside the first decoder layer, once its entries and index keys are written for every row."""

    layer_id: int
    """The first decoder layer."""
    rows: Tensor
    """``[kept]`` int64: which rows go on, ascending."""
    num_rows: int
    """How many, known on the host; 0 ends the forward there."""
    state: StepState
    """Views of the kept rows only, with window floors; its streams complete no entries."""
