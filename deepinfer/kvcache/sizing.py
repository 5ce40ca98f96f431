"""Arithmetic of cache memory: bytes per block, bytes per state slot, and how many blocks fit (spec 1.3 and 5.2)."""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer.config.model import ModelConfig, TextConfig
from deepinfer.errors import CapacityError, ConfigError
from deepinfer.kvcache.block_pool import BLOCK_TOKENS

MAX_BACKTRACKING = 6
"""Rows that verification may take back: the window rings are this much longer than the window (spec 5.2)."""

_FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True)
class CacheItem:
    """One line of the arithmetic: ``count`` records of ``record_bytes`` bytes."""

    name: str
    count: int
    record_bytes: int

    @property
    def num_bytes(self) -> int:
        return self.count * self.record_bytes


@dataclass(frozen=True, slots=True)
class CacheSizes:
    """Sizes of one block (grows with the tokens) and of one state slot (constant per sequence)."""

    numerics: str
    block_items: tuple[CacheItem, ...]
    slot_items: tuple[CacheItem, ...]

    @property
    def block_bytes(self) -> int:
        return sum(item.num_bytes for item in self.block_items)

    @property
    def slot_bytes(self) -> int:
        return sum(item.num_bytes for item in self.slot_items)

    @property
    def token_bytes(self) -> float:
        """Growth per token, in bytes."""
        return self.block_bytes / BLOCK_TOKENS

    def explain(self) -> str:
        """The arithmetic as text, one line per item."""
        lines = [f"KV block of {BLOCK_TOKENS} tokens ({self.numerics}): {self.block_bytes:,} bytes"]
        lines += [_line(item) for item in self.block_items]
        lines.append(f"state slot of one sequence ({self.numerics}): {self.slot_bytes:,} bytes")
        lines += [_line(item) for item in self.slot_items]
        lines.append(f"growth per token: {self.token_bytes:,.1f} bytes")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class CacheBudget:
    """What a given amount of memory holds. ``num_blocks`` and ``num_slots`` count the null block and the null slot."""

    memory_bytes: int
    num_blocks: int
    num_slots: int
    sizes: CacheSizes

    @property
    def num_tokens(self) -> int:
        """Tokens that all usable blocks together hold."""
        return (self.num_blocks - 1) * BLOCK_TOKENS

    def explain(self) -> str:
        """How the numbers came about, as text."""
        slots, blocks = self.num_slots * self.sizes.slot_bytes, self.num_blocks * self.sizes.block_bytes
        return "\n".join(
            (
                self.sizes.explain(),
                f"cache memory: {self.memory_bytes:,} bytes",
                f"  state slots: {self.num_slots} x {self.sizes.slot_bytes:,} = {slots:,} bytes",
                f"  KV blocks: {self.num_blocks} x {self.sizes.block_bytes:,} = {blocks:,} bytes",
                f"  room for {self.num_tokens:,} tokens (one block and one slot are padding)",
            )
        )


def _line(item: CacheItem) -> str:
    return f"  {item.name}: {item.count:,} x {item.record_bytes:,} = {item.num_bytes:,} bytes"


def cache_sizes(config: ModelConfig, numerics: str, max_backtracking: int = MAX_BACKTRACKING) -> CacheSizes:
    """Derive record sizes and counts from the model.

    Args:
        config: the model.
        numerics: ``"faithful"`` or ``"fast"`` (packed FP4 and FP8 records) or ``"float32"`` (4 bytes per value).
        max_backtracking: rows that may be taken back; at least the draft length + 1 when drafts are verified.
    Raises:
        ConfigError: unknown numerics mode or negative ``max_backtracking``.
    Source: spec 5.2.
    """
    if numerics not in ("faithful", "fast", "float32"):
        raise ConfigError(
            f"numerics is {numerics!r}", why="no cache layout exists for it", fix="use faithful, fast or float32"
        )
    if max_backtracking < 0:
        raise ConfigError(f"max_backtracking is {max_backtracking}", why="it is a number of rows", fix="use 6")
    text = config.text
    return CacheSizes(
        numerics=numerics,
        block_items=_block_items(text, packed=numerics != "float32"),
        slot_items=_slot_items(text, packed=numerics != "float32", max_backtracking=max_backtracking),
    )


def _block_items(text: TextConfig, packed: bool) -> tuple[CacheItem, ...]:
    main = _main_bytes(text.head_dim, text.use_fp4_sparse_kv, packed)
    index = _index_bytes(text.index_head_dim, packed)
    items = []
    for layer in text.layers:
        if layer.owns_kv:
            items.append(CacheItem(f"layer {layer.layer_id} main KV", BLOCK_TOKENS // layer.ratio, main))
        if layer.owns_index_keys:
            items.append(CacheItem(f"layer {layer.layer_id} index keys", BLOCK_TOKENS // layer.ratio, index))
    return tuple(items)


def _slot_items(text: TextConfig, packed: bool, max_backtracking: int) -> tuple[CacheItem, ...]:
    ring = text.sliding_window + max_backtracking
    window = _window_bytes(text.head_dim, packed)
    layers, stages = text.num_hidden_layers, text.num_nextn_predict_layers
    items = [CacheItem(f"window rings, {layers} layers of {ring} keys", layers * ring, window)]
    if stages:
        items.append(CacheItem(f"window rings, {stages} draft stages of {ring} keys", stages * ring, window))
    compressors = sum(layer.ratio > 1 for layer in text.kv_source_layers)
    if compressors:
        depth = 2 + max(0, max_backtracking - 1)
        state = 2 * text.head_dim * _FLOAT_BYTES  # score and value of one token, fp32 in both modes
        items.append(CacheItem(f"compressor state, {compressors} layers of {depth} tokens", compressors * depth, state))
    return tuple(items)


def _main_bytes(width: int, use_fp4: bool, packed: bool) -> int:
    if not packed:
        return width * _FLOAT_BYTES
    if use_fp4:
        return width // 2 + width // 16  # two codes per byte, an e4m3 scale per 16
    return width + width // 32  # e4m3 codes, a ue8m0 scale per 32


def _index_bytes(width: int, packed: bool) -> int:
    return width // 2 + width // 32 if packed else width * _FLOAT_BYTES


def _window_bytes(width: int, packed: bool) -> int:
    return width + width // 32 if packed else width * _FLOAT_BYTES


def blocks_for(memory_bytes: int, sizes: CacheSizes, num_slots: int, min_tokens: int = 1) -> CacheBudget:
    """Divide cache memory into ``num_slots`` state slots and as many blocks as fit behind them.

    Args:
        memory_bytes: memory for all caches of one device.
        sizes: from :func:`cache_sizes`.
        num_slots: state slots, the null slot included.
        min_tokens: tokens that have to fit, usually ``max_model_len``.
    Raises:
        CapacityError: fewer than ``min_tokens`` tokens fit; the message holds the arithmetic.
    """
    assert num_slots >= 2, f"{num_slots=}: one null slot and one usable slot at least"
    if sizes.block_bytes == 0:  # a model of sliding windows only: a block is bookkeeping without storage
        num_blocks = 1 + max(1, num_slots - 1) * -(-max(min_tokens, 1) // BLOCK_TOKENS)
    else:
        num_blocks = max(0, memory_bytes - num_slots * sizes.slot_bytes) // sizes.block_bytes
    budget = CacheBudget(memory_bytes, num_blocks, num_slots, sizes)
    fits = num_slots * sizes.slot_bytes + num_blocks * sizes.block_bytes <= memory_bytes
    if not fits or budget.num_tokens < max(min_tokens, 1):
        needed = num_slots * sizes.slot_bytes + (1 + -(-max(min_tokens, 1) // BLOCK_TOKENS)) * sizes.block_bytes
        raise CapacityError(
            f"{memory_bytes:,} bytes of cache memory",
            why=f"{num_slots} state slots and room for {max(min_tokens, 1):,} tokens take {needed:,} bytes:\n"
            f"{budget.explain()}\n",
            fix="give the cache more memory, or lower max_num_seqs or max_model_len",
        )
    return budget
