"""A row is the same bits alone and in a batch: every operator, on what the model really feeds it.

See docs/determinism.md for what this rests on.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer.engine.engine import Engine
from deepinfer.messages import Chunk, StepPlan
from deepinfer.ops.registry import REGISTRY
from deepinfer.sampling.params import SamplingParams
from deepinfer.sampling.state import SamplingState
from tests.engine.support import chunk_of, make_checkpoint, make_engine, random_ids

NEVER_ROUNDED = (".read_mix", ".weights")
"""Float64 sums that are used as they are; what is computed with them is rounded. Their last bits depend on the kernel
that the BLAS library takes for so many rows, so these two are compared within a few of those bits."""
LENGTHS = [1, 2, 3, 16, 17, 33, 40, 63, 64, 65, 90, 128, 129, 150, 31, 8] * 2  # of what each sequence has computed


class OperatorLog:
    """Notes which operators ran, under every layer of an engine's model."""

    def __init__(self, engine: Engine) -> None:
        self.seen: set[str] = set()
        ops = engine.runner.model.ops
        for name in REGISTRY:
            setattr(ops, name, self._noting(name, getattr(ops, name)))

    def _noting(self, name: str, function: Any) -> Any:
        def noted(*args: Any, **kwargs: Any) -> Any:
            self.seen.add(name)
            return function(*args, **kwargs)

        return noted


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """32 sequences, each prefilled to its length; block i + 1 and slot i + 1 belong to sequence i (two blocks each)."""
    path = make_checkpoint(tmp_path_factory.mktemp("tiny") / "model")
    engine = make_engine(path, max_num_seqs=32, num_blocks=80, num_speculative_tokens=4, adaptive_verification=False)
    for index in range(len(LENGTHS)):
        ids = ids_of(index)
        chunk = chunk_of(ids, 0, LENGTHS[index], blocks_of(index), index + 1, str(index))
        engine.runner.run(StepPlan(0, (chunk,)))
    return engine


def ids_of(index: int) -> list[int]:
    return random_ids(LENGTHS[index] + 6, seed=index)


def blocks_of(index: int) -> tuple[int, ...]:
    return (2 * index + 1, 2 * index + 2)


def rows_of(index: int, count: int) -> Chunk:
    return chunk_of(ids_of(index), LENGTHS[index], count, blocks_of(index), index + 1, str(index))


def traced(engine: Engine, chunks: list[Chunk]) -> tuple[dict[str, Tensor], Tensor]:
    trace: dict[str, Tensor] = {}
    logits = engine.runner.run(StepPlan(0, tuple(chunks)), trace=trace).sample_logits()
    return trace, logits


@pytest.mark.parametrize("count", [1, 5])
def test_every_operator_gives_a_row_the_same_bits_in_any_batch(engine: Engine, count: int) -> None:
    """D1: ``f(batch)[i]`` equals ``f(batch[i : i + 1])`` bit by bit, with batches of 1, 2, 7 and 32 sequences.

    Compared are all intermediates of all layers: queries, keys, selections, attention, router, experts, n-gram rows,
    the trunk between layers, and logits. Decode rows (one per sequence) and verification rows (five).
    """
    log = OperatorLog(engine)
    alone = [traced(engine, [rows_of(index, count)]) for index in range(len(LENGTHS))]
    assert log.seen >= set(REGISTRY) - {"index_candidates"}
    order = torch.randperm(len(LENGTHS), generator=torch.Generator().manual_seed(1)).tolist()
    for size in (2, 7, 32):
        members = order[:size]
        trace, logits = traced(engine, [rows_of(index, count) for index in members])
        for place, index in enumerate(members):
            rows = slice(place * count, (place + 1) * count)
            assert torch.equal(logits[rows], alone[index][1]), f"logits of sequence {index} in a batch of {size}"
            for name, own in alone[index][0].items():
                if len(trace[name]) != size * count:
                    continue  # by entry rather than by row: compared through what reads them
                found = trace[name][rows]
                if own.dim() == 2 and name.endswith((".selected", ".blocks")):
                    assert (found[:, own.shape[1] :] == -1).all(), name  # a wider list is padded
                    found = found[:, : own.shape[1]]
                if name.endswith(NEVER_ROUNDED):
                    torch.testing.assert_close(found, own, rtol=1e-12, atol=1e-13)
                else:
                    assert torch.equal(found, own), f"{name} of sequence {index} in a batch of {size}"


def test_candidate_selection_gives_a_row_the_same_bits_in_any_batch(engine: Engine) -> None:
    """D1, the one operator that short sequences do not reach: reindexing inside candidate blocks."""
    log = OperatorLog(engine)
    long = [index for index, length in enumerate(LENGTHS) if length > 70]
    alone = [traced(engine, [rows_of(index, 1)])[1] for index in long]
    together = traced(engine, [rows_of(index, 1) for index in long])[1]
    assert "index_candidates" in log.seen
    assert torch.equal(together, torch.cat(alone))


def test_drafts_do_not_depend_on_the_batch(engine: Engine) -> None:
    """D1 for the draft model: tokens and confidences of a sequence, alone and among 32."""
    drafter = engine.worker.drafter
    assert drafter is not None
    owners = [
        SamplingState(SamplingParams(temperature=1.0, seq_seed=index), ids_of(index), vocab_size=512)
        for index in range(len(LENGTHS))
    ]
    everyone = list(range(len(LENGTHS)))

    def propose(members: list[int]) -> tuple[Tensor, Tensor]:
        return drafter.propose(
            [owners[index] for index in members],
            [None] * len(members),
            [index + 1 for index in members],
            [LENGTHS[index] - 1 for index in members],
            [[ids_of(index)[LENGTHS[index]]] for index in members],
        )

    with torch.inference_mode():
        ids, confidence = propose(everyone)
        for index in (0, 3, 11, 31):
            own_ids, own_confidence = propose([index])
            assert torch.equal(own_ids[0], ids[index])
            assert torch.equal(own_confidence[0], confidence[index])
