"""Train the DSpark draft on the frozen backbone: ``python -m tools.tiny.train_draft --steps N``.

Losses per slot k, weighted by ``exp(-(k - 1) / gamma)``: 0.1 cross entropy with the text, 0.9 total variation between
draft and target distribution, 1.0 binary cross entropy of the confidence with one minus that total variation.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from tools.tiny.backbone import Mode
from tools.tiny.data import Batch, BatchMaker, batches
from tools.tiny.draft import DraftTrainer
from tools.tiny.export import export_model
from tools.tiny.loss import logits_of, tensor
from tools.tiny.optimizer import Optimizer, learning_rate
from tools.tiny.run_state import SEED, Setup, load_checkpoint, load_parameters, log, save, set_up

_GAMMA = 4.0
NUM_ANCHORS = 32
"""Blocks per sequence."""
_LENGTH = 512


def draw_anchors(importance: Tensor, block: int, step: int) -> Tensor:
    """``[B, NUM_ANCHORS]`` positions with room for a whole block behind them, drawn by the weight of the next token."""
    generator = torch.Generator().manual_seed(step)
    return torch.multinomial(importance[:, : -block - 2].float() + 0.5, NUM_ANCHORS, generator=generator)


def draft_losses(
    target: Tensor, draft: Tensor, confidence: Tensor, tokens: Tensor, importance: Tensor
) -> tuple[Tensor, Tensor]:
    """Loss and acceptance probability by slot.

    Args:
        target, draft: logits ``[B, A, S, V]``; confidence: logits ``[B, A, S]``.
        tokens: ``[B, A, S]``, what stands in the text; importance: weights of the same shape.
    Returns:
        Scalar, and ``[S]``: mean of one minus total variation.
    """
    log_q, log_p = torch.log_softmax(target, -1), torch.log_softmax(draft, -1)
    accepted = 1 - 0.5 * (log_p.exp() - log_q.exp()).abs().sum(-1)  # [B, A, S]
    cross = -log_p.gather(-1, tokens[..., None])[..., 0]
    trust = F.binary_cross_entropy_with_logits(confidence, accepted.detach(), reduction="none")
    slots = torch.arange(target.shape[2], device=target.device)
    weight = importance * torch.exp(-slots / _GAMMA)
    loss = 0.1 * cross + 0.9 * (1 - accepted) + trust
    shares = (accepted * importance).sum((0, 1)) / importance.sum((0, 1)).clamp(min=1e-6)
    return (loss * weight).sum() / weight.sum().clamp(min=1e-6), shares.detach()


@dataclass(frozen=True, slots=True)
class Prepared:
    """What the frozen backbone says about a batch."""

    ids: Tensor
    """``[B, T]``."""
    importance: Tensor
    """``[B, T]`` on the CPU: answers over their prompts."""
    features: list[Tensor]
    """Per target layer ``[B * T, d]``."""
    hidden: Tensor
    """``[B, T, d]``."""


def prepare(setup: Setup, batch: Batch) -> Prepared:
    """Run the backbone. On a GPU gradients stay enabled: the kernels compiled for its training then serve here too."""
    ids = torch.from_numpy(batch.ids.astype("int64")).to(setup.device)
    with torch.set_grad_enabled(setup.device != "cpu"):
        weights = setup.parameters.rounded(setup.dtype, draft=False)
        result = setup.backbone.forward(weights, ids, Mode())
    features = [feature.detach() for feature in result.features]
    importance = torch.from_numpy(batch.weights).float().sqrt()
    return Prepared(ids, importance, features, result.hidden.detach().unflatten(0, ids.shape))


def train_step(setup: Setup, trainer: DraftTrainer, batch: Prepared, step: int) -> tuple[Tensor, Tensor]:
    """Forward and backward of blocks behind some anchors of one batch."""
    ids, text = batch.ids, setup.backbone.text
    size = text.dspark_block_size
    anchors = draw_anchors(batch.importance, size, step).to(ids.device)
    places = anchors[..., None] + 1 + torch.arange(size, device=ids.device)  # [B, A, S] rows whose logits are predicted
    sequence = torch.arange(len(ids), device=ids.device)[:, None, None]
    weights = setup.parameters.rounded(setup.dtype, draft=True, layers=False)
    hidden = batch.hidden[sequence, places]
    norm, head = tensor(weights, "norm.weight"), tensor(weights, "head.weight")
    target = logits_of(hidden.flatten(0, 2), norm, head, text.rms_norm_eps).detach().unflatten(0, hidden.shape[:3])
    blocks = trainer.hidden(weights, batch.features, ids, anchors, quantise=True)
    slots = trainer.slots(weights, blocks, ids[sequence, places])
    worth = batch.importance.to(ids.device)[sequence, places]
    loss, shares = draft_losses(target, slots.logits, slots.confidence_logits, ids[sequence, places + 1], worth)
    loss.backward()
    return loss.detach(), shares


def prepared_batches(setup: Setup, maker: BatchMaker, args: argparse.Namespace) -> Iterator[Prepared]:
    """A fresh batch for every step, or a few in turn when ``--cached-batches`` says so."""
    if args.cached_batches:
        cache = [prepare(setup, batch) for batch in batches(maker, range(1, args.cached_batches + 1), args.workers)]
        print(f"{len(cache)} batches prepared", flush=True)
        yield from itertools.islice(itertools.cycle(cache), args.steps)
        return
    for batch in batches(maker, range(1, args.steps + 1), args.workers):
        yield prepare(setup, batch)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("build/tiny"))
    parser.add_argument("--out", type=Path, default=Path("build/tiny/out"))
    parser.add_argument("--state", type=Path, default=Path("build/tiny/state.pt"), help="of the finished backbone")
    parser.add_argument("--model", type=Path, help="start from an exported model, draft included, instead of a state")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--max-seconds", type=float, default=1e9, help="cut the run short, with a low learning rate")
    parser.add_argument("--batch-tokens", type=int, default=32768)
    parser.add_argument(
        "--cached-batches", type=int, default=0, help="reuse so many batches with new anchors (for CPUs)"
    )
    parser.add_argument("--peak", type=float, default=3e-3)
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--log-every", type=int, default=100)
    return parser.parse_args()


def main() -> None:
    args = parse()
    setup = set_up(args.data, args.device)
    if args.model is None:
        load_parameters(args.state, setup)
    else:
        load_checkpoint(args.model, setup)
    trainer, optimizer = DraftTrainer(setup.backbone), Optimizer(setup.parameters, "mtp.")
    # Steps of the last phase only, at the shortest length: the draft sees 128 tokens of context.
    maker = BatchMaker(setup.tokenizer_file, setup.prose, args.batch_tokens, 1, SEED + 1, max_length=_LENGTH)
    began = time.monotonic()
    for step, batch in enumerate(prepared_batches(setup, maker, args)):
        loss, shares = train_step(setup, trainer, batch, step)
        progress = max(step / args.steps, (time.monotonic() - began) / args.max_seconds)
        optimizer.step(learning_rate(int(progress * args.steps), args.steps, args.peak, warm_up=20, decay_from=0.3))
        if step % args.log_every == 0:
            accepted = [round(float(share), 4) for share in shares]
            log(args.out, "draft_log.jsonl", {"step": step, "loss": round(float(loss), 4), "accepted": accepted})
        if progress >= 1:
            break
    save(args.state.with_name("draft_state.pt"), setup, optimizer, args.steps)
    export_model(args.out / "model", setup)
    print(f"draft trained in {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
