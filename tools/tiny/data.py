"""Training batches as a pure function of (seed, step), made by worker processes."""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from deepinfer.evaluation.tasks import Sample, Split, fact_statement, filler_sentence, needle
from tools.tiny.conversation import Encoder
from tools.tiny.mixture import BACKBONE_SHARES, DRAFT_SHARES, short_sample

WEIGHT_UNIT = 32
"""Loss weights are stored as multiples of 1 / 32."""
_PROSE, _ANSWER, _PROMPT = WEIGHT_UNIT // 2, 3 * WEIGHT_UNIT, 1


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of training. Shares of rows by kind need not sum to one."""

    until: float
    """Fraction of all steps."""
    lengths: tuple[tuple[int, float], ...]
    """Sequence lengths in tokens with their shares of steps."""
    dense: bool
    shares: tuple[tuple[str, float], ...]
    task_shares: tuple[int, ...] = BACKBONE_SHARES


_EARLY = (("drill", 5), ("tasks", 4), ("prose", 2.5), ("needle", 1))
_LATER = (("drill", 2), ("tasks", 5), ("prose", 3.5), ("needle", 2))

PHASES = (
    Phase(0.25, ((512, 1.0),), True, _EARLY),
    Phase(0.50, ((512, 0.75), (2048, 0.25)), True, _LATER),
    Phase(0.75, ((512, 0.60), (2048, 0.40)), False, _LATER),
    Phase(1.00, ((512, 0.50), (2048, 0.25), (4096, 0.25)), False, _LATER),
)

_FOR_DRAFT = (("drill", 1.5), ("tasks", 6), ("prose", 2), ("continued", 3.5), ("needle", 1))
DRAFT_PHASES = (Phase(1.0, ((512, 1.0),), False, _FOR_DRAFT, DRAFT_SHARES),)
"""The draft sees 128 tokens of context, so rows are short; and it learns from what the backbone itself writes."""


def phase_at(step: int, total: int, phases: tuple[Phase, ...] = PHASES) -> Phase:
    """The phase that ``step`` of ``total`` belongs to."""
    return next((phase for phase in phases if step < phase.until * total), phases[-1])


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of one step. ``weights[b, t]`` is the weight of predicting ``ids[b, t + 1]``, in 1 / WEIGHT_UNIT."""

    ids: np.ndarray  # uint16 [B, T]
    weights: np.ndarray  # uint8 [B, T]
    dense: bool


class BatchMaker:
    """Makes the batch of any step.

    Args:
        tokenizer: ``tokenizer.json``.
        prose: token ids of the training text.
        batch_tokens: tokens of a batch.
        total: steps of the whole run.
        seed: of everything.
        phases: of the run.
        continued: of ``tools.tiny.continuations``, for rows of that kind.
    """

    def __init__(
        self,
        tokenizer: Path,
        prose: np.ndarray,
        batch_tokens: int,
        total: int,
        seed: int,
        phases: tuple[Phase, ...] = PHASES,
        continued: np.ndarray | None = None,
    ) -> None:
        self._file, self._prose, self._phases, self._continued = tokenizer, prose, phases, continued
        self._batch_tokens, self._total, self._seed = batch_tokens, total, seed
        self._encoder: Encoder | None = None
        self._costs: dict[str, int] = {}

    @property
    def encoder(self) -> Encoder:
        if self._encoder is None:  # made in the worker: the backend is not shared between processes
            self._encoder = Encoder.of(Tokenizer.from_file(str(self._file)))
        return self._encoder

    def measure(self, text: str) -> int:
        """Tokens of a sentence."""
        return self.encoder.measure(text)

    def batch(self, step: int) -> Batch:
        rng = random.Random(self._seed * 1_000_003 + step)
        phase = phase_at(step, self._total, self._phases)
        lengths, shares = zip(*phase.lengths, strict=True)
        length = rng.choices(lengths, shares)[0]
        kinds, weights = zip(*phase.shares, strict=True)
        count = self._batch_tokens // length
        rows = [self.row(rng, rng.choices(kinds, weights)[0], length, phase.task_shares) for _ in range(count)]
        ids, row_weights = (np.stack(parts) for parts in zip(*rows, strict=True))
        return Batch(ids, row_weights, phase.dense)

    def row(
        self, rng: random.Random, kind: str, length: int, task_shares: tuple[int, ...] = BACKBONE_SHARES
    ) -> tuple[np.ndarray, np.ndarray]:
        """Ids and weights of one sequence of exactly ``length`` tokens."""
        if kind == "prose":
            start = rng.randrange(len(self._prose) - length)
            ids = np.concatenate(([self.encoder.bos], self._prose[start : start + length - 1])).astype(np.uint16)
            return ids, np.full(length, _PROSE, np.uint8)
        ids_list: list[int] = []
        marks: list[int] = []
        while len(ids_list) < length:
            more, weights = self._piece(rng, kind, length, task_shares)
            ids_list += more
            marks += weights
        shifted = [*marks[1:length], 0]
        return np.array(ids_list[:length], np.uint16), np.array(shifted, np.uint8)

    def _piece(
        self, rng: random.Random, kind: str, length: int, task_shares: tuple[int, ...]
    ) -> tuple[list[int], list[int]]:
        """Ids and, for every one of them, the weight of predicting it."""
        if kind == "continued":
            return self._continuation(rng)
        if kind == "tasks":
            if rng.random() < 0.08:
                text = " ".join(fact_statement(rng) for _ in range(rng.randint(1, 6)))
                ids = [self.encoder.bos, *self.encoder.text(text)]
                return ids, [_PROSE] * len(ids)
            return self._marked(short_sample(rng, Split.TRAIN, task_shares))
        if kind == "drill":
            budget = min(length, rng.choice((128, 256, 512)))
            return self._marked(self._needle(rng, budget, num_needles=budget // 26, num_questions=budget // 64))
        count = rng.randint(4, 6 + length // 100)
        return self._marked(self._needle(rng, length - 8, num_needles=count, num_questions=rng.randint(2, 4)))

    def _continuation(self, rng: random.Random) -> tuple[list[int], list[int]]:
        assert self._continued is not None, "there are no continuations: run tools.tiny.continuations"
        row = self._continued[rng.randrange(len(self._continued))].tolist()
        (num_prompt, num_all), ids = row[:2], row[2:]
        return ids[:num_all], [_PROMPT] * num_prompt + [_ANSWER] * (num_all - num_prompt)

    def _needle(self, rng: random.Random, length: int, num_needles: int, num_questions: int) -> Sample:
        filler = self._prose_filler if rng.random() < 0.25 else filler_sentence
        return needle(
            rng, Split.TRAIN, length, self.measure, num_needles=num_needles, num_questions=num_questions, filler=filler
        )

    def _prose_filler(self, rng: random.Random) -> str:
        start = rng.randrange(len(self._prose) - 64)
        text: str = self.encoder.backend.decode(self._prose[start : start + rng.randint(12, 40)].tolist())
        return text.replace("\ufffd", "").strip() or "And so on."

    def _marked(self, sample: Sample) -> tuple[list[int], list[int]]:
        ids, is_answer = self.encoder.conversation(sample)
        return ids, [_ANSWER if answer else _PROMPT for answer in is_answer]


_maker: BatchMaker | None = None


def _start_worker(maker: BatchMaker) -> None:
    global _maker  # one per worker process
    _maker = maker


def _make(step: int) -> Batch:
    assert _maker is not None
    return _maker.batch(step)


def batches(maker: BatchMaker, steps: Sequence[int], num_workers: int) -> Iterator[Batch]:
    """The batches of ``steps`` in order. With workers they are made ahead; without, in this process."""
    if num_workers == 0:
        yield from (maker.batch(step) for step in steps)
        return
    context = multiprocessing.get_context("fork")
    with context.Pool(num_workers, _start_worker, (maker,)) as pool:
        yield from pool.imap(_make, steps, chunksize=2)
