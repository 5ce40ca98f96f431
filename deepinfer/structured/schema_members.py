"""Members of a JSON object in a fixed order, each required or not, with limits on their number."""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer.structured.problems import SchemaError, UnsatisfiableError
from deepinfer.structured.terms import NOTHING, Literal, Rule, Term, choice, repeat, sequence
from deepinfer.structured.whitespace import Layout

MAX_MEMBER_RULES = 20_000


@dataclass(frozen=True, slots=True)
class Property:
    """A listed member."""

    name: str
    term: Term
    """Key, colon and value; :data:`NOTHING` if the member cannot be there."""
    is_required: bool


@dataclass(frozen=True, slots=True)
class MemberRules:
    """Rules for what follows the opening brace, the closing one included.

    There is one rule per (next property, members so far); the number so far is only told apart as far as it matters.

    Args:
        prefix: start of the rules' names.
        extra: key, colon and value of a member that is not listed; None if there are none.
    """

    prefix: str
    properties: tuple[Property, ...]
    extra: Term | None
    layout: Layout

    @property
    def start(self) -> str:
        return f"{self.prefix}_0_0"

    def build(self, low: int, high: int | None, path: str) -> dict[str, Term]:
        """The rules, for ``low`` to ``high`` members.

        Raises:
            SchemaError: ``low`` would count free keys, which may repeat. UnsatisfiableError: no number fits.
        """
        num_required = sum(each.is_required for each in self.properties)
        if self.extra is not None and low > num_required + 1:
            why = f"only {num_required} members are certain to have different keys"
            raise SchemaError(f"{path}.minProperties", low, why=why, fix="use required, or additionalProperties: false")
        most = len(self.properties) if self.extra is None else None
        if (high is not None and max(low, num_required) > high) or (most is not None and low > most):
            raise UnsatisfiableError(path, {"minProperties": low, "maxProperties": high}, "no number of members fits")
        if high is not None and most is not None and high >= most:
            high = None
        # Past this many members, their number changes nothing any more.
        cap = max(1, 0 if low <= num_required else low, 0 if high is None else high)
        num = len(self.properties)
        if num * cap > MAX_MEMBER_RULES:
            why = f"counting {num} properties up to {cap} takes more than {MAX_MEMBER_RULES} rules"
            raise SchemaError(f"{path}.maxProperties", high, why=why, fix="remove the limits on their number")
        rules = {
            self._name(index, count): self._following(index, count, cap, low, high)
            for index in range(num)
            for count in range(min(index, cap) + 1)
        }
        for count in range(min(num, cap) + 1):
            rules[self._name(num, count)] = self._end(count, low if low > num_required else 0, high)
        return rules

    def _name(self, index: int, count: int) -> str:
        return f"{self.prefix}_{index}_{count}"

    def _before(self, count: int) -> Term:
        return self.layout.comma if count else self.layout.gap

    def _following(self, index: int, count: int, cap: int, low: int, high: int | None) -> Term:
        """Property ``index`` or a later one, after ``count`` members."""
        each = self.properties[index]
        parts: list[Term] = [] if each.is_required else [Rule(self._name(index + 1, count))]
        if each.term != NOTHING and (high is None or count < high):
            after = Rule(self._name(index + 1, min(count + 1, cap)))
            parts.append(sequence(self._before(count), each.term, after))
        return choice(parts)

    def _end(self, count: int, low: int, high: int | None) -> Term:
        """Members that are not listed, and the closing brace."""
        close = sequence(self.layout.gap, Literal("}")) if count else Literal("}")
        missing = max(0, low - count)
        if self.extra is None:
            return NOTHING if missing else close
        if missing > 1:
            return NOTHING
        room = None if high is None else high - count
        if room == 0:
            return close
        following = repeat(sequence(self.layout.comma, self.extra), 0, None if room is None else room - 1)
        some = sequence(self._before(count), self.extra, following, self.layout.gap, Literal("}"))
        return some if missing else choice([close, some])
