"""The text of a grammar, in the notation that the grammar library reads."""

from __future__ import annotations

from collections.abc import Mapping

from deepinfer.structured.char_sets import CharSet
from deepinfer.structured.terms import (
    NOTHING,
    Choice,
    Literal,
    OneOf,
    Repeat,
    Rule,
    Sequence,
    Term,
    productive_rules,
    prune,
)

ROOT = "root"
_ASCII = CharSet.of([(0, 0x7F)])


def to_ebnf(rules: Mapping[str, Term]) -> str | None:
    """The grammar with the start rule ``root``; None if it matches no text.

    Rules that cannot be reached or match nothing are left out.
    """
    productive = productive_rules(rules)
    if ROOT not in productive:
        return None
    pruned = {name: prune(term, productive) for name, term in rules.items() if name in productive}
    reached, waiting = {ROOT: None}, [ROOT]
    while waiting:
        for name in _names(pruned[waiting.pop()]):
            if name not in reached:
                reached[name] = None
                waiting.append(name)
    return "".join(f"{name} ::= {_alternatives(pruned[name])}\n" for name in reached)


def _names(term: Term) -> list[str]:
    match term:
        case Rule(name):
            return [name]
        case Sequence(parts) | Choice(parts):
            return [name for part in parts for name in _names(part)]
        case Repeat(inner, _low, _high):
            return _names(inner)
    return []


def _alternatives(term: Term) -> str:
    parts = term.parts if isinstance(term, Choice) else (term,)
    # Classes side by side without brackets: xgrammar turns a flat list into one automaton, a nested one into rules.
    return " | ".join(" | ".join(_classes(part.chars)) if isinstance(part, OneOf) else _text(part) for part in parts)


def _text(term: Term) -> str:
    """``term`` such that it can stand in a sequence."""
    match term:
        case Literal(text):
            return '"' + "".join(_escaped(ord(char)) for char in text) + '"'
        case OneOf(chars):
            return _class(chars)
        case Rule(name):
            return name
        case Sequence(parts):
            return " ".join(_atom(part) for part in parts)
        case Choice():
            assert term != NOTHING, "pruned before"
            return f"({_alternatives(term)})"
        case Repeat(inner, low, high):
            return _atom(inner) + _count(low, high)


def _atom(term: Term) -> str:
    text = _text(term)
    return f"({text})" if isinstance(term, (Sequence, Repeat)) else text


def _count(low: int, high: int | None) -> str:
    short = {(0, None): "*", (1, None): "+", (0, 1): "?"}
    return short.get((low, high)) or f"{{{low},{'' if high is None else high}}}"


def _class(chars: CharSet) -> str:
    spelled = _classes(chars)
    return spelled[0] if len(spelled) == 1 else f"({' | '.join(spelled)})"


def _classes(chars: CharSet) -> list[str]:
    """Character classes that are one of ``chars`` together; ASCII and the rest apart.

    With both in one class, xgrammar 0.2.9 allows tokens after an optional part that its matcher then rejects: for
    ``[a-f]? [^a-z] "b"`` the mask at the start contains ``ex``.
    """
    parts = [part for part in (chars & _ASCII, chars - _ASCII) if part]
    return [f"[{''.join(_interval(*interval) for interval in part.intervals)}]" for part in parts]


def _interval(first: int, last: int) -> str:
    return _escaped(first) if first == last else f"{_escaped(first)}-{_escaped(last)}"


def _escaped(code: int) -> str:
    """Letters and digits as they are, anything else by number: no rule about special characters can then apply."""
    char = chr(code)
    if char.isascii() and (char.isalnum() or char in " _{}:,"):
        return char
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"
