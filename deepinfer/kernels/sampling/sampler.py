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
from torch import Tensor

from deepinfer.kernels.sampling.chain import chain_kernel
from deepinfer.kernels.sampling.maximum import maximum_kernel
from deepinfer.kernels.sampling.race import race_kernel

GREEDY, FULL, TRUNCATED = 0, 1, 2
"""``SamplingRows.kind``."""

_BLOCK = 1024
_GROUP = 128  # tokens per group maximum
_LIST = 2048  # contenders that are kept per row
_CHAIN = 4  # links that are checked in one pass


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
        self.before = empty(self.num_blocks, 2 * _CHAIN)
        self.group_maxima = empty(self.num_groups, dtype=torch.float32)
        self.list_order = empty(_LIST)
        self.list_race = empty(_LIST)
        self.list_size = empty(dtype=torch.int32)
        self.arrivals = torch.zeros((2, -(-max_rows // 4) * 4), dtype=torch.int32, device=device)
        """Programs of a row that are done, for the second and the third launch; the last one sets it back to 0. Each
        part is aligned to 16 bytes: Triton compiles kernels anew for other alignments."""

    def splits_of(self, rows: int) -> tuple[int, int]:
        """Programs per row, and blocks of 1024 tokens per program."""
        wanted = max(1, min(self.num_blocks, triton.cdiv(self.target_programs, max(rows, 1))))
        blocks = triton.cdiv(self.num_blocks, wanted)
        return triton.cdiv(self.num_blocks, blocks), blocks


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
    maximum_kernel[grid](
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
    race_kernel[grid](
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
        chain_kernel[grid](
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
