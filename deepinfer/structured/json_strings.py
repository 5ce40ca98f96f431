"""JSON strings as terms. One spelling per character where it matters: then lengths count and keys stay distinct."""

from __future__ import annotations

import json
from collections.abc import Iterable

from deepinfer.structured.char_sets import EVERY_CHAR, CharSet
from deepinfer.structured.terms import Literal, Rule, Term, choice, one_of, repeat, sequence

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
    """Any character in any spelling, half surrogates excepted: one character each."""
    hex_digit = one_of(_HEX)
    not_d = one_of(_HEX - CharSet.chars("dD"))
    low_digit = one_of(CharSet.of([(0x30, 0x37)]))
    d = one_of(CharSet.chars("dD"))
    ordinary = choice(
        [
            sequence(not_d, repeat(hex_digit, 3, 3)),
            sequence(d, low_digit, repeat(hex_digit, 2, 2)),
        ]
    )
    pair = sequence(
        *(d, one_of(CharSet.chars("89abAB")), repeat(hex_digit, 2, 2), Literal("\\u")),
        *(d, one_of(CharSet.chars("cdefCDEF")), repeat(hex_digit, 2, 2)),
    )
    escape = choice([one_of(CharSet.chars('"\\/bfnrt')), sequence(Literal("u"), choice([ordinary, pair]))])
    return choice([one_of(EVERY_CHAR - _ESCAPED), sequence(Literal("\\"), escape)])


FREE_CHAR = "json_char"
FREE_STRING = "json_string"
STRING_RULES: dict[str, Term] = {
    FREE_CHAR: _free_char(),
    FREE_STRING: sequence(_QUOTE, repeat(Rule(FREE_CHAR)), _QUOTE),
}


def string_of_length(low: int, high: int | None) -> Term:
    """A JSON string of ``low`` to ``high`` characters (code points)."""
    return sequence(_QUOTE, repeat(Rule(FREE_CHAR), low, high), _QUOTE)


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
