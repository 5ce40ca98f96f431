"""Feeds prompts to a model runner in chosen pieces, with the floors of bounded replay."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.engine.engine import Engine
from deepinfer.messages import StepPlan
from deepinfer.ops.records import RecordStore
from tests.engine.support import chunk_of

BLOCKS = (5, 2, 9)


def run_pieces(
    engine: Engine,
    ids: list[int],
    sizes: list[int],
    *,
    start: int = 0,
    slot: int = 3,
    blocks: tuple[int, ...] = BLOCKS,
    window_floor: int = 0,
    entry_floor: int = 0,
    keep: int | None = None,
) -> Tensor:
    """Logits of the rows that reach the last layer, ``[kept rows, vocab]``, in order.

    Args:
        sizes: rows of each step from ``start`` on. keep: tokens at the end that the decoder layers keep; None: all.
    """
    decoder_floor = 0 if keep is None else max(0, len(ids) - keep)
    kept = []
    for size in sizes:
        chunk = chunk_of(ids, start, size, blocks, slot)
        end = start + size
        is_compact = engine.runner._builder.is_compact
        sampled = min(size, max(0, end - decoder_floor)) if is_compact else size
        chunk = chunk._replace(
            window_floor=window_floor,
            entry_floor=entry_floor,
            decoder_floor=decoder_floor,
            num_sampled=sampled,
        )
        logits = engine.runner.run(StepPlan(0, (chunk,))).sample_logits()
        kept.append(logits[max(0, len(logits) - max(0, end - decoder_floor)) :])
        start = end
    assert start == len(ids)
    return torch.cat(kept)


def set_mode(engine: Engine, truncation: str) -> None:
    """``mask`` or ``compact`` for plans with decoder floors."""
    engine.runner._builder.is_compact = truncation == "compact"


def stores(engine: Engine) -> list[RecordStore]:
    """All main entries and index keys."""
    found = []
    for layer in engine.runner.caches.layers:
        found += [store for store in (layer.entries, layer.index_keys) if store is not None]
    return found


def block_bytes(engine: Engine, block: int) -> list[Tensor]:
    """Copies of everything that a block holds."""
    num_blocks = engine.runner.caches.geometry.num_blocks
    return [store.data.unflatten(0, (num_blocks, -1))[block].clone() for store in stores(engine)]


def spoil_states(engine: Engine, slot: int) -> None:
    """Fill a state slot with what another sequence could have left there: NaN codes in every ring."""
    caches = engine.runner.caches
    for layer in (*caches.layers, *caches.draft):
        rings = [layer.window.data] + ([layer.pairs] if layer.pairs is not None else [])
        for ring in rings:
            state = ring.unflatten(0, (caches.geometry.num_slots, -1))[slot]
            state.fill_(255 if ring.dtype is torch.uint8 else torch.nan)
