"""From what callers pass to :class:`LLM` to checked prompts: everything is looked at before anything is queued."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deepinfer.errors import RequestError
from deepinfer.sampling.params import SamplingParams
from deepinfer.tokenizer.tokenizer import Tokenizer
from deepinfer.tokenizer.valid_text import require_text

Prompt = str | Mapping[str, Any] | Sequence[int]


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """A prompt ready for the engine. ``error`` is set when only this prompt is at fault."""

    text: str | None
    ids: Sequence[int]
    error: RequestError | None = None


def as_list(prompts: Prompt | Sequence[Prompt] | None, prompt_token_ids: Any) -> list[Prompt]:
    """One list of prompts from the two arguments of ``generate``.

    Raises:
        RequestError: neither is given, or both with different lengths.
    """
    if isinstance(prompts, (str, Mapping)):
        prompts = [prompts]
    prompts = None if prompts is None else _listed(prompts, "prompts")
    if prompt_token_ids is None:
        if prompts is None:
            raise RequestError(
                "prompts", None, why="there is nothing to generate from", fix="pass prompts or prompt_token_ids"
            )
        if prompts and _integer(prompts[0]) is not None:
            raise RequestError("prompts", prompts, why="these are token ids", fix="pass them as prompt_token_ids")
        return prompts
    given = _listed(prompt_token_ids, "prompt_token_ids")
    if given and _integer(given[0]) is not None:
        given = [given]
    if prompts is not None and len(prompts) != len(given):
        raise RequestError(
            "prompt_token_ids",
            f"{len(given)} lists",
            why=f"there are {len(prompts)} prompts",
            fix="pass as many lists of ids as prompts, or only one of the two",
        )
    if prompts is None:
        return given
    # Both given: the ids are used, the texts are echoed.
    return [
        {"prompt": text, "prompt_token_ids": ids} if isinstance(text, str) else ids
        for text, ids in zip(prompts, given, strict=True)
    ]


def _listed(values: Any, field: str) -> list[Any]:
    """A list of what a caller passed as one. Texts, dicts and sets are none: their order or meaning is another."""
    if isinstance(values, (str, bytes, Mapping, set, frozenset)) or not isinstance(values, Iterable):
        raise RequestError(field, values, why=f"it is a {type(values).__name__}, not a list", fix="pass a list")
    return list(values)


def prepare_prompt(prompt: Prompt, index: int, tokenizer: Tokenizer | None, vocab_size: int) -> PreparedPrompt:
    """Token ids of one prompt.

    Raises:
        RequestError: an empty prompt, no text, a lone surrogate. Ids out of range are not raised but returned as
            ``error``: they end that request only.
    """
    field = f"prompts[{index}]"
    text: str | None = None
    ids: Any = prompt
    if isinstance(prompt, Mapping):
        if prompt.get("multi_modal_data") is not None:
            raise RequestError(field, dict(prompt), why="images are not supported yet", fix="send text only")
        unknown = sorted(set(prompt) - {"prompt", "prompt_token_ids", "multi_modal_data"})
        if unknown or not prompt:
            raise RequestError(
                field, dict(prompt), why="a prompt has the keys prompt and prompt_token_ids", fix="use one of them"
            )
        text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    elif isinstance(prompt, str):
        text, ids = prompt, None
    if ids is None:
        if tokenizer is None:
            raise RequestError(field, text, why="this engine has no tokenizer", fix="pass prompt_token_ids")
        if text == "":
            raise RequestError(field, text, why="an empty prompt has nothing to continue", fix="write something")
        return PreparedPrompt(text, tokenizer.encode(text, add_bos=True, field=field))  # type: ignore[arg-type]
    if text is not None:
        require_text(text, field)
    if isinstance(ids, (str, bytes, Mapping, set, frozenset)) or not hasattr(ids, "__len__"):
        raise RequestError(field, ids, why="token ids are a list of integers", fix="pass such a list")
    if len(ids) == 0:
        raise RequestError(field, [], why="an empty prompt has nothing to continue", fix="pass at least one token id")
    return PreparedPrompt(text, ids, _bad_id(ids, field, vocab_size))


def _bad_id(ids: Sequence[Any], field: str, vocab_size: int) -> RequestError | None:
    for place, token in enumerate(ids):
        value = _integer(token)
        if value is None or not 0 <= value < vocab_size:
            return RequestError(
                f"{field}[{place}]",
                token,
                why="there is no such token",
                fix=f"token ids are integers from 0 to {vocab_size - 1}",
            )
    return None


def _integer(value: Any) -> int | None:
    """``value`` as an int if it is one, of Python or NumPy; bools and arrays (which have ``__index__`` too) are not."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


ParamsArgument = SamplingParams | Mapping[str, Any] | Sequence[SamplingParams | Mapping[str, Any]] | None


def params_per_prompt(params: ParamsArgument, count: int, default: SamplingParams) -> list[SamplingParams]:
    """One :class:`SamplingParams` per prompt from one for all, a list, or None.

    Raises:
        RequestError: a list of another length, or values that can't be parameters.
    """
    if params is None:
        return [default] * count
    if isinstance(params, (SamplingParams, Mapping)):
        return [_one(params, "sampling_params")] * count
    if isinstance(params, str) or not isinstance(params, Sequence):
        raise RequestError("sampling_params", params, why="it is no SamplingParams", fix="pass one, or a list of them")
    if len(params) != count:
        raise RequestError(
            "sampling_params",
            f"{len(params)} entries",
            why=f"there are {count} prompts",
            fix="pass one for all, or as many as prompts",
        )
    return [_one(each, f"sampling_params[{index}]") for index, each in enumerate(params)]


def _one(params: object, field: str) -> SamplingParams:
    if isinstance(params, SamplingParams):
        return params
    if isinstance(params, Mapping):
        return SamplingParams.from_dict(params)
    raise RequestError(field, params, why="it is no SamplingParams", fix="pass SamplingParams(...) or a dict")
