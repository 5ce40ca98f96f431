"""Which samples training draws, and how often."""

from __future__ import annotations

import random
from collections.abc import Callable

from deepinfer.evaluation.tasks import (
    Sample,
    Split,
    addition,
    copy_with_edit,
    fact_question,
    json_extraction,
    needle,
    paragraph_question,
)


def any_sample(rng: random.Random, split: Split) -> Sample:
    """One sample of any task, needles in short texts among them; lengths are counted in characters / 3.5."""
    short: tuple[Callable[[], Sample], ...] = (
        lambda: addition(rng, split),
        lambda: copy_with_edit(rng, split),
        lambda: json_extraction(rng, split),
        lambda: paragraph_question(rng, split, num_questions=2),
        lambda: fact_question(rng, split),
        lambda: needle(rng, split, 150, lambda text: len(text) * 2 // 7, num_needles=3),
    )
    return rng.choice(short)()


TASKS = ("addition", "copy", "json", "reading", "facts")
BACKBONE_SHARES = (5, 3, 2, 4, 3)
"""How often the backbone meets each of :data:`TASKS`: what is hard to learn comes often."""
DRAFT_SHARES = (2, 6, 4, 2, 2)
"""How often the draft does: long answers come often, since they take most of the steps."""


def short_sample(rng: random.Random, split: Split, shares: tuple[int, ...] = BACKBONE_SHARES) -> Sample:
    """One sample of the tasks other than needles."""
    kind = rng.choices(TASKS, weights=shares)[0]
    if kind == "addition":
        return addition(rng, split)
    if kind == "copy":
        return copy_with_edit(rng, split)
    if kind == "json":
        return json_extraction(rng, split)
    if kind == "reading":
        return paragraph_question(rng, split, num_questions=rng.randint(1, 4))
    return fact_question(rng, split)
