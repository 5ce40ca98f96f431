"""Decimal spellings of the numbers in a range, as terms. No leading zeros, no ``-0``."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal

from deepinfer.structured.char_sets import CharSet
from deepinfer.structured.terms import EMPTY, NOTHING, Literal, Rule, Term, choice, one_of, optional, repeat, sequence

_MAX_EXTRA_DIGITS = 12
"""Digits after those of an excluded bound: more would round to the bound itself in a reader's double."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """A range of numbers; None is no bound."""

    low: Decimal | None = None
    high: Decimal | None = None
    excludes_low: bool = False
    excludes_high: bool = False

    @property
    def is_free(self) -> bool:
        return self.low is None and self.high is None

    def mirrored(self) -> Bounds:
        """The range of the negated numbers."""
        return Bounds(
            None if self.high is None else -self.high,
            None if self.low is None else -self.low,
            self.excludes_high,
            self.excludes_low,
        )


def digit(first: int, last: int) -> Term:
    """One digit of a range."""
    return one_of(CharSet.of([(48 + first, 48 + last)])) if first <= last else NOTHING


ANY_DIGIT = digit(0, 9)
NATURAL = choice([Literal("0"), sequence(digit(1, 9), repeat(ANY_DIGIT))])
ANY_INTEGER = choice([NATURAL, sequence(Literal("-"), digit(1, 9), repeat(ANY_DIGIT))])
ANY_NUMBER = sequence(
    optional(Literal("-")),
    NATURAL,
    optional(sequence(Literal("."), repeat(ANY_DIGIT, 1))),
    optional(sequence(one_of(CharSet.chars("eE")), optional(one_of(CharSet.chars("+-"))), repeat(ANY_DIGIT, 1, 3))),
)


def integer_term(bounds: Bounds) -> Term:
    """Integers in a range; :data:`NOTHING` if there is none."""
    if bounds.is_free:
        return ANY_INTEGER
    low = high = None
    if bounds.low is not None:
        low = int(bounds.low.to_integral_value(ROUND_CEILING))
        low += bounds.excludes_low and low == bounds.low
    if bounds.high is not None:
        high = int(bounds.high.to_integral_value(ROUND_FLOOR))
        high -= bounds.excludes_high and high == bounds.high
    negative: Term = NOTHING
    if low is None or low < 0:
        negative = _naturals(max(1, 1 if high is None else -high), None if low is None else -low)
    positive = NOTHING if high is not None and high < 0 else _naturals(max(0, low or 0), high)
    return choice(part for part in (positive, sequence(Literal("-"), negative)) if part != NOTHING)


def _naturals(low: int, high: int | None) -> Term:
    """Integers from ``low >= 0`` to ``high``."""
    if high is not None and low > high:
        return NOTHING
    parts = []
    start = low
    while high is None or start <= high:
        length = len(str(start))
        if high is None and length > len(str(low)):
            parts.append(sequence(digit(1, 9), repeat(ANY_DIGIT, length - 1)))
            break
        end = 10**length - 1 if high is None else min(high, 10**length - 1)
        parts.append(_same_length(str(start), str(end)))
        start = 10**length
    return choice(parts)


def _same_length(low: str, high: str) -> Term:
    """Digit strings between two of the same length."""
    if low == high:
        return Literal(low)
    if set(low) == {"0"} and set(high) == {"9"}:
        return repeat(ANY_DIGIT, len(low), len(low))
    first, last, rest = int(low[0]), int(high[0]), len(low) - 1
    if first == last:
        return sequence(Literal(low[0]), _same_length(low[1:], high[1:]))
    parts, inner_first, inner_last = [], first, last
    if set(low[1:]) - {"0"}:
        parts.append(sequence(Literal(low[0]), _same_length(low[1:], "9" * rest)))
        inner_first += 1
    if set(high[1:]) - {"9"}:
        parts.append(sequence(Literal(high[0]), _same_length("0" * rest, high[1:])))
        inner_last -= 1
    if inner_first <= inner_last:
        parts.append(sequence(digit(inner_first, inner_last), repeat(ANY_DIGIT, rest, rest)))
    return choice(parts)


def number_term(bounds: Bounds) -> Term:
    """Numbers in a range, without an exponent if there is a bound; :data:`NOTHING` if there is none."""
    if bounds.is_free:
        return ANY_NUMBER
    zero = Decimal(0)
    negative: Term = NOTHING
    if bounds.low is None or bounds.low < 0:
        mirrored = bounds.mirrored()
        if mirrored.low is None or mirrored.low < 0 or (mirrored.low == 0 and not mirrored.excludes_low):
            mirrored = Bounds(zero, mirrored.high, True, mirrored.excludes_high)
        negative = _non_negative(mirrored)
    positive: Term = NOTHING
    if bounds.high is None or bounds.high >= 0:
        at_zero = bounds.low is None or bounds.low < 0
        low = zero if at_zero or bounds.low is None else bounds.low
        positive = _non_negative(Bounds(low, bounds.high, bounds.excludes_low and not at_zero, bounds.excludes_high))
    return choice(part for part in (positive, sequence(Literal("-"), negative)) if part != NOTHING)


def _non_negative(bounds: Bounds) -> Term:
    """Numbers in a range with ``low >= 0``: those between the whole parts of the bounds, and those at the edges."""
    assert bounds.low is not None
    low_whole, low_digits = _split(bounds.low)
    if bounds.high is None:
        edge = _fraction(low_digits, None, bounds.excludes_low, False)
        inner = sequence(_naturals(low_whole + 1, None), _ANY_FRACTION)
        return choice(part for part in (sequence(Literal(str(low_whole)), edge), inner) if part != NOTHING)
    high_whole, high_digits = _split(bounds.high)
    if low_whole > high_whole:
        return NOTHING
    if low_whole == high_whole:
        edge = _fraction(low_digits, high_digits, bounds.excludes_low, bounds.excludes_high)
        return sequence(Literal(str(low_whole)), edge)
    parts = [
        sequence(Literal(str(low_whole)), _fraction(low_digits, None, bounds.excludes_low, False)),
        sequence(_naturals(low_whole + 1, high_whole - 1), _ANY_FRACTION),
        sequence(Literal(str(high_whole)), _fraction("", high_digits, False, bounds.excludes_high)),
    ]
    return choice(part for part in parts if part != NOTHING)


_ANY_FRACTION = optional(sequence(Literal("."), repeat(ANY_DIGIT, 1)))


def _split(number: Decimal) -> tuple[int, str]:
    """Whole part and the digits after the point, without zeros at the end."""
    whole = int(number)
    text = format(number - whole, "f")
    return whole, text.partition(".")[2].rstrip("0")


def _fraction(low: str, high: str | None, excludes_low: bool, excludes_high: bool) -> Term:
    """Fraction parts (nothing, or a point and digits) between two, given by their digits; ``high`` None is 1.0."""
    is_tight_low = bool(low) or excludes_low
    whole = _Fractions(low, high, excludes_low, excludes_high)
    nothing = [EMPTY] if whole.may_stop(0, is_tight_low, high is not None) else []
    digits = whole.digits(0, is_tight_low, high is not None, needs_digit=True)
    return choice([*nothing, *([] if digits == NOTHING else [sequence(Literal("."), digits)])])


@dataclass(frozen=True, slots=True)
class _Fractions:
    """Digit strings between two, read as the digits after a point."""

    low: str
    high: str | None
    excludes_low: bool
    excludes_high: bool

    def may_stop(self, at: int, on_low: bool, on_high: bool) -> bool:
        """Whether the digits so far are enough, where they equal those of a bound so far."""
        fits_low = not on_low or (not self.low[at:] and not self.excludes_low)
        fits_high = not on_high or bool((self.high or "")[at:]) or not self.excludes_high
        return fits_low and fits_high

    def digits(self, at: int, on_low: bool, on_high: bool, needs_digit: bool = False) -> Term:
        """All ways to go on from position ``at``."""
        high = self.high or ""
        if on_low and at >= len(self.low) and not self.excludes_low:
            on_low = False
        if not on_low and not on_high:
            return repeat(ANY_DIGIT, int(needs_digit))
        if on_high and at >= len(high):  # only zeros are left below the bound
            zeros = repeat(Literal("0"), int(needs_digit), _MAX_EXTRA_DIGITS)
            return NOTHING if on_low or self.excludes_high else zeros
        if on_low and at >= len(self.low) and not on_high:
            zeros = repeat(Literal("0"), 0, _MAX_EXTRA_DIGITS)
            return sequence(zeros, digit(1, 9), repeat(ANY_DIGIT, 0, _MAX_EXTRA_DIGITS))
        parts: list[Term] = [] if needs_digit or not self.may_stop(at, on_low, on_high) else [EMPTY]
        first = int(self.low[at : at + 1] or 0) if on_low else 0
        last = int(high[at]) if on_high else 9
        for value in range(first, last + 1):
            is_inner = not (on_low and value == first) and not (on_high and value == last)
            if not is_inner:
                rest = self.digits(at + 1, on_low and value == first, on_high and value == last)
                parts += [] if rest == NOTHING else [sequence(Literal(str(value)), rest)]
        inner = digit(first + on_low, last - on_high)
        parts += [] if inner == NOTHING else [sequence(inner, repeat(ANY_DIGIT))]
        return choice(parts)


def multiples_term(factor: int, rule_name: str) -> dict[str, Term]:
    """Rules for the integers divisible by ``factor``; the start rule is ``rule_name``.

    One rule per remainder: reading a digit d takes the remainder r to ``(10 * r + d) % factor``.
    """

    def steps(remainder: int, digits: range) -> list[Term]:
        return [
            sequence(Literal(str(value)), Rule(f"{rule_name}_{(10 * remainder + value) % factor}")) for value in digits
        ]

    rules: dict[str, Term] = {
        f"{rule_name}_{remainder}": choice(
            [*([EMPTY] if remainder == 0 else []), *steps(remainder, range(10))],
        )
        for remainder in range(factor)
    }
    rules[rule_name] = choice([Literal("0"), sequence(optional(Literal("-")), choice(steps(0, range(1, 10))))])
    return rules
