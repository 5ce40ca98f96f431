"""Extraction of an invented person's properties to JSON under a schema."""

from __future__ import annotations

import json
import random

from deepinfer.evaluation.tasks.people import Person, describe, random_person
from deepinfer.evaluation.tasks.sample import AnswerForm, Sample, Split, Turn, split_of

_TYPES = {
    "name": "string",
    "age": "integer",
    "job": "string",
    "city": "string",
    "food": "string",
    "colour": "string",
    "pet": "string",
}


def extraction_schema(fields: list[str]) -> dict[str, object]:
    """The JSON schema of an answer with exactly ``fields``."""
    return {
        "type": "object",
        "properties": {field: {"type": _TYPES[field]} for field in fields},
        "required": fields,
    }


def json_extraction(rng: random.Random, split: Split) -> Sample:
    """A paragraph and a schema with two to five of its properties; the answer is one line of JSON."""
    person = random_person(rng)
    while split_of(person.core) is not split:
        person = random_person(rng)
    fields = rng.sample(list(_TYPES), rng.randint(2, 5))
    answer = json.dumps({field: _value(person, field) for field in fields})
    schema = json.dumps(extraction_schema(fields))
    prompt = f"{describe(rng, person)}\n\nWrite JSON that follows this schema: {schema}"
    return Sample("json", (Turn(prompt, answer),), AnswerForm.JSON)


def _value(person: Person, field: str) -> str | int:
    value = getattr(person, field)
    assert isinstance(value, str | int), f"{field} is {value!r}"
    return value
