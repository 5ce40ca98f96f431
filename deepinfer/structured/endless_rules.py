"""Whether a grammar that a user wrote derives any text: from the rules as the grammar library has read them.

Grammars that we write ourselves are analysed as terms (``terms.py``). A text in the library's notation is not read here
a second time: the library says what it has read, as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from deepinfer.structured import native
from deepinfer.structured.char_sets import CharSet
from deepinfer.structured.problems import SchemaError

# Kinds of expression in the library's JSON; those of tokens and tags, 7 and 9 to 11, derive something by themselves.
_CHARACTER_CLASS, _RULE, _SEQUENCE, _CHOICE, _REPEAT = 1, 4, 5, 6, 8
_MOST_NAMES = 5


def require_text(text: str, root: str) -> None:
    """Refuse a grammar that derives no finite text, as ``root ::= "a" root`` does not.

    A rule derives one if some alternative has only parts that do (the usual fixpoint, in linear time). Only the start
    rule has to: an alternative of it that leads nowhere may be meant so, and is left as it is.

    Raises:
        SchemaError: no text fits; names the rules that never end.
        RuntimeError: the library can't read ``text``.
    """
    grammar = json.loads(str(native.bindings().Grammar.from_ebnf(text, root).serialize_json()))
    names = [rule[0] for rule in grammar["rules"]]
    productive = _productive_rules(grammar)
    if grammar["root_rule_id"] in productive:
        return
    # The library makes rules of its own out of brackets; those names aren't in the text.
    endless = [name for index, name in enumerate(names) if index not in productive and name in text]
    shown = ", ".join(endless[:_MOST_NAMES]) + (", ..." if len(endless) > _MOST_NAMES else "")
    raise SchemaError(
        "ebnf",
        text,
        why="no text fits it: each way through these rules needs one of them again, or a character of an empty class: "
        + shown,
        fix="give one of these rules an alternative that ends",
    )


def _productive_rules(grammar: dict[str, Any]) -> set[int]:
    """Numbers of the rules that derive a finite text.

    Nodes are the expressions, and behind them the rules. Each waits for a number of those below it, and each that turns
    out productive is counted once for every node above it.
    """
    data, starts = grammar["grammar_expr_data"], grammar["grammar_expr_indptr"]
    num_expressions = len(starts)
    above: list[list[int]] = [[] for _ in range(num_expressions + len(grammar["rules"]))]
    missing = [1] * len(above)
    ready = []

    def depend(node: int, below: Sequence[int], needed: int) -> None:
        for each in below:
            above[each].append(node)
        missing[node] = needed
        if needed == 0:
            ready.append(node)

    for node, start in enumerate(starts):
        parts = data[start + 2 : start + 2 + data[start + 1]]
        kind = data[start]
        if kind == _CHARACTER_CLASS:
            depend(node, (), 0 if _has_character(parts) else 1)
        elif kind == _RULE:
            depend(node, [num_expressions + parts[0]], 1)
        elif kind == _SEQUENCE:
            depend(node, parts, len(parts))
        elif kind == _CHOICE:
            depend(node, parts, 1)
        elif kind == _REPEAT:
            rule, low, _high = parts
            depend(node, [num_expressions + rule], min(low, 1))
        else:
            depend(node, (), 0)
    for number, rule in enumerate(grammar["rules"]):
        depend(num_expressions + number, [rule[1]], 1)

    productive = set()
    while ready:
        node = ready.pop()
        if node >= num_expressions:
            productive.add(node - num_expressions)
        for each in above[node]:
            missing[each] -= 1
            if missing[each] == 0:
                ready.append(each)
    return productive


def _has_character(parts: Sequence[int]) -> bool:
    """Whether a class has any character. ``parts`` are whether it is negated, then the ends of its intervals."""
    is_negated, *ends = parts
    intervals = list(zip(ends[::2], ends[1::2], strict=True))
    return bool(~CharSet.of(intervals)) if is_negated else bool(intervals)
