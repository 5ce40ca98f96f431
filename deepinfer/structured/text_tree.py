"""Many fixed texts as one term that shares their beginnings: its size is that of the tree rather than of the list."""

from __future__ import annotations

from collections.abc import Iterable

from deepinfer.structured.terms import EMPTY, Literal, Term, choice, sequence

_SHARED_FROM = 8
_MAX_DEPTH = 60


def choice_of_texts(texts: Iterable[str], depth: int = 0) -> Term:
    """One of ``texts``."""
    distinct = list(dict.fromkeys(texts))
    if len(distinct) < _SHARED_FROM or depth > _MAX_DEPTH:
        return choice(Literal(text) for text in distinct)
    by_first: dict[str, list[str]] = {}
    for text in distinct:
        by_first.setdefault(text[:1], []).append(text)
    parts: list[Term] = []
    for first, group in by_first.items():
        if not first:
            parts.append(EMPTY)
            continue
        shared = _common_beginning(group)
        rests = choice_of_texts((text[len(shared) :] for text in group), depth + 1)
        parts.append(sequence(Literal(shared), rests))
    return choice(parts)


def _common_beginning(texts: list[str]) -> str:
    first, last = min(texts), max(texts)  # all others lie between them and share what these share
    length = next((index for index, char in enumerate(first) if last[index : index + 1] != char), len(first))
    return first[:length]
