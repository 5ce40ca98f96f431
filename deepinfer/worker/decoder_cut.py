"""The forward's state for the decoder layers, where they run on fewer rows or narrower windows (spec 6.1)."""

from __future__ import annotations

from torch import Tensor

from deepinfer.layers.step_state import Angles, DecoderCut, StepState
from deepinfer.worker.step_batch import DecoderBatch


def cut_for_decoder(state: StepState, batch: DecoderBatch, layer_id: int) -> DecoderCut:
    """Gather everything that is per row, so that behind the cut nothing remembers the left-out rows.

    Selections are not carried over: the first decoder layer makes its own (it starts a new compress ratio).

    Args:
        state: of all rows of the step. layer_id: the first decoder layer.
    """
    rows = batch.rows
    narrowed = StepState(
        ids=state.ids[rows],
        ngram_ids=state.ngram_ids[rows],
        window=batch.window,
        streams=batch.streams,
        plain_angles=_pick(state.plain_angles, rows),
        compressed_angles=_pick(state.compressed_angles, rows),
        entry_angles={},
        is_image=None if state.is_image is None else state.is_image[rows],
        features=state.features,
        trace=state.trace,
    )
    return DecoderCut(layer_id=layer_id, rows=rows, num_rows=batch.num_rows, state=narrowed)


def _pick(angles: Angles, rows: Tensor) -> Angles:
    return angles[0][rows], angles[1][rows]
