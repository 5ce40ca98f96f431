"""Sets of Unicode characters, as sorted intervals of code points without surrogates."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

MAX_CODE_POINT = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)


@dataclass(frozen=True, slots=True)
class CharSet:
    """A set of characters.

    Args:
        intervals: pairs (first, last) inclusive, ascending, neither touching nor overlapping. Build with :meth:`of`.
    """

    intervals: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, intervals: Iterable[tuple[int, int]]) -> CharSet:
        """The union of any intervals, less the surrogates: they aren't characters and have no UTF-8 form."""
        merged: list[tuple[int, int]] = []
        for first, last in sorted(intervals):
            if merged and first <= merged[-1][1] + 1:
                merged[-1] = (merged[-1][0], max(merged[-1][1], last))
            else:
                merged.append((first, last))
        low, high = _SURROGATES
        kept = []
        for first, last in merged:
            kept += [(first, min(last, low - 1))] if first < low else []
            kept += [(max(first, high + 1), last)] if last > high else []
        return cls(tuple(kept))

    @classmethod
    def chars(cls, text: str) -> CharSet:
        """The characters of ``text``."""
        return cls.of((ord(char), ord(char)) for char in text)

    def __or__(self, other: CharSet) -> CharSet:
        return CharSet.of((*self.intervals, *other.intervals))

    def __invert__(self) -> CharSet:
        gaps, start = [], 0
        for first, last in self.intervals:
            if first > start:
                gaps.append((start, first - 1))
            start = last + 1
        if start <= MAX_CODE_POINT:
            gaps.append((start, MAX_CODE_POINT))
        return CharSet.of(gaps)

    def __and__(self, other: CharSet) -> CharSet:
        return ~(~self | ~other)

    def __sub__(self, other: CharSet) -> CharSet:
        return self & ~other

    def __contains__(self, char: str) -> bool:
        return any(first <= ord(char) <= last for first, last in self.intervals)

    def __bool__(self) -> bool:
        return bool(self.intervals)


EVERY_CHAR = ~CharSet(())
DIGITS = CharSet.of([(0x30, 0x39)])
WORD = DIGITS | CharSet.of([(0x41, 0x5A), (0x61, 0x7A)]) | CharSet.chars("_")
# ECMA-262: WhiteSpace and LineTerminator.
SPACE = CharSet.chars("\t\n\v\f\r  \u00a0\u1680\u2028\u2029\u202f\u205f\u3000\ufeff") | CharSet.of([(0x2000, 0x200A)])
LINE_ENDS = CharSet.chars("\n\r\u2028\u2029")
