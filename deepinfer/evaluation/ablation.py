"""Takes one mechanism out of a loaded model, to see whether the evaluation notices.

Not an option of the engine: nobody wants such a model, except to know that the instrument is not blind.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from deepinfer.engine.engine import Engine
from deepinfer.errors import ConfigError
from deepinfer.ops.index_select import top_blocks, top_entries

_SLAB_ELEMENTS = 1 << 22


class Ablation(enum.Enum):
    """What is taken away."""

    NO_ENGRAM = "no_engram"
    """The n-gram memory adds nothing."""
    WINDOW_ONLY = "window_only"
    """Layers attend their sliding windows and no compressed entries."""
    RANDOM_SELECTION = "random_selection"
    """The indexer's scores are random numbers, a function of (seed, layer, visible entries, entry)."""


@contextmanager
def ablated(engine: Engine, ablation: Ablation, seed: int = 0) -> Iterator[None]:
    """Change the model of ``engine`` for the time of the ``with`` block.

    The engine has to be fresh: its prefix cache must not hold entries of the whole model.

    Raises:
        ConfigError: an accelerator runs the model; what it recorded in graphs would go on unchanged.
    """
    if engine.config.device.platform != "cpu":
        raise ConfigError(
            f"an ablation on {engine.config.device.platform}",
            why="functions of a loaded model are replaced, which recorded graphs do not see",
            fix="use --accelerator cpu",
        )
    changes: list[tuple[Any, str, Any]] = []
    for layer in engine.runner.model.layers:
        attention: Any = layer.attention
        if ablation is Ablation.NO_ENGRAM:
            changes.append((layer, "engram", None))
        elif ablation is Ablation.WINDOW_ONLY:
            changes.append((attention, "ops", _Replaced(attention.ops, sparse_attention=_window_only(attention.ops))))
        elif attention.indexer is not None:
            random = RandomSelection(seed * 1_000_003 + layer.plan.layer_id)
            replaced = _Replaced(attention.ops, index_full=random.full, index_candidates=random.candidates)
            changes.append((attention.indexer, "ops", replaced))
    originals = [getattr(owner, name) for owner, name, _ in changes]
    try:
        for owner, name, value in changes:
            setattr(owner, name, value)
        yield
    finally:
        for (owner, name, _), original in zip(changes, originals, strict=True):
            setattr(owner, name, original)


class _Replaced:
    """Operators of a model, some of them exchanged."""

    def __init__(self, ops: Any, **functions: Callable[..., Any]) -> None:
        self._ops = ops
        self._functions = functions

    def __getattr__(self, name: str) -> Any:
        return self._functions[name] if name in self._functions else getattr(self._ops, name)


def _window_only(ops: Any) -> Callable[..., Tensor]:
    def attend(query: Tensor, step_keys: Tensor, ring: Any, window: Any, sink: Tensor, selection: Any) -> Tensor:
        found: Tensor = ops.sparse_attention(query, step_keys, ring, window, sink, None)
        return found

    return attend


class RandomSelection:
    """Stands in for the two operators of the indexer; arguments and results as in ``ops/index_select.py``.

    Scores do not depend on the batch, nor on how many rows a step has.
    """

    def __init__(self, salt: int) -> None:
        self._salt = salt

    def scores(self, num_visible: Tensor, entries: Tensor) -> Tensor:
        """``num_visible`` ``[rows, 1]``, ``entries`` ``[rows or 1, n]`` to float32 ``[rows, n]`` in [0, 1)."""
        mixed = num_visible * 0x9E3779B1 + entries * 0x85EBCA77 + self._salt * 0xC2B2AE3D
        for factor in (0x7FEB352D, 0x846CA68B):
            mixed = (mixed ^ (mixed >> 15)) & 0xFFFFFFFF
            mixed = (mixed * factor) & 0xFFFFFFFF
        return ((mixed ^ (mixed >> 16)) & 0xFFFFFF).float() / 2**24

    def full(
        self,
        query: Tensor,
        head_weights: Tensor,
        keys: Any,
        stream: Any,
        count: int,
        round_scores: bool,
        candidates: tuple[int, int] | None,
    ) -> tuple[Tensor, Tensor | None]:
        """``index_full``."""
        wants_blocks = candidates is not None and stream.max_visible > candidates[0] * candidates[1]
        entries = torch.arange(stream.max_visible, device=query.device)
        selected, blocks = [], []
        step = max(1, _SLAB_ELEMENTS // max(1, stream.max_visible))
        for num_visible in stream.num_visible.split(step):
            scores = self.scores(num_visible.unsqueeze(-1), entries.unsqueeze(0))
            selected.append(top_entries(scores, entries < num_visible.unsqueeze(-1), count))
            if wants_blocks and candidates is not None:
                blocks.append(top_blocks(scores, num_visible, *candidates))
        return torch.cat(selected), torch.cat(blocks) if blocks else None

    def candidates(
        self,
        query: Tensor,
        head_weights: Tensor,
        keys: Any,
        stream: Any,
        blocks: Tensor,
        block_size: int,
        count: int,
        round_scores: bool,
    ) -> Tensor:
        """``index_candidates``."""
        inside = torch.arange(block_size, device=blocks.device)
        entries = (blocks.unsqueeze(-1) * block_size + inside).flatten(1)
        num_visible = stream.num_visible.unsqueeze(-1)
        allowed = (blocks.repeat_interleave(block_size, dim=1) >= 0) & (entries < num_visible)
        place = top_entries(self.scores(num_visible, entries), allowed, count)
        return torch.where(place < 0, -1, entries.gather(1, place.clamp_min(0)))
