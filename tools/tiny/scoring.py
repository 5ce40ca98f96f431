"""Scores of the training forward on held-out samples: exact match without decoding, and perplexity.

A greedy answer equals the expected one exactly when every expected token is the argmax behind the tokens before it, so
one forward pass over the expected answer decides it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.evaluation.tasks import (
    Sample,
    Split,
    addition,
    copy_with_edit,
    fact_question,
    json_extraction,
    needle,
    paragraph_question,
)
from tools.tiny.backbone import Backbone, Mode, Weights
from tools.tiny.conversation import Encoder
from tools.tiny.loss import logits_of

_TOKENS_PER_PASS = 32768
SEED = 2025
SHORT_LENGTH, NEEDLE_LENGTHS = 512, (512, 2048, 4096)


@dataclass(frozen=True, slots=True)
class AnswerSet:
    """Held-out conversations of one task at one length, padded at the end."""

    task: str
    length: int
    ids: Tensor
    """int64 ``[n, length]``."""
    is_asked: Tensor
    """``[n, length]``: the token behind this position belongs to the answer."""


def answer_set(encoder: Encoder, samples: list[Sample], length: int, pad: int) -> AnswerSet:
    """Encode first turns; samples that do not fit are left out."""
    ids = torch.full((len(samples), length), pad)
    asked = torch.zeros(len(samples), length, dtype=torch.bool)
    kept = 0
    for sample in samples:
        prompt, answer = encoder.prompt(sample), [*encoder.text(sample.expected), encoder.eos]
        if len(prompt) + len(answer) > length:
            continue
        ids[kept, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        asked[kept, len(prompt) - 1 : len(prompt) + len(answer) - 1] = True
        kept += 1
    return AnswerSet(samples[0].task, length, ids[:kept], asked[:kept])


def held_out_sets(encoder: Encoder, count: int, pad: int, needle_lengths: tuple[int, ...]) -> list[AnswerSet]:
    """The suite: five short tasks and needles at several lengths, ``count`` samples each (needles up to 200)."""
    rng = random.Random(SEED)
    split = Split.HELD_OUT
    makers: tuple[Callable[[], Sample], ...] = (
        lambda: addition(rng, split, digits=3),
        lambda: copy_with_edit(rng, split),
        lambda: json_extraction(rng, split),
        lambda: paragraph_question(rng, split),
        lambda: fact_question(rng, split),
    )
    sets = [answer_set(encoder, [make() for _ in range(count)], SHORT_LENGTH, pad) for make in makers]
    for length in needle_lengths:
        samples = [
            needle(rng, split, length - 8, encoder.measure, num_needles=4 + length // 256)
            for _ in range(min(count, 200))
        ]
        sets.append(answer_set(encoder, samples, length, pad))
    return sets


def exact_matches(backbone: Backbone, weights: Weights, answers: AnswerSet, mode: Mode) -> Tensor:
    """``[n]`` booleans.

    Gradients stay enabled here, as in all scoring: the kernels compiled for training then serve as they are.
    """
    step = min(max(_TOKENS_PER_PASS // answers.length, 1), len(answers.ids))
    results = []
    for start in range(0, len(answers.ids), step):
        ids = answers.ids[start : start + step].to(backbone.device)
        asked = answers.is_asked[start : start + step].to(backbone.device)
        short = step - len(ids)
        padded = torch.cat((ids, ids[:1].expand(short, -1))) if short else ids  # one shape: nothing is recompiled
        hidden = backbone.forward(weights, padded, mode).hidden.detach().unflatten(0, padded.shape)[: len(ids)]
        logits = logits_of(hidden[asked], weights["norm.weight"], weights["head.weight"], backbone.text.rms_norm_eps)
        right = logits.argmax(-1) == ids.roll(-1, 1)[asked]
        wrong = torch.zeros_like(asked).masked_scatter(asked, ~right)
        results.append(~wrong.any(1))
    return torch.cat(results).cpu()


def perplexity(backbone: Backbone, weights: Weights, encoder: Encoder, texts: dict[str, str]) -> dict[str, float]:
    """Perplexity per token and bits per byte of every text, in rows of 512 tokens after BOS."""
    result = {}
    for name, text in texts.items():
        tokens = encoder.text(text)
        rows = [tokens[start : start + 511] for start in range(0, len(tokens) - 511, 511)]
        ids = torch.tensor([[encoder.bos, *row] for row in rows], device=backbone.device)
        total, count = 0.0, 0
        for part in ids.split(_TOKENS_PER_PASS // 512):
            hidden = backbone.forward(weights, part, Mode()).hidden.detach()
            logits = logits_of(hidden, weights["norm.weight"], weights["head.weight"], backbone.text.rms_norm_eps)
            losses = torch.nn.functional.cross_entropy(
                logits.unflatten(0, part.shape)[:, :-1].flatten(0, 1), part[:, 1:].flatten(), reduction="sum"
            )
            total, count = total + float(losses), count + part[:, 1:].numel()
        share = count / len(tokens)
        result[name] = math.exp(total / count)
        result[f"{name} bits per byte"] = total / math.log(2) / (share * len(text.encode("utf-8")))
    return result


def score_sets(backbone: Backbone, weights: Weights, sets: list[AnswerSet], mode: Mode) -> dict[str, dict[str, object]]:
    """Exact match by task and length: ``{task: {length: {exact_match, n}}}``."""
    table: dict[str, dict[str, object]] = {}
    for answers in sets:
        matched = exact_matches(backbone, weights, answers, mode)
        entry = {"exact_match": round(float(matched.float().mean()), 4), "n": len(matched)}
        table.setdefault(answers.task, {})[str(answers.length)] = entry
    return table
