"""Cache tensors of the model, sized from its configuration (spec 5.2, design contract 2).

Global memory (main entries and index keys) is addressed by block, per-sequence memory (window rings and compressor
state) by state slot. Who owns which block or slot is the host's business (``kvcache/``).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.config.model import TextConfig
from deepinfer.ops.numerics import Numerics
from deepinfer.ops.records import RecordStore

BLOCK_TOKENS = 128
"""Tokens per block, over all streams."""


@dataclass(frozen=True, slots=True)
class CacheGeometry:
    """Sizes that are shared by all layers."""

    num_blocks: int
    num_slots: int
    window: int
    """Tokens that the window attention sees, the query included."""
    ring_length: int
    """Slots per window ring: the window plus room for tokens that may be taken back."""
    pair_ring_length: int
    """Slots per compressor ring."""

    @classmethod
    def of(cls, config: TextConfig, num_blocks: int, num_slots: int, max_backtracking: int) -> CacheGeometry:
        """``max_backtracking``: tokens that speculation may append and take back (draft length + 1, at least 6)."""
        return cls(
            num_blocks=num_blocks,
            num_slots=num_slots,
            window=config.sliding_window,
            ring_length=config.sliding_window + max_backtracking,
            pair_ring_length=2 + max(0, max_backtracking - 1),
        )


@dataclass(frozen=True, slots=True)
class LayerCaches:
    """Memory of one layer. Layers that read another layer's stream own none themselves."""

    window: RecordStore
    entries: RecordStore | None = None
    index_keys: RecordStore | None = None
    pairs: Tensor | None = None
    """``[slots * pair ring, 2, head_dim]`` float32: (score, value) of recent tokens of a ratio-2 compressor."""


class ModelCaches:
    """All cache tensors of one model on one device."""

    def __init__(
        self,
        config: TextConfig,
        numerics: Numerics,
        geometry: CacheGeometry,
        device: torch.device,
        num_draft_stages: int = 0,
    ) -> None:
        self.geometry = geometry
        self.layers: list[LayerCaches] = []
        self.draft: list[LayerCaches] = []
        """Rings of the draft stages: context keys made from the backbone's features."""
        head_dim = config.head_dim
        for plan in config.layers:
            window = RecordStore.allocate(
                numerics.window_format(head_dim), geometry.num_slots * geometry.ring_length, device
            )
            entries = index_keys = pairs = None
            if plan.owns_kv:
                num_entries = geometry.num_blocks * (BLOCK_TOKENS // plan.ratio)
                entry_format = numerics.entry_format(head_dim, config.use_fp4_sparse_kv)
                entries = RecordStore.allocate(entry_format, num_entries, device)
                if plan.owns_index_keys:
                    key_format = numerics.index_key_format(config.index_head_dim)
                    index_keys = RecordStore.allocate(key_format, num_entries, device)
                if plan.ratio == 2:
                    shape = (geometry.num_slots * geometry.pair_ring_length, 2, head_dim)
                    pairs = torch.zeros(shape, dtype=torch.float32, device=device)
            self.layers.append(LayerCaches(window, entries, index_keys, pairs))
        for _stage in range(num_draft_stages):
            window = RecordStore.allocate(
                numerics.window_format(head_dim), geometry.num_slots * geometry.ring_length, device
            )
            self.draft.append(LayerCaches(window))

    @property
    def num_bytes(self) -> int:
        """Bytes of all cache tensors."""
        total = 0
        for layer in (*self.layers, *self.draft):
            stores = (layer.window, layer.entries, layer.index_keys)
            total += sum(store.num_bytes for store in stores if store is not None)
            if layer.pairs is not None:
                total += layer.pairs.numel() * layer.pairs.element_size()
        return total
