"""How many drafts are accepted on held-out prompts, and temperatures that make the confidence honest."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tools.tiny.backbone import Backbone, Mode, Weights
from tools.tiny.draft import DraftTrainer
from tools.tiny.loss import logits_of
from tools.tiny.scoring import AnswerSet

_ROWS, _NUM_ANCHORS = 64, 32
_GRID = torch.logspace(-1.2, 1.2, 121)
_NUM_BINS = 15


@dataclass(frozen=True, slots=True)
class Blocks:
    """Greedy drafts behind many anchors of sequences that the backbone wrote itself."""

    accepted: Tensor
    """``[n, S]`` booleans: this draft and all before it are what the backbone writes."""
    confidence: Tensor
    """``[n, S]`` logits."""
    steps: list[int]
    """Tokens of every decoding step (1 + accepted drafts), walking each answer from its start."""


def continue_greedily(backbone: Backbone, weights: Weights, ids: Tensor, start: int, count: int) -> Tensor:
    """Replace ``count`` tokens of ``ids [B, T]`` from ``start`` on by the backbone's own choices."""
    ids = ids.clone()
    for place in range(start, start + count):
        hidden = backbone.forward(weights, ids, Mode()).hidden.detach().unflatten(0, ids.shape)[:, place - 1]
        logits = logits_of(hidden, weights["norm.weight"], weights["head.weight"], backbone.text.rms_norm_eps)
        ids[:, place] = logits.argmax(-1)
    return ids


def draft_blocks(backbone: Backbone, weights: Weights, answers: AnswerSet) -> Blocks:
    """Draft behind every position from which an answer goes on, and walk the answers as decoding would.

    The answers have to be the backbone's own greedy continuations. Of long answers the first :data:`_NUM_ANCHORS`
    positions are taken.
    """
    trainer, size = DraftTrainer(backbone), backbone.text.dspark_block_size
    accepted, confidence, steps = [], [], []
    for ids, asked in zip(answers.ids.split(_ROWS), answers.is_asked.split(_ROWS), strict=True):
        count = len(ids)
        repeats = (torch.arange(_ROWS) % count).tolist()  # one shape: nothing is recompiled
        ids, asked = ids[repeats].to(backbone.device), asked[repeats]
        first = asked.int().argmax(1)  # the answer's tokens lie at first + 1 .. last
        last = first + asked.sum(1)
        # The newest token of a step is at least the first answer token, so its anchor is the position before.
        anchors = first[:, None] + torch.arange(_NUM_ANCHORS)
        is_used = anchors < (last - 1)[:, None]
        placed = anchors.clamp(max=ids.shape[1] - size - 3).to(backbone.device)
        features = [feature.detach() for feature in backbone.forward(weights, ids, Mode()).features]
        hidden, _ = trainer.hidden(weights, features, ids, placed, quantise=True)
        drafts, logits = trainer.propose(weights, hidden.detach(), ids.gather(1, placed + 1))
        places = placed[..., None] + 2 + torch.arange(size, device=backbone.device)  # [B, A, S]
        sequence = torch.arange(len(ids), device=backbone.device)[:, None, None]
        is_inside = (places.cpu() <= last[:, None, None]) & is_used[..., None]
        right = (drafts == ids[sequence, places]).cpu() & is_inside
        survived = right.int().cumprod(-1).bool()
        whole = is_inside.all(-1)  # blocks that do not reach past the answer
        whole[count:] = False
        accepted.append(survived[whole])
        confidence.append(logits.detach().float().cpu()[whole])
        for row in range(count):
            steps += _walk(survived[row].sum(-1)[is_used[row]].tolist())
    return Blocks(torch.cat(accepted), torch.cat(confidence), steps)


def _walk(accepted: list[int]) -> list[int]:
    """Tokens per step when decoding starts at the first anchor: a step emits its accepted drafts and one more."""
    steps, place = [], 0
    while place < len(accepted):
        steps.append(accepted[place] + 1)
        place += accepted[place] + 1
    return steps


def expected_calibration_error(probability: Tensor, outcome: Tensor) -> float:
    """Mean gap between predicted and observed share over equally wide bins, weighted by their counts."""
    bins = (probability * _NUM_BINS).long().clamp(max=_NUM_BINS - 1)
    error = 0.0
    for number in range(_NUM_BINS):
        inside = bins == number
        if inside.any():
            gap = probability[inside].mean() - outcome[inside].float().mean()
            error += float(gap.abs() * inside.float().mean())
    return error


def survival(confidence: Tensor, temperatures: Tensor) -> Tensor:
    """``[n, S]`` probability that a slot and all before it are accepted."""
    return torch.sigmoid(confidence / temperatures).cumprod(-1)


def fit_temperatures(blocks: Blocks) -> Tensor:
    """``[S]``: slot by slot, the temperature with the least calibration error of the survival product (engine 4.2)."""
    temperatures = torch.ones(blocks.confidence.shape[1])
    for slot in range(len(temperatures)):
        errors = []
        for candidate in _GRID:
            temperatures[slot] = candidate
            probability = survival(blocks.confidence[:, : slot + 1], temperatures[: slot + 1])[:, slot]
            errors.append(expected_calibration_error(probability, blocks.accepted[:, slot]))
        temperatures[slot] = _GRID[int(torch.tensor(errors).argmin())]
    return temperatures


def calibration_errors(blocks: Blocks, temperatures: Tensor) -> list[float]:
    """Expected calibration error of the survival product of every slot."""
    probability = survival(blocks.confidence, temperatures)
    slots = range(probability.shape[1])
    return [round(expected_calibration_error(probability[:, slot], blocks.accepted[:, slot]), 4) for slot in slots]
