"""Copy a line while replacing one word."""

from __future__ import annotations

import random

from deepinfer.evaluation.tasks.sample import Sample, Split, Turn, draw_core
from deepinfer.evaluation.tasks.words import ADJECTIVES, NOUNS, VERBS

_WORDS = tuple(sorted({*ADJECTIVES, *NOUNS, *VERBS}))


def copy_with_edit(rng: random.Random, split: Split) -> Sample:
    """A line of 6 to 16 words in which one word, there once to three times, has to become another."""
    core = draw_core(rng, split, lambda: " ".join(rng.sample(_WORDS, rng.randint(6, 16))))
    words = core.split()
    old, new = words[0], rng.choice([word for word in _WORDS if word not in words])
    for _ in range(rng.randint(0, 2)):
        words.insert(rng.randint(0, len(words)), old)
    rng.shuffle(words)
    edited = [new if word == old else word for word in words]
    prompt = f"Copy the line and replace {old} with {new}.\n\n{' '.join(words)}"
    return Sample("copy", (Turn(prompt, " ".join(edited)),))
