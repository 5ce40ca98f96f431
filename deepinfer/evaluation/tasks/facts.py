"""Facts about an invented world that are never in the prompt: only the model's memory holds them.

The facts themselves are the same in training and in evaluation (they could not be known otherwise); the held-out part
is the pairing of a fact with the wording of the question.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from deepinfer.evaluation.tasks.sample import Sample, Split, Turn, draw_core
from deepinfer.evaluation.tasks.words import ANIMALS, COLOURS, FOODS, NOUNS

NUM_LANDS = 400
_SEED = 41
_BEGIN = (
    "Bel",
    "Dor",
    "Fal",
    "Gar",
    "Hol",
    "Kar",
    "Lum",
    "Mor",
    "Nar",
    "Ost",
    "Pel",
    "Quor",
    "Ras",
    "Sul",
    "Tor",
    "Ul",
    "Var",
    "Wen",
    "Yar",
    "Zor",
)
_MIDDLE = ("a", "e", "i", "o", "u", "an", "el", "ir", "on", "ul")
_END = ("dia", "land", "mark", "nia", "ria", "stan", "thia", "via", "wick", "zia")


@dataclass(frozen=True, slots=True)
class Land:
    """An invented country."""

    name: str
    capital: str
    colour: str
    """Of its flag."""
    food: str
    animal: str


def _make_lands() -> tuple[Land, ...]:
    rng = random.Random(_SEED)
    names = [begin + middle + end for begin in _BEGIN for middle in _MIDDLE for end in _END]
    chosen = rng.sample(names, NUM_LANDS)
    return tuple(
        Land(name, rng.choice(NOUNS).capitalize() + "ton", rng.choice(COLOURS), rng.choice(FOODS), rng.choice(ANIMALS))
        for name in chosen
    )


LANDS = _make_lands()

# Question and answer of every property, in several wordings each.
_WORDINGS: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("What is the capital of {name}?", "Name the capital of {name}.", "Which town is the capital of {name}?"),
        "The capital of {name} is {capital}.",
    ),
    (
        ("What colour is the flag of {name}?", "Name the colour of the flag of {name}."),
        "The flag of {name} is {colour}.",
    ),
    (
        ("What do people eat in {name}?", "Name the food of {name}.", "What is the usual food in {name}?"),
        "In {name} people eat {food}.",
    ),
    (
        ("Which animal is the symbol of {name}?", "Name the animal of {name}."),
        "The symbol of {name} is the {animal}.",
    ),
)


def fact_question(rng: random.Random, split: Split) -> Sample:
    """One question about one land, without any text to look it up in."""

    def draw() -> str:
        wordings = rng.randrange(len(_WORDINGS))
        return f"{rng.randrange(NUM_LANDS)}|{wordings}|{rng.randrange(len(_WORDINGS[wordings][0]))}"

    number, wordings, wording = map(int, draw_core(rng, split, draw).split("|"))
    questions, answer = _WORDINGS[wordings]
    return Sample("facts", (Turn(_fill(questions[wording], LANDS[number]), _fill(answer, LANDS[number])),))


def fact_statement(rng: random.Random) -> str:
    """A statement of one fact, for running text in training."""
    return _fill(rng.choice(_WORDINGS)[1], rng.choice(LANDS))


def _fill(template: str, land: Land) -> str:
    return template.format(name=land.name, capital=land.capital, colour=land.colour, food=land.food, animal=land.animal)
