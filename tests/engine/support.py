"""Engines over random tiny checkpoints, and drivers that feed them a prompt in chosen pieces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from deepinfer.checkpoint.random_checkpoint import make_random_checkpoint
from deepinfer.checkpoint.tiny import tiny_config
from deepinfer.config.env import read_environment
from deepinfer.config.resolve import resolve
from deepinfer.engine.engine import Engine
from deepinfer.engine.factory import build_engine
from deepinfer.messages import Chunk, StepPlan
from deepinfer.reference import ReferenceModel, Roundings


def make_checkpoint(folder: Path, seed: int = 1, **text_overrides: Any) -> Path:
    """A random checkpoint of the tiny configuration (spec 11) with some values changed."""
    make_random_checkpoint(folder, tiny_config(vision=False, **text_overrides), seed=seed)
    return folder


def make_engine(path: Path, **arguments: Any) -> Engine:
    """An engine with one thread and little memory."""
    defaults: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 8, "num_threads": 1, "num_blocks": 64}
    config, _ = resolve({"model": path, **defaults, **arguments}, read_environment({}))
    return build_engine(config, progress=False)[0]


def oracle(path: Path, numerics: str) -> ReferenceModel:
    """The executable specification with the same roundings, in float64."""
    roundings = Roundings.faithful() if numerics == "faithful" else Roundings.none()
    return ReferenceModel.from_checkpoint(path, roundings=roundings, dtype=torch.float64)


def random_ids(count: int, vocab: int = 512, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab, (count,), generator=generator).tolist()


def chunk_of(
    ids: list[int], start: int, count: int, blocks: tuple[int, ...], slot: int, name: str = "a", history: int = 3
) -> Chunk:
    """Rows ``[start, start + count)`` of a sequence, all of them sampled."""
    return Chunk(
        request_id=name,
        start=start,
        token_ids=tuple(ids[start : start + count]),
        history=tuple(ids[max(0, start - history) : start]),
        block_table=blocks,
        state_slot=slot,
        num_sampled=count,
        is_prefill=True,
    )


def logits_in_pieces(
    engine: Engine, ids: list[int], sizes: list[int], blocks: tuple[int, ...] = (5, 2, 9), slot: int = 3
) -> torch.Tensor:
    """Logits ``[len(ids), vocab]`` when the prompt is computed in pieces of the given sizes."""
    rows, start = [], 0
    for size in sizes:
        plan = StepPlan(0, (chunk_of(ids, start, size, blocks, slot),))
        rows.append(engine.runner.run(plan).sample_logits())
        start += size
    assert start == len(ids)
    return torch.cat(rows)


def even_pieces(total: int, size: int) -> list[int]:
    return [min(size, total - start) for start in range(0, total, size)]
