"""Questions about a given paragraph that describes several people."""

from __future__ import annotations

import random

from deepinfer.evaluation.tasks.people import Person, describe, random_person
from deepinfer.evaluation.tasks.sample import Sample, Split, Turn, split_of


def paragraph_question(rng: random.Random, split: Split, *, num_questions: int = 1) -> Sample:
    """Two or three people with different first names, and questions about properties of theirs."""
    people: dict[str, Person] = {}
    count = rng.randint(2, 3)
    while len(people) < count:
        person = random_person(rng)
        if split_of(person.core) is split:
            people.setdefault(person.first, person)
    paragraph = " ".join(describe(rng, person) for person in people.values())
    turns = []
    for _ in range(num_questions):
        turns.append(_ask(rng, rng.choice(list(people.values()))))
    first = Turn(f"{paragraph}\n\n{turns[0].user}", turns[0].answer)
    return Sample("reading", (first, *turns[1:]))


def _ask(rng: random.Random, person: Person) -> Turn:
    name = person.first
    return rng.choice(
        (
            Turn(f"Where does {name} live?", f"{name} lives in {person.city}."),
            Turn(f"How old is {name}?", f"{name} is {person.age} years old."),
            Turn(f"What does {name} like?", f"{name} likes {person.food}."),
            Turn(f"What is the favourite colour of {name}?", f"The favourite colour of {name} is {person.colour}."),
            Turn(f"Which animal does {name} have?", f"{name} has a {person.pet}."),
        )
    )
