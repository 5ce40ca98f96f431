"""Everyday sentences without any secret in them."""

from __future__ import annotations

import random

from deepinfer.evaluation.tasks.words import (
    ADJECTIVES,
    ANIMALS,
    CITIES,
    COLOURS,
    FIRST_NAMES,
    FOODS,
    JOBS,
    NOUNS,
    PLACES,
    TIMES,
    VERBS,
)


def filler_sentence(rng: random.Random) -> str:
    """One English sentence of 6 to 16 words."""
    pick = rng.choice
    pattern = rng.randrange(6)
    if pattern == 0:
        return f"{pick(TIMES)} the {pick(JOBS)} {pick(VERBS)} the {pick(ADJECTIVES)} {pick(NOUNS)} near {pick(PLACES)}."
    if pattern == 1:
        return f"{pick(FIRST_NAMES)} {pick(VERBS)} a {pick(COLOURS)} {pick(NOUNS)} and went to {pick(CITIES)}."
    if pattern == 2:
        return f"The {pick(ANIMALS)} of {pick(FIRST_NAMES)} likes {pick(FOODS)} and {pick(FOODS)}."
    if pattern == 3:
        return f"There was a {pick(ADJECTIVES)} {pick(NOUNS)} behind {pick(PLACES)} in {pick(CITIES)}."
    if pattern == 4:
        return f"{pick(TIMES)} {pick(FIRST_NAMES)} met the {pick(JOBS)} who {pick(VERBS)} the {pick(NOUNS)}."
    return (
        f"Nobody in {pick(CITIES)} {pick(VERBS)} the {pick(ADJECTIVES)} {pick(NOUNS)} before {pick(FIRST_NAMES)} came."
    )
