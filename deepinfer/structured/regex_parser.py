"""Regular expressions (the regular part of ECMA-262 syntax) as terms over characters.

Everything that is not a regular language, or whose meaning differs between dialects, is refused by name: back
references, look-around, word boundaries, ``\\p{...}``, inline flags, possessive quantifiers and anchors in the middle.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from deepinfer.structured.char_sets import DIGITS, EVERY_CHAR, LINE_ENDS, SPACE, WORD, CharSet
from deepinfer.structured.problems import SchemaError
from deepinfer.structured.terms import EMPTY, Term, choice, one_of, repeat, sequence

MAX_REPEAT = 100_000
MAX_GROUPS_DEEP = 100
_COUNT = re.compile(r"\{(\d+)(,?)(\d*)\}")
_GROUP_NAME = re.compile(r"\?P?<([A-Za-z_]\w*)>")
_CLASSES = {"d": DIGITS, "D": ~DIGITS, "w": WORD, "W": ~WORD, "s": SPACE, "S": ~SPACE}
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "0": "\0"}
_HEX_ESCAPES = {"x": 2, "u": 4}


class RegexParser:
    """Parses one pattern; use :func:`regex_term`.

    Args:
        pattern: the text. field: how errors name it.
        spell: the term of one character out of a set: what a character looks like where the text will stand.
    """

    def __init__(self, pattern: str, field: str, spell: Callable[[CharSet], Term] = one_of) -> None:
        self.pattern = pattern
        self.field = field
        self.spell = spell
        self.at = 0
        self.depth = 0

    def refuse(self, why: str, fix: str = "rewrite the pattern without it") -> SchemaError:
        return SchemaError(self.field, self.pattern, why=f"at character {self.at + 1}, {why}", fix=fix)

    def peek(self) -> str:
        return self.pattern[self.at : self.at + 1]

    def take(self) -> str:
        char = self.peek()
        self.at += 1
        return char

    def whole(self, is_search: bool) -> Term:
        """The whole pattern.

        Args:
            is_search: a match anywhere in the text counts unless anchors say otherwise (``pattern`` of a JSON schema);
                else the text as a whole has to match.
        """
        around = repeat(self.spell(EVERY_CHAR)) if is_search else EMPTY
        alternatives = []
        while True:
            is_start, term, is_end = self.anchored_sequence()
            alternatives.append(sequence(EMPTY if is_start else around, term, EMPTY if is_end else around))
            if self.peek() != "|":
                break
            self.take()
        if self.at < len(self.pattern):
            raise self.refuse("there is a ')' without a '('", "escape it as \\)")
        return choice(alternatives)

    def anchored_sequence(self) -> tuple[bool, Term, bool]:
        """One top-level alternative: anchored at its start, the term, anchored at its end."""
        is_start = self.peek() == "^"
        while self.peek() == "^":
            self.take()
        parts = []
        while self.peek() not in ("", "|", ")", "$"):
            parts.append(self.quantified())
        is_end = self.peek() == "$"
        while self.peek() == "$":
            self.take()
        if is_end and self.peek() not in ("", "|"):
            raise self.refuse("something follows the anchor $", "put $ at the very end of the pattern")
        return is_start, sequence(*parts), is_end

    def alternatives(self) -> Term:
        """The inside of a group."""
        found = []
        while True:
            parts = []
            while self.peek() not in ("", "|", ")"):
                parts.append(self.quantified())
            found.append(sequence(*parts))
            if self.peek() != "|":
                return choice(found)
            self.take()

    def quantified(self) -> Term:
        term = self.atom()
        is_first = True
        while (found := self.quantifier()) is not None:
            if not is_first:
                raise self.refuse("a quantifier follows a quantifier", "put the inner one in a group (?:...)")
            low, high = found
            if high is not None and low > high:
                raise self.refuse(f"the quantifier {{{low},{high}}} counts down")
            if max(low, high or 0) > MAX_REPEAT:
                raise self.refuse(f"a count is above {MAX_REPEAT}", "ask for less")
            term = repeat(term, low, high)
            is_first = False
            if self.peek() == "?":  # lazy: finds another match in a text, but the same set of texts
                self.take()
            elif self.peek() == "+":
                raise self.refuse("possessive quantifiers are not supported")
        return term

    def quantifier(self) -> tuple[int, int | None] | None:
        short: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
        if self.peek() in short:
            return short[self.take()]
        found = _COUNT.match(self.pattern, self.at)
        if found is None:
            return None
        self.at = found.end()
        low, comma, high = found.groups()
        if len(low) > 9 or len(high) > 9:
            raise self.refuse(f"a count is above {MAX_REPEAT}", "ask for less")
        if not comma:
            if high:
                raise self.refuse("the count is malformed")
            return int(low), int(low)
        return int(low), int(high) if high else None

    def atom(self) -> Term:
        char = self.take()
        match char:
            case "(":
                return self.group()
            case "[":
                return self.spell(self.bracket())
            case ".":
                return self.spell(~LINE_ENDS)
            case "\\":
                return self.spell(self.escape(in_class=False))
            case "*" | "+" | "?":
                raise self.refuse("there is nothing to repeat", f"escape it as \\{char}")
            case "{":
                if _COUNT.match(self.pattern, self.at - 1):
                    raise self.refuse("there is nothing to repeat", "escape it as \\{")
            case "^" | "$":
                raise self.refuse(f"the anchor {char} stands in the middle", "put it at the end of the whole pattern")
        return self.spell(CharSet.chars(char))

    def group(self) -> Term:
        if self.peek() == "?":
            name = _GROUP_NAME.match(self.pattern, self.at)
            if self.pattern.startswith("?:", self.at):
                self.at += 2
            elif name:
                self.at = name.end()
            elif re.match(r"\?<?[=!]", self.pattern[self.at :]):
                raise self.refuse("look-ahead and look-behind are not supported")
            else:
                raise self.refuse("this kind of group is not supported", "use (...) or (?:...)")
        self.depth += 1
        if self.depth > MAX_GROUPS_DEEP:
            raise self.refuse(f"groups are nested more than {MAX_GROUPS_DEEP} deep")
        term = self.alternatives()
        self.depth -= 1
        if self.take() != ")":
            raise self.refuse("a group is not closed", "add ')'")
        return term

    def bracket(self) -> CharSet:
        is_negated = self.peek() == "^"
        if is_negated:
            self.take()
        chars = CharSet(())
        while self.peek() != "]":
            if not self.peek():
                raise self.refuse("a character class is not closed", "add ']'")
            first = self.class_member()
            if self.peek() == "-" and self.pattern[self.at + 1 : self.at + 2] not in ("]", ""):
                self.take()
                last = self.class_member()
                low, high = _single(first), _single(last)
                if low is None or high is None or low > high:
                    raise self.refuse("a range in a character class is not from one character up to another")
                chars |= CharSet.of([(low, high)])
            else:
                chars |= first
        self.take()
        chars = ~chars if is_negated else chars
        if not chars:
            raise self.refuse("a character class matches no character")
        return chars

    def class_member(self) -> CharSet:
        char = self.take()
        if char == "[" and self.peek() == ":":
            raise self.refuse("POSIX classes such as [:alpha:] are not supported", "write the ranges")
        return self.escape(in_class=True) if char == "\\" else CharSet.chars(char)

    def escape(self, in_class: bool) -> CharSet:
        char = self.take()
        if char in _CLASSES:
            return _CLASSES[char]
        if char == "b" and in_class:
            return CharSet.chars("\b")
        if char == "0" and self.peek().isdigit():
            raise self.refuse("octal escapes are not supported", "use \\xHH")
        if char in _CONTROLS:
            return CharSet.chars(_CONTROLS[char])
        if char in _HEX_ESCAPES:
            return self.hex_escape(_HEX_ESCAPES[char])
        if not char or char.isalnum():
            names = {"b": "word boundaries", "B": "word boundaries", "p": "Unicode properties", "": "a lone backslash"}
            names |= {"P": names["p"], "k": "back references", "A": "the anchor \\A", "Z": "the anchor \\Z"}
            what = names.get(char) or ("back references" if char.isdigit() else f"the escape \\{char}")
            raise self.refuse(f"{what}: not supported")
        return CharSet.chars(char)

    def hex_escape(self, digits: int) -> CharSet:
        text = self.pattern[self.at : self.at + digits]
        if not re.fullmatch(f"[0-9A-Fa-f]{{{digits}}}", text):
            raise self.refuse(f"an escape needs {digits} hexadecimal digits")
        self.at += digits
        code = int(text, 16)
        if 0xD800 <= code <= 0xDFFF:
            raise self.refuse("half of a surrogate pair is not a character", "write the character itself")
        return CharSet.of([(code, code)])


def _single(chars: CharSet) -> int | None:
    """Code point of a set of one character."""
    first, last = chars.intervals[0]
    return first if len(chars.intervals) == 1 and first == last else None


def regex_term(pattern: str, field: str, *, is_search: bool = False, spell: Callable[[CharSet], Term] = one_of) -> Term:
    """The texts that a pattern matches.

    Args:
        pattern: ECMA-262 syntax; ``\\d``, ``\\w`` and ``\\s`` as there (ASCII digits and letters).
        field: how errors name it.
        is_search: see :meth:`RegexParser.whole`.
        spell: see :class:`RegexParser`.
    Raises:
        SchemaError: the pattern is malformed or uses something that is not supported; says where and what.
    """
    return RegexParser(pattern, field, spell).whole(is_search)
