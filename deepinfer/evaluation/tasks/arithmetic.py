"""Addition of numbers with up to three digits."""

from __future__ import annotations

import random

from deepinfer.evaluation.tasks.sample import Sample, Split, Turn, draw_core


def addition(rng: random.Random, split: Split, *, digits: int | None = None) -> Sample:
    """``What is 347 + 285?``. Operands have exactly ``digits`` digits, or each one to three of them."""

    def operand() -> int:
        count = digits or rng.choice((1, 2, 3, 3, 3))
        return rng.randrange(0 if count == 1 else 10 ** (count - 1), 10**count)

    core = draw_core(rng, split, lambda: f"{operand()} + {operand()}")
    left, right = map(int, core.split(" + "))
    return Sample("addition", (Turn(f"What is {core}?", f"{core} = {left + right}"),))
