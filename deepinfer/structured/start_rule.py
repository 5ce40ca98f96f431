"""When the grammar of a request starts: at once, after reasoning, after a trigger, or after one then the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deepinfer.errors import RequestError
from deepinfer.structured.spec import StructuredSpec
from deepinfer.structured.token_pattern import TokenPattern
from deepinfer.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class StartRule:
    """What has to be generated, in this order, before the grammar starts.

    Args:
        patterns: each is waited for after the one before it.
        bound_token_id: while the last pattern is waited for, this id forces the rest of it.
    """

    patterns: tuple[TokenPattern, ...] = ()
    bound_token_id: int | None = None


def start_rule(
    spec: StructuredSpec, tokenizer: Tokenizer | None, prompt_ids: Sequence[int] = (), begin_marker: str = "<think>"
) -> StartRule:
    """The rule of a request.

    Args:
        prompt_ids: where the end of reasoning is the last mark in it (a chat without thinking), the output does not
            begin inside reasoning and that mark is not waited for.
        begin_marker: spelling of the token that begins reasoning.
    Raises:
        RequestError: ``after_reasoning`` without a tokenizer, or a marker that is no single token of it.
    """
    patterns = []
    if spec.marker is not None:
        marker = _marker_id(spec.marker, tokenizer)
        begin = tokenizer.token_to_id(begin_marker) if tokenizer is not None else None
        last = next((token for token in reversed(prompt_ids) if token in (marker, begin)), None)
        if last != marker:
            patterns.append(TokenPattern((marker,)))
    if spec.trigger_token_ids:
        patterns.append(TokenPattern(spec.trigger_token_ids))
    return StartRule(tuple(patterns), spec.bound_token_id)


def _marker_id(marker: str, tokenizer: Tokenizer | None) -> int:
    if tokenizer is None:
        raise RequestError("after_reasoning", marker, why="this engine has no tokenizer", fix="use trigger_token_ids")
    token = tokenizer.token_to_id(marker)
    if token is None:
        why = "the tokenizer has no token of this spelling"
        raise RequestError("after_reasoning", marker, why=why, fix="use trigger_token_ids for several tokens")
    return token
