"""How a device's memory is shared out: weights, what a step needs, state slots, and KV blocks from the rest.

Made before anything is allocated, so that ``deepinfer doctor`` can show it and a configuration that cannot fit is
refused before hundreds of gigabytes are read. What is free once the weights are there is a measurement, and decides in
the end (:func:`deepinfer.config.cache_size.size_cache`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from deepinfer.config.model import TextConfig
from deepinfer.errors import CapacityError
from deepinfer.kvcache.block_pool import BLOCK_TOKENS
from deepinfer.kvcache.sizing import CacheSizes
from deepinfer.kvcache.sublayer_memory import sublayer_bytes

CONTEXT = "context and kernels"
CONTEXT_BYTES = 700 * 2**20
"""What a CUDA context, its libraries and loaded kernels take."""

BYTES_PER_GRAPH = 24 * 2**20
"""What one captured forward or draft takes, its nodes and its share of the common pool."""
BYTES_PER_SAMPLER_GRAPH = 4 * 2**20
"""The same of a captured sampler: a dozen nodes. Logits are counted apart; those of all sizes are in one place."""

HEAD_ROWS = 64
"""Rows to whose multiple batch-invariant products of the vocabulary are filled up."""
INDEX_SCRATCH_BYTES = 256 * 2**20
"""Most that the scores of the index take at once."""
_ACTIVATION_BYTES, _FLOAT_BYTES = 2, 4


@dataclass(frozen=True, slots=True)
class MemoryItem:
    """One line of the plan."""

    name: str
    num_bytes: int
    arithmetic: str = ""
    """How the number comes about."""

    def __str__(self) -> str:
        how = f" = {self.arithmetic}" if self.arithmetic else ""
        return f"{self.name}: {self.num_bytes:,} bytes{how}"


@dataclass(frozen=True, slots=True)
class StepShape:
    """The largest step, as far as memory goes."""

    max_rows: int
    """Tokens of one step."""
    max_sampled_rows: int
    """Rows whose logits exist at once."""
    num_graphs: int = 0
    """CUDA graphs of forwards and drafts that are kept."""
    num_sampler_graphs: int = 0
    num_drafts: int = 0
    """Tokens of a draft's block."""
    max_graph_samples: int = 0
    """Rows of the largest sampling that is a graph."""
    max_graph_drafts: int = 0
    """Sequences of the largest draft that is a graph."""
    max_graph_rows: int = 0
    """Rows of the largest captured forward."""
    is_fast: bool = False
    """Numerics ``fast``."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Who gets what. ``num_blocks`` and ``num_slots`` count the null block and the null slot."""

    device_bytes: int
    weights: tuple[MemoryItem, ...]
    reserves: tuple[MemoryItem, ...]
    fraction: float
    num_slots: int
    num_blocks: int
    num_wanted: int
    """Blocks that all sequences at full length would use."""
    sizes: CacheSizes

    @property
    def weight_bytes(self) -> int:
        return sum(item.num_bytes for item in self.weights)

    @property
    def reserve_bytes(self) -> int:
        return sum(item.num_bytes for item in self.reserves)

    @property
    def slot_bytes(self) -> int:
        """All state slots together."""
        return self.num_slots * self.sizes.slot_bytes

    @property
    def block_bytes(self) -> int:
        """All blocks together."""
        return self.num_blocks * self.sizes.block_bytes

    @property
    def unused_bytes(self) -> int:
        """What nobody was given."""
        used = self.weight_bytes + self.reserve_bytes + self.slot_bytes + self.block_bytes
        return self.device_bytes - used

    @property
    def num_tokens(self) -> int:
        """Tokens that the usable blocks hold."""
        return (self.num_blocks - 1) * BLOCK_TOKENS

    def lines(self) -> list[str]:
        """The arithmetic, one line per item."""
        left = self.device_bytes - self.weight_bytes - self.reserve_bytes
        budget = int(max(0, left) * self.fraction)
        why = "all that could be used" if self.num_blocks == self.num_wanted else f"of {self.num_wanted:,} wanted"
        per_slot, per_block = self.sizes.slot_bytes, self.sizes.block_bytes
        return [
            f"device memory: {self.device_bytes:,} bytes",
            f"weights: {self.weight_bytes:,} bytes",
            *(f"  {item}" for item in self.weights),
            f"steps: {self.reserve_bytes:,} bytes",
            *(f"  {item}" for item in self.reserves),
            f"caches: {self.fraction:g} x ({self.device_bytes:,} - {self.weight_bytes:,} - {self.reserve_bytes:,})"
            f" = {budget:,} bytes",
            f"  state slots: {self.num_slots:,} x {per_slot:,} = {self.slot_bytes:,} bytes",
            f"  KV blocks: {self.num_blocks:,} x {per_block:,} = {self.block_bytes:,} bytes ({why})",
            f"room for {self.num_tokens:,} tokens in blocks of {BLOCK_TOKENS}; {self.unused_bytes:,} bytes stay free",
        ]


def step_reserves(text: TextConfig, shape: StepShape) -> tuple[MemoryItem, ...]:
    """Memory of the largest step besides weights and caches, an upper estimate: what lives at the same time.

    Args:
        text: the model.
        shape: of the largest step.
    """
    rows, sampled, hidden = shape.max_rows, shape.max_sampled_rows, text.hidden_size
    trunk = 3 * text.hc_mult * hidden  # old, new, and one in flight
    sublayers = sublayer_bytes(text, rows, shape.is_fast)
    largest = ", ".join(f"{name} {size:,}" for name, size in sublayers.items())
    features = len(text.dspark_target_layer_ids) * hidden if shape.num_drafts else 0
    candidates = text.candidate_topk_blocks * text.candidate_block_size if text.candidate_source_layer_id else 0
    selection = text.index_topk + candidates

    def item(name: str, count: int, width: int, each: int) -> MemoryItem:
        return MemoryItem(name, count * width * each, f"{count:,} rows x {width:,} x {each} bytes")

    return (
        MemoryItem(CONTEXT, CONTEXT_BYTES),
        _graphs(shape),
        _captured_step(text, shape),
        item("streams", rows, trunk, _ACTIVATION_BYTES),
        MemoryItem("sublayer", max(sublayers.values()), f"{rows:,} rows, the largest of: {largest} bytes"),
        item("features for drafts", rows, features, _ACTIVATION_BYTES),
        MemoryItem("index scores", INDEX_SCRATCH_BYTES if text.index_source_layer_ids else 0),
        item("selection", rows, selection, _FLOAT_BYTES),
        item("logits of captured steps", _filled_up(shape.max_graph_samples), text.vocab_size, _FLOAT_BYTES),
        item("logits of captured drafts", _captured_logits(shape), text.vocab_size, _FLOAT_BYTES),
        item("logits and their copy", sampled + _filled_up(sampled), text.vocab_size, _FLOAT_BYTES),
    )


def _graphs(shape: StepShape) -> MemoryItem:
    kinds = [(shape.num_graphs, BYTES_PER_GRAPH), (shape.num_sampler_graphs, BYTES_PER_SAMPLER_GRAPH)]
    arithmetic = " + ".join(f"{count} x {each / 2**20:.0f} MiB" for count, each in kinds)
    return MemoryItem("graphs", sum(count * each for count, each in kinds), arithmetic)


def _captured_step(text: TextConfig, shape: StepShape) -> MemoryItem:
    """What the largest captured step takes, in the memory of the graphs, which no launched step can use."""
    rows = shape.max_graph_rows
    if not rows:
        return MemoryItem("captured steps", 0)
    trunk = 3 * text.hc_mult * text.hidden_size * _ACTIVATION_BYTES
    largest = max(sublayer_bytes(text, rows, shape.is_fast).values())
    scores = INDEX_SCRATCH_BYTES if text.index_source_layer_ids else 0
    arithmetic = f"{rows:,} rows x {trunk:,} bytes + sublayer {largest:,} + index scores {scores:,}"
    return MemoryItem("captured steps", rows * trunk + largest + scores, arithmetic)


def _captured_logits(shape: StepShape) -> int:
    """Rows of logits in the memory of the graphs, which nobody else can use: those of all slots of the largest draft,
    and three of one slot at a time (its own, their Markov part, one in flight). The smaller drafts live in the same."""
    requests = shape.max_graph_drafts
    return _filled_up(requests * shape.num_drafts) + 3 * _filled_up(requests)


def _filled_up(rows: int) -> int:
    return -(-rows // HEAD_ROWS) * HEAD_ROWS


def bytes_beside_context(reserves: Iterable[MemoryItem]) -> int:
    """What steps are still going to take once the context is there and the weights are loaded."""
    return sum(item.num_bytes for item in reserves if item.name != CONTEXT)


def plan_memory(
    *,
    device_bytes: int,
    weights: Mapping[str, int],
    reserves: tuple[MemoryItem, ...],
    sizes: CacheSizes,
    num_slots: int,
    max_num_seqs: int,
    max_model_len: int,
    fraction: float = 1.0,
    num_blocks: int | None = None,
) -> MemoryPlan:
    """Share out the memory of one device.

    Args:
        device_bytes: memory that this process may use in all.
        weights: bytes of the weights in the form that they have on the device, by kind.
        reserves: what a step needs, see :func:`step_reserves`.
        sizes: from :func:`deepinfer.kvcache.sizing.cache_sizes`.
        num_slots: state slots, the null slot included.
        max_num_seqs, max_model_len: more blocks than these can use are not made.
        fraction: share of what weights and steps leave that goes to the caches.
        num_blocks: a given number of blocks; None for as many as fit and can be used.
    Raises:
        CapacityError: not even one sequence of ``max_model_len`` fits, or the given blocks do not; the message has the
            arithmetic.
    """
    assert 0 < fraction <= 1, f"{fraction=}"
    per_sequence = -(-max_model_len // BLOCK_TOKENS)
    wanted = max_num_seqs * per_sequence + 1
    items = tuple(MemoryItem(name, size) for name, size in weights.items())
    left = device_bytes - sum(weights.values()) - sum(item.num_bytes for item in reserves)
    budget = int(max(0, left) * fraction) - num_slots * sizes.slot_bytes
    if sizes.block_bytes:
        fitting = max(0, budget) // sizes.block_bytes
    else:  # a model of sliding windows only: blocks are bookkeeping
        fitting = wanted if budget >= 0 else 0
    chosen = min(wanted, fitting) if num_blocks is None else num_blocks
    plan = MemoryPlan(device_bytes, items, reserves, fraction, num_slots, chosen, wanted, sizes)
    needed = 1 + per_sequence if num_blocks is None else num_blocks
    if fitting < needed:
        what = "the given number of blocks" if num_blocks is not None else f"a sequence of {max_model_len:,} tokens"
        raise CapacityError(
            f"{device_bytes:,} bytes of device memory hold {fitting:,} KV blocks",
            why=f"{what} needs {needed:,}, the null block included:\n" + "\n".join(plan.lines()) + "\n",
            fix="lower max_model_len, max_num_seqs or the rows of a step, keep fewer layers, or use a larger device",
        )
    return plan
