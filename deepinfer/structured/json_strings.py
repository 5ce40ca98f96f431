"""JSON strings as terms. One spelling per character where it matters: then lengths count and keys stay distinct."""

from __future__ import annotations

import json
from collections.abc import Iterable

from deepinfer.structured.char_sets import EVERY_CHAR, CharSet
from deepinfer.structured.terms import Choice, Literal, Rule, Term, choice, one_of, repeat, sequence

_ESCAPED = CharSet.of([(0, 0x1F)]) | CharSet.chars('"\\')
"""Characters that a JSON string cannot hold as they are."""
_HEX = CharSet.of([(0x30, 0x39), (0x41, 0x46), (0x61, 0x66)])
_QUOTE = Literal('"')


def spell_in_json(chars: CharSet) -> Term:
    """One character of a set as it stands inside a JSON string: itself, or its shortest escape."""
    escapes = [
        Literal(json.dumps(chr(code))[1:-1])
        for first, last in (chars & _ESCAPED).intervals
        for code in range(first, last + 1)
    ]
    plain = chars - _ESCAPED
    return choice([*([one_of(plain)] if plain else []), *escapes])


def _free_char() -> Term:
    """Any character in any spelling, half surrogates excepted: one character each.

    A flat list of alternatives: nested ones become rules of their own, and the library decides tokens that reach past
    the end of a rule one by one for every mask (60 ms instead of 25 us for a vocabulary of 129,280).
    """
    digit = one_of(_HEX)
    d = one_of(CharSet.chars("dD"))
    unicode = Literal("\\u")
    high = sequence(unicode, d, one_of(CharSet.chars("89abAB")), digit, digit)
    low = sequence(unicode, d, one_of(CharSet.chars("cdefCDEF")), digit, digit)
    return choice(
        [
            one_of(EVERY_CHAR - _ESCAPED),
            sequence(Literal("\\"), one_of(CharSet.chars('"\\/bfnrt'))),
            sequence(unicode, one_of(_HEX - CharSet.chars("dD")), digit, digit, digit),
            sequence(unicode, d, one_of(CharSet.of([(0x30, 0x37)])), digit, digit),
            sequence(high, low),
        ]
    )


_FREE_CHAR = _free_char()
FREE_STRING = "json_string"
STRING_RULES: dict[str, Term] = {FREE_STRING: sequence(_QUOTE, repeat(_FREE_CHAR), _QUOTE)}
_MAX_CHAIN = 256


def string_of_length(low: int, high: int | None, prefix: str) -> dict[str, Term]:
    """Rules for a JSON string of ``low`` to ``high`` characters (code points); the start rule is ``prefix``.

    One rule per length so far, each ending in the next: masks take as little time as without limits. Beyond
    256 characters that would take too long to compile; there the library counts, and its masks are slow.
    """
    last = low if high is None else high
    if last > _MAX_CHAIN:
        return {prefix: sequence(_QUOTE, repeat(_FREE_CHAR, low, high), _QUOTE)}
    assert isinstance(_FREE_CHAR, Choice)
    rules: dict[str, Term] = {prefix: sequence(_QUOTE, Rule(f"{prefix}_0"))}
    for length in range(last + 1):
        following = Rule(f"{prefix}_{min(length + 1, last)}")
        grows = length < last or high is None
        steps = [sequence(part, following) for part in _FREE_CHAR.parts] if grows else []
        rules[f"{prefix}_{length}"] = choice([*([_QUOTE] if length >= low else []), *steps])
    return rules


def quoted(term: Term) -> Term:
    return sequence(_QUOTE, term, _QUOTE)


def key_other_than(names: Iterable[str], prefix: str) -> dict[str, Term]:
    """Rules for a JSON string that is none of ``names``; the start rule is ``prefix``.

    They walk the tree of the names' beginnings: a text leaves the tree, or ends where no name does.
    """
    wanted = set(names)
    beginnings = {name[:length] for name in wanted for length in range(len(name) + 1)} | {""}
    number = {
        beginning: index for index, beginning in enumerate(sorted(beginnings, key=lambda text: (len(text), text)))
    }
    rest = sequence(repeat(spell_in_json(EVERY_CHAR)), _QUOTE)
    following: dict[str, list[str]] = {beginning: [] for beginning in beginnings}
    for beginning in beginnings - {""}:
        following[beginning[:-1]].append(beginning[-1])
    rules: dict[str, Term] = {prefix: sequence(_QUOTE, Rule(f"{prefix}_0"))}
    for beginning, index in number.items():
        chars = sorted(following[beginning])
        parts: list[Term] = [] if beginning in wanted else [_QUOTE]
        parts.append(sequence(spell_in_json(EVERY_CHAR - CharSet.chars("".join(chars))), rest))
        parts += [
            sequence(spell_in_json(CharSet.chars(char)), Rule(f"{prefix}_{number[beginning + char]}")) for char in chars
        ]
        rules[f"{prefix}_{index}"] = choice(parts)
    return rules
