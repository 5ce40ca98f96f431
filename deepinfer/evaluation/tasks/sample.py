"""What a task sample is, how an answer is scored, and how training and held-out samples are kept apart."""

from __future__ import annotations

import enum
import json
import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass

HELD_OUT_SHARE = 10
"""One in so many cores is held out."""


class Split(enum.Enum):
    """Which samples a generator may give. A sample belongs to exactly one split, decided by its core."""

    TRAIN = "train"
    HELD_OUT = "held out"


class AnswerForm(enum.Enum):
    """How an answer is compared with the expected one."""

    TEXT = "text"
    """Equal after stripping surrounding white space."""
    JSON = "json"
    """Both parse as JSON to equal values, so spacing does not matter; the order of keys does not either."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One question and the answer that is expected."""

    user: str
    answer: str


@dataclass(frozen=True, slots=True)
class Sample:
    """A conversation with checkable answers. Evaluation asks the first turn only, training may use all."""

    task: str
    turns: tuple[Turn, ...]
    form: AnswerForm = AnswerForm.TEXT

    @property
    def prompt(self) -> str:
        return self.turns[0].user

    @property
    def expected(self) -> str:
        return self.turns[0].answer

    def is_correct(self, answer: str) -> bool:
        """Whether ``answer`` to the first turn is right."""
        return matches(self.expected, answer, self.form)


def matches(expected: str, answer: str, form: AnswerForm) -> bool:
    """Compare one answer with the expected one. An answer that is no JSON is wrong, not an error."""
    if form is AnswerForm.TEXT:
        return answer.strip() == expected.strip()
    try:
        return bool(json.loads(answer) == json.loads(expected))
    except json.JSONDecodeError:
        return False


def split_of(core: str) -> Split:
    """The split of everything that is built around ``core``, the part of a sample that decides its answer."""
    return Split.HELD_OUT if zlib.crc32(core.encode("utf-8")) % HELD_OUT_SHARE == 0 else Split.TRAIN


def draw_core(rng: random.Random, split: Split, make: Callable[[], str]) -> str:
    """Call ``make`` (which draws from ``rng``) until its result belongs to ``split``."""
    for _ in range(1000):
        core = make()
        if split_of(core) is split:
            return core
    raise AssertionError(f"1000 draws gave no core of the split {split.value!r}: does the generator vary?")
