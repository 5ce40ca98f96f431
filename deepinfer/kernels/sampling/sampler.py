"""The sampler on the device: arg-max, temperature, min-p, top-p, top-k and the Gumbel race, without sorting.

A sampled token is ``argmax(score + noise)`` over what top-p and top-k keep, and these keep a *prefix* of the tokens in
descending order of score (equal scores by ascending id). So instead of finding the prefix first, the race is run over
all tokens and its winner is checked: it is the answer if the mass (and the number) of the tokens before it allows it.
If not, everything from it on is dropped too, and the winner among the tokens before it is next. That chain is short: a
link is kept with a probability of about the kept share of the mass, and the chain ends at the most likely token at the
latest, which is always kept.

Two launches, a third if a row has top-p or top-k:

1. maximum of each row, and with top-k maxima of groups of 128 tokens: the k-th largest group maximum bounds the k-th
   largest token from below, so the race needs no token under it;
2. the race. Greedy rows end here, and so do rows without top-p and top-k. The others list the tokens that beat the most
   likely token in the race: no other token can be the answer;
3. mass and number of the tokens before each of the first four links of the chain, in one pass. The last program of a
   row decides. Longer chains (rare) and lists that overflow are followed by that program, slowly.

All sums are of integers and all maxima of distinct keys, so the result does not depend on how a row is split, nor on
its neighbours. It equals :class:`deepinfer.sampling.sampler.Sampler` bit for bit, noise included, with one exception:
the masses behind top-p go through ``exp``, which differs in its last bit between a CPU and a GPU. There the threshold
may fall on another side where the mass before a token is within about 1e-7 of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from deepinfer.kernels.sampling.gumbel import GOLDEN, gumbel_of_bits, mix64, noise_bound, row_key

GREEDY, FULL, TRUNCATED = 0, 1, 2
"""``SamplingRows.kind``."""

_BLOCK = 1024
_GROUP = 128  # tokens per group maximum
_LIST = 2048  # contenders that are kept per row
_CHAIN = tl.constexpr(4)  # links that are checked in one pass
_LOWEST = tl.constexpr(-(2**63))
_HIGHEST = tl.constexpr(2**63 - 1)
_ID_MASK = tl.constexpr(2**32 - 1)
_MASS_SCALE = tl.constexpr(2.0**44)
_ORDINAL_OF_INF = tl.constexpr(0x7F800000)
_ORDINAL_OF_MINUS_INF = tl.constexpr(-0x7F800001)

_HAS_LIBDEVICE = tl.constexpr(not triton.knobs.runtime.interpret)


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Parameters of all rows, each ``[rows]`` on the device."""

    kind: Tensor
    """int32: :data:`GREEDY`, :data:`FULL` or :data:`TRUNCATED` (top-p below 1 or top-k below the vocabulary)."""
    temperature: Tensor
    """float32, above 0 (ignored in greedy rows)."""
    min_log_p: Tensor
    """float32: logarithm of min_p, -inf for off."""
    top_p: Tensor
    """float64, 1 for off."""
    top_k: Tensor
    """int32, 1 to vocab; vocab for off."""
    seeds: Tensor
    """int64."""
    positions: Tensor
    """int64: absolute position that the row's token will have."""
    masks: Tensor | None = None
    """int32 ``[masks, ceil(vocab / 32)]``: tokens that may be sampled, bit ``i % 32`` of word ``i // 32`` for token i.
    None: all of them in all rows."""
    mask_rows: Tensor | None = None
    """int32 ``[rows]``: which mask a row has."""

    def check(self, rows: int) -> None:
        """Assert shapes and dtypes."""
        expected = {
            "kind": torch.int32,
            "temperature": torch.float32,
            "min_log_p": torch.float32,
            "top_p": torch.float64,
            "top_k": torch.int32,
            "seeds": torch.int64,
            "positions": torch.int64,
        }
        for name, dtype in expected.items():
            tensor = getattr(self, name)
            assert tensor.shape == (rows,), f"{name}: {tensor.shape=}, {rows=}"
            assert tensor.dtype == dtype, f"{name}: {tensor.dtype=}"
        if self.masks is not None:
            assert self.masks.dtype == torch.int32, f"{self.masks.dtype=}"
            assert self.masks.is_contiguous(), f"{self.masks.stride()=}"
            assert self.mask_rows is not None, "masks without mask_rows"
            assert self.mask_rows.shape == (rows,), f"{self.mask_rows.shape=}, {rows=}"


class SamplingWorkspace:
    """Scratch memory of the kernels; one per stream that samples.

    Args:
        max_rows: rows of the largest call.
        vocab_size: at most ``2**18``.
        gumbel_table: from :func:`deepinfer.kernels.sampling.gumbel.pack_gumbel_table`.
        target_programs: programs per launch aimed at when a row is split. It does not change a result.
    """

    def __init__(self, max_rows: int, vocab_size: int, gumbel_table: Tensor, *, target_programs: int = 1024) -> None:
        assert 0 < vocab_size <= 1 << 18, f"{vocab_size=}"
        device = gumbel_table.device
        self.max_rows, self.vocab_size = max_rows, vocab_size
        self.table = gumbel_table
        self.target_programs = target_programs
        self.num_blocks = triton.cdiv(vocab_size, _BLOCK)
        self.num_groups = triton.cdiv(vocab_size, _GROUP)

        def empty(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.empty((max_rows, *shape), dtype=dtype, device=device)

        self.maxima = empty(self.num_blocks)
        self.best = empty(self.num_blocks)
        self.mass = empty(self.num_blocks)
        self.before = empty(self.num_blocks, 2 * _CHAIN.value)
        self.group_maxima = empty(self.num_groups, dtype=torch.float32)
        self.list_order = empty(_LIST)
        self.list_race = empty(_LIST)
        self.list_size = empty(dtype=torch.int32)
        self.arrivals = torch.zeros((2, max_rows), dtype=torch.int32, device=device)
        """Programs of a row that are done, for the second and the third launch; the last one sets it back to 0."""

    def splits_of(self, rows: int) -> tuple[int, int]:
        """Programs per row, and blocks of 1024 tokens per program."""
        wanted = max(1, min(self.num_blocks, triton.cdiv(self.target_programs, max(rows, 1))))
        blocks = triton.cdiv(self.num_blocks, wanted)
        return triton.cdiv(self.num_blocks, blocks), blocks


@triton.jit
def _ordinal(value):
    """Float32 as an int32 of the same order; both zeros are equal."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _value_of(ordinal):
    """Inverse of :func:`_ordinal`."""
    bits = ordinal ^ ((ordinal >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _key(value, ids):
    """Distinct int64 keys in the order of ``value``, of equals the lower id first (largest)."""
    return (_ordinal(value).to(tl.int64) << 32) + (ids.to(tl.int64) ^ _ID_MASK)


@triton.jit
def _id_of(key):
    return ((key & _ID_MASK) ^ _ID_MASK).to(tl.int32)


@triton.jit
def _scores(x, row_max, temperature, min_log_p):
    """Log-probabilities up to a constant, rounded as the reference rounds them."""
    scores = x - row_max
    if temperature != 1.0:
        scores = tl.div_rn(scores, temperature)
    return tl.where(scores < min_log_p, float("-inf"), scores)


@triton.jit
def _load(row_ptr, ids, vocab, mask_ptr, MASKED: tl.constexpr):
    """Logits of tokens, -inf outside the vocabulary and where the row's mask has no bit."""
    x = tl.load(row_ptr + ids, mask=ids < vocab, other=float("-inf"))
    if MASKED:
        word = tl.load(mask_ptr + ids // 32, mask=ids < vocab, other=0)
        x = tl.where(((word >> (ids % 32)) & 1) != 0, x, float("-inf"))
    return x


@triton.jit
def _mask_of(mask_ptr, mask_row_ptr, row, vocab, MASKED: tl.constexpr):
    """The mask of a row."""
    if MASKED:
        mask_ptr += tl.load(mask_row_ptr + row).to(tl.int64) * ((vocab + 31) // 32)
    return mask_ptr


@triton.jit
def _masses(scores):
    """Integer masses. libdevice has the ``exp`` that torch uses on a GPU; Triton's own is less accurate."""
    if _HAS_LIBDEVICE:
        probability = libdevice.exp(scores)
    else:
        probability = tl.exp(scores)
    return (probability * _MASS_SCALE).to(tl.int64)


@triton.jit
def _arrive(counter_ptr, splits):
    """Count this program; whether it is the last one of its row. What others stored before is then visible."""
    tl.debug_barrier()
    is_last = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu") == splits - 1
    if is_last:
        tl.store(counter_ptr, 0)
    tl.debug_barrier()
    return is_last


@triton.jit
def _maximum_kernel(
    logits_ptr,
    kind_ptr,
    top_k_ptr,
    mask_ptr,
    mask_row_ptr,
    maxima_ptr,
    group_ptr,
    list_size_ptr,
    stride,
    vocab,
    num_blocks,
    num_groups,
    blocks_per_split,
    MASKED: tl.constexpr,
    TRUNCATES: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    offsets = tl.arange(0, BLOCK)
    if TRUNCATES:
        needs_groups = (tl.load(kind_ptr + row) == 2) & (tl.load(top_k_ptr + row) <= num_groups)
    mask_ptr = _mask_of(mask_ptr, mask_row_ptr, row, vocab, MASKED)
    first = split * blocks_per_split
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    where = tl.zeros([BLOCK], tl.int32)
    for block in range(first, tl.minimum(first + blocks_per_split, num_blocks)):
        ids = block * BLOCK + offsets
        raw = tl.load(logits_ptr + row * stride + ids, mask=ids < vocab, other=float("-inf"))
        x = raw
        if MASKED:
            x = _load(logits_ptr + row * stride, ids, vocab, mask_ptr, MASKED)
        # NaN and +inf make a row bad, masked or not.
        x = tl.where((raw != raw) | (raw == float("inf")), float("inf"), x)
        is_larger = x > largest
        largest = tl.where(is_larger, x, largest)
        where = tl.where(is_larger, ids, where)
        if TRUNCATES:
            if needs_groups:
                groups = block * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
                top = tl.max(tl.reshape(x, (BLOCK // GROUP, GROUP)), axis=1)
                tl.store(group_ptr + row * num_groups + groups, top, mask=groups < num_groups)
    tl.store(maxima_ptr + row * num_blocks + split, tl.max(_key(largest, where), axis=0))
    if TRUNCATES:
        if split == 0:
            tl.store(list_size_ptr + row, 0)


@triton.jit
def _row_maximum(maxima_ptr, row, num_blocks, splits, SPLITS: tl.constexpr):
    """Key of the largest logit of a row."""
    each = tl.arange(0, SPLITS)
    return tl.max(tl.load(maxima_ptr + row * num_blocks + each, mask=each < splits, other=_LOWEST), axis=0)


@triton.jit
def _top_k_floor(group_ptr, row, num_groups, top_k, GROUPS: tl.constexpr):
    """A lower bound of the ``top_k``-th largest logit: that of the group maxima, by their 16 leading bits."""
    each = tl.arange(0, GROUPS)
    maxima = tl.load(group_ptr + row * num_groups + each, mask=each < num_groups, other=float("-inf"))
    leading = _ordinal(maxima) >> 16
    floor = -32768
    for bit in tl.static_range(16):
        middle = floor + (1 << (15 - bit))
        enough = tl.sum((leading >= middle).to(tl.int32), axis=0) >= top_k
        floor = tl.where(enough, middle, floor)
    # Below the ordinal of -inf there are only NaN.
    return tl.where(floor > (_ORDINAL_OF_MINUS_INF >> 16), _value_of(floor << 16), float("-inf"))


@triton.jit
def _race_of_block(bits, scores, ids, allowed, table_ptr):
    """Race keys of a block, lowest where not allowed."""
    race = gumbel_of_bits(bits, table_ptr, allowed) + scores
    return tl.where(allowed, _key(race, ids), _LOWEST)


@triton.jit
def _race_kernel(
    logits_ptr,
    kind_ptr,
    temperature_ptr,
    min_log_p_ptr,
    top_p_ptr,
    top_k_ptr,
    seed_ptr,
    position_ptr,
    table_ptr,
    mask_ptr,
    mask_row_ptr,
    maxima_ptr,
    group_ptr,
    best_ptr,
    mass_ptr,
    order_ptr,
    race_ptr,
    list_size_ptr,
    arrival_ptr,
    token_ptr,
    bad_ptr,
    stride,
    vocab,
    num_blocks,
    num_groups,
    blocks_per_split,
    splits,
    MASKED: tl.constexpr,
    TRUNCATES: tl.constexpr,
    PURPOSE: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    GROUPS: tl.constexpr,
    LIST: tl.constexpr,
):
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    kind = tl.load(kind_ptr + row)
    top_key = _row_maximum(maxima_ptr, row, num_blocks, splits, SPLITS)
    ordinal = (top_key >> 32).to(tl.int32)
    is_bad = (ordinal >= _ORDINAL_OF_INF) | (ordinal <= _ORDINAL_OF_MINUS_INF)
    if split == 0:
        tl.store(bad_ptr + row, is_bad)
        tl.store(token_ptr + row, tl.where(is_bad, 0, _id_of(top_key)).to(tl.int64))  # the answer of a greedy row
    if (kind != 0) & (is_bad == 0):
        row_max = _value_of(ordinal)
        temperature, min_log_p = tl.load(temperature_ptr + row), tl.load(min_log_p_ptr + row)
        floor = row_max * 0.0 - float("inf")
        if TRUNCATES:
            needs_mass = (kind == 2) & (tl.load(top_p_ptr + row) < 1.0)
            top_k = tl.load(top_k_ptr + row)
            if (kind == 2) & (top_k <= num_groups):
                floor = _top_k_floor(group_ptr, row, num_groups, top_k, GROUPS)
                floor = _scores(floor, row_max, temperature, float("-inf"))
        key = row_key(tl.load(seed_ptr + row), tl.load(position_ptr + row), PURPOSE)
        mask_ptr = _mask_of(mask_ptr, mask_row_ptr, row, vocab, MASKED)
        offsets = tl.arange(0, BLOCK)
        steps = (offsets + 1).to(tl.uint64) * GOLDEN
        # The most likely token has score 0: whoever wins is not behind it.
        own = mix64(key + (_id_of(top_key) + 1).to(tl.uint64) * GOLDEN)
        to_beat = gumbel_of_bits(own, table_ptr, True)
        best = tl.full([BLOCK], _LOWEST, tl.int64)
        mass = tl.zeros([BLOCK], tl.int64)
        first = split * blocks_per_split
        STEP: tl.constexpr = (BLOCK * GOLDEN) % 2**64
        base = key + (first * BLOCK).to(tl.uint64) * GOLDEN
        for block in range(first, tl.minimum(first + blocks_per_split, num_blocks)):
            ids = block * BLOCK + offsets
            x = _load(logits_ptr + row * stride, ids, vocab, mask_ptr, MASKED)
            scores = _scores(x, row_max, temperature, min_log_p)
            if TRUNCATES:
                if needs_mass:
                    mass += _masses(scores)
            bits = mix64(steps + base)
            base += STEP
            allowed = (scores >= floor) & (scores > float("-inf")) & (scores + noise_bound(bits) >= to_beat)
            if tl.max(allowed.to(tl.int32), axis=0) > 0:
                race = _race_of_block(bits, scores, ids, allowed, table_ptr)
                best = tl.maximum(best, race)
                if TRUNCATES:
                    if kind == 2:
                        listed = race >= (_ordinal(to_beat).to(tl.int64) << 32)
                        slot = tl.atomic_add(list_size_ptr + row + tl.zeros_like(ids), 1, mask=listed, sem="relaxed")
                        inside = listed & (slot < LIST)
                        tl.store(order_ptr + row * LIST + slot, _key(scores, ids), mask=inside)
                        tl.store(race_ptr + row * LIST + slot, race, mask=inside)
        tl.store(best_ptr + row * num_blocks + split, tl.max(best, axis=0))
        if TRUNCATES:
            tl.store(mass_ptr + row * num_blocks + split, tl.sum(mass, axis=0))
        if kind == 1:
            if _arrive(arrival_ptr + row, splits):
                each = tl.arange(0, SPLITS)
                partial = tl.load(
                    best_ptr + row * num_blocks + each, mask=each < splits, other=_LOWEST, cache_modifier=".cg"
                )
                tl.store(token_ptr + row, _id_of(tl.max(partial, axis=0)).to(tl.int64))


@triton.jit
def _order_key_of(logits_row_ptr, token, row_max, temperature, min_log_p):
    scores = _scores(tl.load(logits_row_ptr + token), row_max, temperature, min_log_p)
    return _key(scores, token)


@triton.jit
def _next_link(
    logits_row_ptr,
    table_ptr,
    mask_ptr,
    key,
    link,
    row_max,
    temperature,
    min_log_p,
    vocab,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Order key of the winner among the tokens before ``link``, by reading the whole row."""
    offsets = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], _LOWEST, tl.int64)
    for block in range(tl.cdiv(vocab, BLOCK)):
        ids = block * BLOCK + offsets
        x = _load(logits_row_ptr, ids, vocab, mask_ptr, MASKED)
        scores = _scores(x, row_max, temperature, min_log_p)
        allowed = (_key(scores, ids) > link) & (scores > float("-inf"))
        if tl.max(allowed.to(tl.int32), axis=0) > 0:
            bits = mix64(key + (ids + 1).to(tl.uint64) * GOLDEN)
            best = tl.maximum(best, _race_of_block(bits, scores, ids, allowed, table_ptr))
    return _order_key_of(logits_row_ptr, _id_of(tl.max(best, axis=0)), row_max, temperature, min_log_p)


@triton.jit
def _before_link(
    logits_row_ptr,
    mask_ptr,
    link,
    row_max,
    temperature,
    min_log_p,
    vocab,
    needs_mass,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Mass and number of the tokens before ``link``, by reading the whole row."""
    offsets = tl.arange(0, BLOCK)
    mass = tl.zeros([BLOCK], tl.int64)
    count = tl.zeros([BLOCK], tl.int32)
    for block in range(tl.cdiv(vocab, BLOCK)):
        ids = block * BLOCK + offsets
        x = _load(logits_row_ptr, ids, vocab, mask_ptr, MASKED)
        scores = _scores(x, row_max, temperature, min_log_p)
        is_before = _key(scores, ids) > link
        count += is_before.to(tl.int32)
        if needs_mass:
            mass += tl.where(is_before, _masses(scores), 0)
    return tl.sum(mass, axis=0), tl.sum(count, axis=0)


@triton.jit
def _chain_kernel(
    logits_ptr,
    kind_ptr,
    temperature_ptr,
    min_log_p_ptr,
    top_p_ptr,
    top_k_ptr,
    seed_ptr,
    position_ptr,
    table_ptr,
    mask_ptr,
    mask_row_ptr,
    maxima_ptr,
    best_ptr,
    mass_ptr,
    order_ptr,
    race_ptr,
    list_size_ptr,
    before_ptr,
    arrival_ptr,
    token_ptr,
    bad_ptr,
    stride,
    vocab,
    num_blocks,
    blocks_per_split,
    splits,
    MASKED: tl.constexpr,
    PURPOSE: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOW_BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    LIST: tl.constexpr,
):
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    is_bad = tl.load(bad_ptr + row) != 0
    if (tl.load(kind_ptr + row) == 2) & (is_bad == 0):
        row_ptr = logits_ptr + row * stride
        mask_ptr = _mask_of(mask_ptr, mask_row_ptr, row, vocab, MASKED)
        row_max = _value_of((_row_maximum(maxima_ptr, row, num_blocks, splits, SPLITS) >> 32).to(tl.int32))
        temperature, min_log_p = tl.load(temperature_ptr + row), tl.load(min_log_p_ptr + row)
        top_p, top_k = tl.load(top_p_ptr + row), tl.load(top_k_ptr + row)
        needs_mass = top_p < 1.0

        # The links: winner of the race, winner among those before it, and so on.
        each = tl.arange(0, SPLITS)
        partial_best = tl.load(best_ptr + row * num_blocks + each, mask=each < splits, other=_LOWEST)
        winner = _id_of(tl.max(partial_best, axis=0))
        link_0 = _order_key_of(row_ptr, winner, row_max, temperature, min_log_p)
        size = tl.load(list_size_ptr + row)
        slot = tl.arange(0, LIST)
        is_listed = (slot < size) & (size <= LIST)
        order = tl.load(order_ptr + row * LIST + slot, mask=is_listed, other=_LOWEST)
        race = tl.load(race_ptr + row * LIST + slot, mask=is_listed, other=_LOWEST)
        link_1 = _listed_link(order, race, link_0)
        link_2 = _listed_link(order, race, link_1)
        link_3 = _listed_link(order, race, link_2)

        offsets = tl.arange(0, BLOCK)
        mass_0 = tl.zeros([BLOCK], tl.int64)
        mass_1 = tl.zeros([BLOCK], tl.int64)
        mass_2 = tl.zeros([BLOCK], tl.int64)
        mass_3 = tl.zeros([BLOCK], tl.int64)
        count_0 = tl.zeros([BLOCK], tl.int32)
        count_1 = tl.zeros([BLOCK], tl.int32)
        count_2 = tl.zeros([BLOCK], tl.int32)
        count_3 = tl.zeros([BLOCK], tl.int32)
        first = split * blocks_per_split
        for block in range(first, tl.minimum(first + blocks_per_split, num_blocks)):
            ids = block * BLOCK + offsets
            x = _load(row_ptr, ids, vocab, mask_ptr, MASKED)
            scores = _scores(x, row_max, temperature, min_log_p)
            keys = _key(scores, ids)
            count_0 += (keys > link_0).to(tl.int32)
            count_1 += (keys > link_1).to(tl.int32)
            count_2 += (keys > link_2).to(tl.int32)
            count_3 += (keys > link_3).to(tl.int32)
            if needs_mass:
                masses = _masses(scores)
                mass_0 += tl.where(keys > link_0, masses, 0)
                mass_1 += tl.where(keys > link_1, masses, 0)
                mass_2 += tl.where(keys > link_2, masses, 0)
                mass_3 += tl.where(keys > link_3, masses, 0)
        out = before_ptr + (row * num_blocks + split) * 8
        tl.store(out + 0, tl.sum(mass_0, axis=0))
        tl.store(out + 1, tl.sum(mass_1, axis=0))
        tl.store(out + 2, tl.sum(mass_2, axis=0))
        tl.store(out + 3, tl.sum(mass_3, axis=0))
        tl.store(out + 4, tl.sum(count_0, axis=0).to(tl.int64))
        tl.store(out + 5, tl.sum(count_1, axis=0).to(tl.int64))
        tl.store(out + 6, tl.sum(count_2, axis=0).to(tl.int64))
        tl.store(out + 7, tl.sum(count_3, axis=0).to(tl.int64))

        if _arrive(arrival_ptr + row, splits):
            total = tl.sum(tl.load(mass_ptr + row * num_blocks + each, mask=each < splits, other=0), axis=0)
            limit = total * 0 + _HIGHEST
            if needs_mass:
                limit = (total.to(tl.float64) * top_p).to(tl.int64)
            link = link_0
            is_kept = _is_kept(before_ptr, row, num_blocks, splits, 0, limit, top_k, SPLITS)
            if (is_kept == 0) & (link_1 != _HIGHEST):
                link = link_1
                is_kept = _is_kept(before_ptr, row, num_blocks, splits, 1, limit, top_k, SPLITS)
            if (is_kept == 0) & (link_2 != _HIGHEST):
                link = link_2
                is_kept = _is_kept(before_ptr, row, num_blocks, splits, 2, limit, top_k, SPLITS)
            if (is_kept == 0) & (link_3 != _HIGHEST):
                link = link_3
                is_kept = _is_kept(before_ptr, row, num_blocks, splits, 3, limit, top_k, SPLITS)
            if is_kept == 0:
                key = row_key(tl.load(seed_ptr + row), tl.load(position_ptr + row), PURPOSE)
                while is_kept == 0:
                    link = _next_link(
                        row_ptr, table_ptr, mask_ptr, key, link, row_max, temperature, min_log_p, vocab,
                        MASKED, SLOW_BLOCK,
                    )  # fmt: skip
                    before, count = _before_link(
                        row_ptr, mask_ptr, link, row_max, temperature, min_log_p, vocab, needs_mass,
                        MASKED, SLOW_BLOCK,
                    )  # fmt: skip
                    is_kept = ((before <= limit) & (count < top_k)).to(tl.int32)
            tl.store(token_ptr + row, _id_of(link).to(tl.int64))


@triton.jit
def _listed_link(order, race, link):
    """Order key of the winner among the listed tokens before ``link``; highest if there is none."""
    alive = tl.where(order > link, race, _LOWEST)
    winner = tl.max(alive, axis=0)
    found = tl.max(tl.where(race == winner, order, _LOWEST), axis=0)
    return tl.where(winner == _LOWEST, _HIGHEST, found)


@triton.jit
def _is_kept(before_ptr, row, num_blocks, splits, which, limit, top_k, SPLITS: tl.constexpr):
    """Whether top-p and top-k keep link number ``which``: 0 or 1."""
    each = tl.arange(0, SPLITS)
    at = before_ptr + (row * num_blocks + each) * 8 + which
    mass = tl.sum(tl.load(at, mask=each < splits, other=0, cache_modifier=".cg"), axis=0)
    count = tl.sum(tl.load(at + 4, mask=each < splits, other=0, cache_modifier=".cg"), axis=0)
    return ((mass <= limit) & (count < top_k)).to(tl.int32)


def sample(
    logits: Tensor,
    rows: SamplingRows,
    workspace: SamplingWorkspace,
    *,
    truncates: bool,
    token_ids: Tensor | None = None,
    is_bad: Tensor | None = None,
    purpose: int = 0,
    num_warps: int = 4,
) -> tuple[Tensor, Tensor]:
    """One token per row, as :meth:`deepinfer.sampling.sampler.Sampler.sample` chooses it.

    Args:
        logits: float32 ``[rows, vocab]`` after biases and penalties; unit stride in a row. Not changed.
        rows: parameters of the rows.
        workspace: large enough; not used by another call at the same time.
        truncates: whether a row may be :data:`TRUNCATED` (known on the host); without, its launch is left out.
        token_ids: int64 ``[rows]``, for the result; is_bad: bool ``[rows]``.
        purpose: of the noise, a :class:`deepinfer.sampling.random.Purpose`.
    Returns:
        token ids (0 in bad rows), and which rows are bad: they have NaN or +inf anywhere, or no token is left.
    """
    num_rows, vocab = logits.shape
    assert logits.dtype == torch.float32, f"{logits.dtype=}"
    assert logits.stride(1) == 1, f"{logits.stride()=}"
    assert vocab == workspace.vocab_size, f"{vocab=} {workspace.vocab_size=}"
    assert num_rows <= workspace.max_rows, f"{num_rows=} {workspace.max_rows=}"
    rows.check(num_rows)
    if token_ids is None:
        token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if is_bad is None:
        is_bad = torch.empty(num_rows, dtype=torch.bool, device=logits.device)
    if num_rows == 0:
        return token_ids, is_bad
    w = workspace
    masks = (rows.kind, rows.kind) if rows.masks is None else (rows.masks, rows.mask_rows)
    splits, blocks = w.splits_of(num_rows)
    grid = (num_rows, splits)
    sizes = {"stride": logits.stride(0), "vocab": vocab, "num_blocks": w.num_blocks, "blocks_per_split": blocks}
    _maximum_kernel[grid](
        logits,
        rows.kind,
        rows.top_k,
        *masks,
        w.maxima,
        w.group_maxima,
        w.list_size,
        num_groups=w.num_groups,
        **sizes,
        MASKED=rows.masks is not None,
        TRUNCATES=truncates,
        BLOCK=_BLOCK,
        GROUP=_GROUP,
        num_warps=num_warps,
    )
    per_row = (rows.kind, rows.temperature, rows.min_log_p, rows.top_p, rows.top_k, rows.seeds, rows.positions)
    constants = {
        "MASKED": rows.masks is not None,
        "PURPOSE": purpose,
        "BLOCK": _BLOCK,
        "SPLITS": triton.next_power_of_2(splits),
        "LIST": _LIST,
        "num_warps": num_warps,
        "enable_fp_fusion": False,
    }
    _race_kernel[grid](
        logits,
        *per_row,
        w.table,
        *masks,
        w.maxima,
        w.group_maxima,
        w.best,
        w.mass,
        w.list_order,
        w.list_race,
        w.list_size,
        w.arrivals[0],
        token_ids,
        is_bad,
        num_groups=w.num_groups,
        splits=splits,
        **sizes,
        TRUNCATES=truncates,
        GROUPS=triton.next_power_of_2(w.num_groups),
        **constants,
    )
    if truncates:
        _chain_kernel[grid](
            logits,
            *per_row,
            w.table,
            *masks,
            w.maxima,
            w.best,
            w.mass,
            w.list_order,
            w.list_race,
            w.list_size,
            w.before,
            w.arrivals[1],
            token_ids,
            is_bad,
            splits=splits,
            **sizes,
            SLOW_BLOCK=_BLOCK,
            **constants,
        )
    return token_ids, is_bad
