"""Grammars as data: terms that are cheap to build and to analyse, before they become the text of a grammar.

A grammar is a set of named rules. Terms are immutable and hashable; the builders simplify as they go.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from deepinfer.structured.char_sets import CharSet


@dataclass(frozen=True, slots=True)
class Literal:
    """Exactly this text."""

    text: str


@dataclass(frozen=True, slots=True)
class OneOf:
    """One character of a set; an empty set matches nothing."""

    chars: CharSet


@dataclass(frozen=True, slots=True)
class Sequence:
    """All parts, one after another."""

    parts: tuple[Term, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """One of the parts; none at all matches nothing."""

    parts: tuple[Term, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """``term`` from ``low`` to ``high`` times (None: without limit)."""

    term: Term
    low: int
    high: int | None


@dataclass(frozen=True, slots=True)
class Rule:
    """Whatever the rule of this name matches."""

    name: str


Term = Literal | OneOf | Sequence | Choice | Repeat | Rule

EMPTY = Literal("")
NOTHING = Choice(())
"""Matches no text at all."""


def sequence(*parts: Term) -> Term:
    """Parts in a row; neighbouring literals become one."""
    flat: list[Term] = []
    for part in parts:
        for each in part.parts if isinstance(part, Sequence) else (part,):
            if each == NOTHING:
                return NOTHING
            if isinstance(each, Literal) and flat and isinstance(flat[-1], Literal):
                flat[-1] = Literal(flat[-1].text + each.text)
            elif each != EMPTY:
                flat.append(each)
    if not flat:
        return EMPTY
    return flat[0] if len(flat) == 1 else Sequence(tuple(flat))


def choice(parts: Iterable[Term]) -> Term:
    """One of the parts, each listed once; parts that match nothing are dropped."""
    flat: dict[Term, None] = {}
    for part in parts:
        flat.update(dict.fromkeys(part.parts if isinstance(part, Choice) else (part,)))
    return next(iter(flat)) if len(flat) == 1 else Choice(tuple(flat))


def repeat(term: Term, low: int = 0, high: int | None = None) -> Term:
    """``term`` from ``low`` to ``high`` times."""
    if high is not None and low > high:
        return NOTHING
    if high == 0 or term == EMPTY:
        return EMPTY
    if term == NOTHING or term == OneOf(CharSet(())):
        return NOTHING if low else EMPTY
    return term if low == high == 1 else Repeat(term, low, high)


def optional(term: Term) -> Term:
    return repeat(term, 0, 1)


def one_of(chars: CharSet) -> Term:
    return OneOf(chars) if chars else NOTHING


def productive_rules(rules: Mapping[str, Term]) -> set[str]:
    """Names of the rules that match at least one finite text; the others lead a generator into a dead end."""
    productive: set[str] = set()
    while True:
        found = {name for name, term in rules.items() if name not in productive and _is_productive(term, productive)}
        if not found:
            return productive
        productive |= found


def _is_productive(term: Term, productive: set[str]) -> bool:
    match term:
        case Literal():
            return True
        case OneOf(chars):
            return bool(chars)
        case Sequence(parts):
            return all(_is_productive(part, productive) for part in parts)
        case Choice(parts):
            return any(_is_productive(part, productive) for part in parts)
        case Repeat(inner, low, _high):
            return low == 0 or _is_productive(inner, productive)
        case Rule(name):
            return name in productive


def prune(term: Term, productive: set[str]) -> Term:
    """``term`` without the alternatives that match nothing, so that no prefix of a text leads into a dead end."""
    match term:
        case Sequence(parts):
            return sequence(*(prune(part, productive) for part in parts))
        case Choice(parts):
            return choice(pruned for part in parts if (pruned := prune(part, productive)) != NOTHING)
        case Repeat(inner, low, high):
            return repeat(prune(inner, productive), low, high)
        case Rule(name):
            return term if name in productive else NOTHING
        case OneOf(chars):
            return one_of(chars)
        case Literal():
            return term
