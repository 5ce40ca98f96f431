"""Needles in a long text: sentences that tell a secret, among filler and among other secrets."""

from __future__ import annotations

import random
from collections.abc import Callable

from deepinfer.evaluation.tasks.filler import filler_sentence
from deepinfer.evaluation.tasks.sample import Sample, Split, Turn, draw_core
from deepinfer.evaluation.tasks.words import ADJECTIVES, NOUNS

Measure = Callable[[str], int]
"""Number of tokens of a text."""

INSTRUCTION = "Read the text and answer the question."
_MARGIN_TOKENS = 40
"""Room for the instruction, the question, the marks of the chat format and the answer."""


def needle(
    rng: random.Random,
    split: Split,
    num_tokens: int,
    measure: Measure,
    *,
    num_needles: int = 8,
    num_questions: int = 1,
    filler: Callable[[random.Random], str] = filler_sentence,
) -> Sample:
    """A text of about ``num_tokens`` tokens (prompt and answers together) with ``num_needles`` secrets in it.

    Args:
        rng: decides everything.
        split: of the secrets that are told.
        num_tokens: length of the whole conversation; the text is cut at a sentence just below it.
        measure: counts tokens.
        num_needles: secrets with different owners, at random depths. Those that do not fit are left out.
        num_questions: turns; each asks about another needle.
        filler: makes one sentence between needles.
    """
    facts = _secrets(rng, split, num_needles)
    told = [_statement(owner, secret) for owner, secret in facts]
    costs = [measure(" " + sentence) for sentence in told]
    room = num_tokens - _MARGIN_TOKENS - sum(40 for _ in range(num_questions - 1))
    while len(told) > 1 and sum(costs) > room:
        facts.pop(), told.pop(), costs.pop()
    lines, used = [], sum(costs)
    while True:
        sentence = filler(rng)
        used += measure(" " + sentence)
        if used > room:
            break
        lines.append(sentence)
    for sentence in told:
        lines.insert(rng.randint(0, len(lines)), sentence)
    asked = rng.sample(facts, min(num_questions, len(facts)))
    text = " ".join(lines)
    turns = [Turn(_question(owner), _statement(owner, secret)) for owner, secret in asked]
    first = Turn(f"{INSTRUCTION}\n\n{text}\n\n{turns[0].user}", turns[0].answer)
    return Sample("needle", (first, *turns[1:]))


def _secrets(rng: random.Random, split: Split, count: int) -> list[tuple[str, str]]:
    """``(owner, secret)`` pairs with distinct owners; the pair is the core."""
    facts: dict[str, str] = {}
    while len(facts) < count:
        core = draw_core(rng, split, lambda: f"{_pair(rng)}|{_pair(rng)}")
        owner, secret = core.split("|")
        facts.setdefault(owner, secret)
    return list(facts.items())


def _pair(rng: random.Random) -> str:
    return f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}"


def _statement(owner: str, secret: str) -> str:
    return f"The secret of the {owner} is {secret}."


def _question(owner: str) -> str:
    return f"What is the secret of the {owner}?"
