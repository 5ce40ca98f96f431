"""Prompt log-probabilities: scored while the prompt is computed, chunk by chunk, in bounded memory."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from deepinfer.engine.output_builder import token_logprobs as entry_of
from deepinfer.engine.request import Request
from deepinfer.messages import StepPlan
from deepinfer.sampling.logprobs import token_logprobs
from deepinfer.tokenizer.tokenizer import Tokenizer
from deepinfer.worker.model_runner import StepResult

_SLAB_ELEMENTS = 8 << 20  # logits at a time: 32 MB


def score_prompts(
    plan: StepPlan, result: StepResult, wanting: Mapping[str, Request], tokenizer: Tokenizer | None
) -> None:
    """Append to ``prompt_logprobs`` of the requests whose prompt rows ran in this step.

    Args:
        wanting: requests that want them, by the id of their first sequence. Rows that were scored before (a
            recomputation after preemption) are skipped.
    """
    row_begin = 0
    for chunk in plan.chunks:
        begin, row_begin = row_begin, row_begin + chunk.num_rows
        request = wanting.get(chunk.request_id)
        if request is None or request.prompt_logprobs is None:
            continue
        # Row at position p scores the prompt token p + 1, entry p + 1 of the list.
        first = len(request.prompt_logprobs) - 1
        last = min(chunk.end, len(request.prompt_ids) - 1)
        assert first >= chunk.start or first >= last, f"{chunk.request_id}: rows {first} to {chunk.start} not scored"
        if first < last:
            offset = begin - chunk.start
            _score(request, result, slice(first + offset, last + offset), tokenizer)


def _score(request: Request, result: StepResult, rows: slice, tokenizer: Tokenizer | None) -> None:
    assert request.prompt_logprobs is not None
    params = request.params
    count = params.num_prompt_logprobs or 0
    step = max(1, _SLAB_ELEMENTS // result.model.config.vocab_size)
    for begin in range(rows.start, rows.stop, step):
        end = min(begin + step, rows.stop)
        done = len(request.prompt_logprobs)
        targets = torch.tensor(request.prompt_ids[done : done + end - begin], device=result.trunk.device)
        found = token_logprobs(
            result.row_logits(slice(begin, end)),
            targets,
            count,
            params=params if params.logprobs_mode == "processed" else None,
        )
        columns = (targets, found.logprobs, found.ranks, found.top_ids, found.top_logprobs)
        for token, logprob, rank, ids, values in zip(*(column.tolist() for column in columns), strict=True):
            entry = entry_of(token, logprob, rank, list(zip(ids, values, strict=True)), tokenizer)
            request.prompt_logprobs.append(entry)
