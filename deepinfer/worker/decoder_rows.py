"""Which rows of a step go through the decoder layers, and what they see there (spec 6.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from deepinfer.messages import Chunk
from deepinfer.worker.ragged_rows import Ints, RaggedRows

NO_ENTRIES = 2**31 - 1
"""An entry floor behind every position, wherever the device has the rows."""


@dataclass(frozen=True, slots=True)
class KeptRows:
    """The part of a step that the decoder layers run on."""

    rows: Ints
    """``[kept]`` numbers of the kept rows in the step."""
    chunks: Ints
    """``[sequences]`` numbers of the chunks with kept rows."""
    ragged: RaggedRows | None
    """The kept rows as a batch of their own, its window floors raised; None when no row is kept."""
    sample_rows: Ints
    """``[samples]`` rows to sample from, numbered among the kept ones."""


def narrows_decoder(chunks: Sequence[Chunk], window: int) -> bool:
    """Whether the decoder layers see less than the encoder layers in this step; later rows do not reach the floor."""
    return any(chunk.start < chunk.decoder_floor + window - 1 for chunk in chunks if chunk.decoder_floor)


def kept_rows(chunks: Sequence[Chunk], is_compact: bool) -> KeptRows:
    """Cut a step down to the rows of the decoder layers.

    Args:
        is_compact: leave out the rows before ``decoder_floor``. Otherwise all rows stay and only windows get narrower,
            so that a row before the floor sees no window key at all.
    """
    starts = np.array([chunk.start for chunk in chunks])
    ends = np.array([chunk.end for chunk in chunks])
    floors = np.array([chunk.decoder_floor for chunk in chunks])
    first = np.clip(floors, starts, ends) if is_compact else starts
    begins = np.cumsum(ends - starts) - (ends - starts)  # of each chunk's rows in the step
    kept = np.flatnonzero(first < ends)
    counts = (ends - first)[kept]
    if len(kept) == 0:
        none = np.empty(0, np.int64)
        return KeptRows(none, kept, None, none)
    ragged = RaggedRows(
        starts=first[kept],
        counts=counts,
        slots=np.array([chunk.state_slot for chunk in chunks])[kept],
        floors=np.maximum(floors, [chunk.window_floor for chunk in chunks])[kept],
        entry_floors=np.full(len(kept), NO_ENTRIES),  # they were written for all rows before the cut
    )
    first_row = (begins + first - starts)[kept]
    num_sampled = [chunks[int(index)].num_sampled for index in kept]
    sampled = [np.arange(end - number, end) for number, end in zip(num_sampled, ragged.ends, strict=True)]
    return KeptRows(
        rows=first_row[ragged.sequence] + ragged.offset,
        chunks=kept,
        ragged=ragged,
        sample_rows=np.concatenate(sampled),
    )
