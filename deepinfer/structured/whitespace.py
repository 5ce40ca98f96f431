"""Where a JSON text may have whitespace. Bounded unless asked otherwise: a model cannot fill its budget with blanks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal as OneOfThese

from deepinfer.structured.char_sets import CharSet
from deepinfer.structured.terms import EMPTY, Literal, Term, choice, one_of, optional, repeat, sequence

Whitespace = OneOfThese["bounded", "compact", "spaced", "any"]
MAX_INDENT = 32
"""Most blanks after a line break in the style ``bounded``."""


@dataclass(frozen=True, slots=True)
class Layout:
    """What stands around the marks of JSON."""

    gap: Term
    """After an opening and before a closing bracket."""
    comma: Term
    colon: Term


_BOUNDED = optional(choice([Literal(" "), sequence(Literal("\n"), repeat(Literal(" "), 0, MAX_INDENT))]))
_ANY = repeat(one_of(CharSet.chars(" \t\n\r")))

LAYOUTS: dict[str, Layout] = {
    # One space, or a line break and an indent, where pretty-printers put them.
    "bounded": Layout(_BOUNDED, sequence(Literal(","), _BOUNDED), sequence(Literal(":"), optional(Literal(" ")))),
    "compact": Layout(EMPTY, Literal(","), Literal(":")),
    "spaced": Layout(EMPTY, Literal(", "), Literal(": ")),
    "any": Layout(_ANY, sequence(_ANY, Literal(","), _ANY), sequence(_ANY, Literal(":"), _ANY)),
}
