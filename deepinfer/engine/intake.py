"""What a request has to be before it is queued: checks, and the parts that it is made of."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from collections.abc import Sequence as Items
from typing import Any

from deepinfer.config.engine import EngineConfig
from deepinfer.config.model import ModelConfig
from deepinfer.engine.output_builder import OutputBuilder
from deepinfer.engine.request import Branch, Request
from deepinfer.errors import RequestError
from deepinfer.sampling.params import SamplingParams
from deepinfer.sampling.random import child_seed
from deepinfer.sampling.state import SamplingState
from deepinfer.tokenizer.tokenizer import Tokenizer


def check_prompt_ids(ids: Items[Any], field: str, vocab_size: int) -> tuple[int, ...]:
    """``ids`` as plain integers.

    Raises:
        RequestError: none at all, or one that is no integer or out of range; names ``field`` or ``field[index]``.
    """
    checked = []
    for index, token in enumerate(ids):
        try:
            value = -1 if isinstance(token, bool) else operator.index(token)
        except TypeError:
            value = -1
        if not 0 <= value < vocab_size:
            raise RequestError(
                f"{field}[{index}]",
                token,
                why="there is no such token",
                fix=f"token ids are integers from 0 to {vocab_size - 1}",
            )
        checked.append(value)
    if not checked:
        raise RequestError(field, [], why="a prompt holds at least one token", fix="send a token, for example BOS")
    return tuple(checked)


def make_branches(
    request: Request,
    seed: int,
    serials: Iterator[int],
    config: EngineConfig,
    model_config: ModelConfig,
    tokenizer: Tokenizer | None,
) -> None:
    """Give a request its ``n`` outputs.

    Args:
        seed: of the first output; the others draw from seeds derived from it.
        serials: numbers that are never used twice, so that a result that arrives late can't find a newer request.
    """
    params: SamplingParams = request.params
    for index in range(params.n):
        builder = OutputBuilder(
            index,
            params,
            tokenizer,
            model_config.eos_token_id,
            len(request.prompt_ids),
            config.scheduler.max_model_len,
        )
        sampling = SamplingState(
            params,
            request.prompt_ids,
            vocab_size=model_config.text.vocab_size,
            eos_id=model_config.eos_token_id,
            seed=child_seed(seed, index),
        )
        request.branches.append(Branch(f"{request.request_id}#{index}.{next(serials)}", builder, sampling))
