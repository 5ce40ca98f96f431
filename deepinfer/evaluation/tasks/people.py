"""Invented people: the subjects of the extraction and question-answering tasks."""

from __future__ import annotations

import random
from dataclasses import dataclass

from deepinfer.evaluation.tasks.words import ANIMALS, CITIES, COLOURS, FIRST_NAMES, FOODS, JOBS, LAST_NAMES


@dataclass(frozen=True, slots=True)
class Person:
    """Everything a paragraph tells about somebody."""

    first: str
    last: str
    age: int
    job: str
    city: str
    food: str
    colour: str
    pet: str

    @property
    def name(self) -> str:
        return f"{self.first} {self.last}"

    @property
    def core(self) -> str:
        return f"{self.name}|{self.age}|{self.job}|{self.city}"


def random_person(rng: random.Random) -> Person:
    pick = rng.choice
    return Person(
        first=pick(FIRST_NAMES),
        last=pick(LAST_NAMES),
        age=rng.randint(18, 89),
        job=pick(JOBS),
        city=pick(CITIES),
        food=pick(FOODS),
        colour=pick(COLOURS),
        pet=pick(ANIMALS),
    )


def describe(rng: random.Random, person: Person) -> str:
    """A paragraph with every property of ``person``, its sentences in a random order after the first."""
    article = "an" if person.job[0] in "aeiou" else "a"
    first = rng.choice(
        (
            f"{person.name} is {article} {person.job} from {person.city}.",
            f"{person.name} lives in {person.city} and works as {article} {person.job}.",
            f"In {person.city} there is {article} {person.job} called {person.name}.",
        )
    )
    rest = [
        f"{person.first} is {person.age} years old.",
        f"{person.first} likes {person.food}.",
        f"The favourite colour of {person.first} is {person.colour}.",
        f"{person.first} has a {person.pet}.",
    ]
    rng.shuffle(rest)
    return " ".join([first, *rest])
