"""Train the DSpark draft on the frozen backbone: ``python -m tools.tiny.train_draft --steps N``.

Losses per slot k, weighted by ``exp(-(k - 1) / gamma)``: cross entropy with the text (weight 1, falling to 0.1 in the
first half), 0.9 total variation between draft and target distribution, 1.0 binary cross entropy of the confidence with
one minus that total variation. Total variation alone hardly moves a token that the draft holds impossible, hence the
cross entropy at first.

The backbone is frozen, so what it says about a batch is kept on the device and used again with other anchors.
"""

from __future__ import annotations

import argparse
import itertools
import random
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tools.tiny.backbone import Mode, Weights
from tools.tiny.data import DRAFT_PHASES, Batch, BatchMaker, batches
from tools.tiny.draft import DraftTrainer
from tools.tiny.export import export_model, keep_backbone
from tools.tiny.initialise import add_draft_look_back_heads
from tools.tiny.loss import logits_of, tensor
from tools.tiny.optimizer import Optimizer, learning_rate
from tools.tiny.run_state import SEED, Setup, load_checkpoint, load_parameters, log, save, set_up

_GAMMA = 4.0
_AFTER_MISMATCH = 0.25
"""Weight of slots behind a token of the text that is not the target's choice: decoding seldom comes there."""
_BALANCE_STEP = 1e-3
_FREEZE_BALANCE_AT = 0.9
_WARM_UP = 100


def draw_anchors(importance: Tensor, block: int, count: int, step: int) -> Tensor:
    """``[B, count]`` positions with room for a whole block behind them, drawn by the weight of the next token."""
    usable = importance[:, : -block - 2].square() + 0.5
    generator = torch.Generator(usable.device).manual_seed(step)
    noise = torch.rand(usable.shape, device=usable.device, generator=generator).clamp(min=1e-20)
    return (noise.log() / usable).topk(count, -1).indices  # without replacement, and without waiting for the device


def draft_losses(
    target: Tensor, draft: Tensor, confidence: Tensor, tokens: Tensor, importance: Tensor, cross_share: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, acceptance probability by slot, and tokens per step of greedy decoding.

    Args:
        target, draft: logits ``[B, A, S, V]``; confidence: logits ``[B, A, S]``.
        tokens: ``[B, A, S]``, what stands in the text; importance: weights of the same shape.
        cross_share: scalar, weight of the cross entropy.
    Returns:
        Scalar; ``[S]``: mean of one minus total variation; scalar: 1 + the slots before the first wrong one.
    """
    log_q, log_p = torch.log_softmax(target, -1), torch.log_softmax(draft, -1)
    accepted = 1 - 0.5 * (log_p.exp() - log_q.exp()).abs().sum(-1)  # [B, A, S]
    cross = -log_p.gather(-1, tokens[..., None])[..., 0]
    trust = F.binary_cross_entropy_with_logits(confidence, accepted.detach(), reduction="none")
    slots = torch.arange(target.shape[2], device=target.device)
    choice = target.argmax(-1)
    agreed = F.pad((choice == tokens).float().cumprod(-1)[..., :-1], (1, 0), value=1.0)
    weight = importance * torch.exp(-slots / _GAMMA) * (_AFTER_MISMATCH + (1 - _AFTER_MISMATCH) * agreed)
    loss = cross_share * cross + 0.9 * (1 - accepted) + trust
    total = importance.sum((0, 1)).clamp(min=1e-6)
    shares = (accepted.detach() * importance).sum((0, 1)) / total
    correct = (draft.argmax(-1) == choice).float().cumprod(-1).sum(-1)
    pace = 1 + (correct * importance[..., 0]).sum() / total[0]
    return (loss * weight).sum() / weight.sum().clamp(min=1e-6), shares, pace


@dataclass(frozen=True, slots=True)
class Prepared:
    """What the frozen backbone says about a batch."""

    ids: Tensor
    """``[B, T]``."""
    importance: Tensor
    """``[B, T]``: answers over their prompts."""
    features: list[Tensor]
    """Per target layer ``[B * T, d]``."""
    hidden: Tensor
    """``[B, T, d]``."""


@torch.no_grad()
def prepare(setup: Setup, weights: Weights, batch: Batch) -> Prepared:
    """Run the backbone."""
    ids = torch.from_numpy(batch.ids.astype("int64")).to(setup.device)
    result = setup.backbone.forward(weights, ids, Mode())
    importance = torch.from_numpy(batch.weights).to(setup.device).float().sqrt()
    return Prepared(ids, importance, result.features, result.hidden.unflatten(0, ids.shape))


def train_step(
    setup: Setup, trainer: DraftTrainer, batch: Prepared, num_anchors: int, step: int, cross_share: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Forward and backward of blocks behind some anchors of one batch.

    Returns:
        Those of :func:`draft_losses`, and how many rows chose each expert.
    """
    ids, text = batch.ids, setup.backbone.text
    size = text.dspark_block_size
    anchors = draw_anchors(batch.importance, size, num_anchors, step)
    places = anchors[..., None] + 1 + torch.arange(size, device=ids.device)  # [B, A, S] rows whose logits are predicted
    sequence = torch.arange(len(ids), device=ids.device)[:, None, None]
    weights = setup.parameters.rounded(setup.dtype, draft=True, layers=False)
    hidden = batch.hidden[sequence, places]
    norm, head = tensor(weights, "norm.weight"), tensor(weights, "head.weight")
    target = logits_of(hidden.flatten(0, 2), norm, head, text.rms_norm_eps).detach().unflatten(0, hidden.shape[:3])
    blocks, loads = trainer.hidden(weights, batch.features, ids, anchors, quantise=True)
    slots = trainer.slots(weights, blocks, ids[sequence, places])
    worth = batch.importance[sequence, places]
    share = torch.full((), cross_share, device=ids.device)
    loss, shares, pace = draft_losses(
        target, slots.logits, slots.confidence_logits, ids[sequence, places + 1], worth, share
    )
    loss.backward()
    return loss.detach(), shares.detach(), pace.detach(), loads.detach()


def balance(setup: Setup, loads: Tensor) -> None:
    """Raise the selection bias of experts with less than the mean load, lower that of the others."""
    bias = setup.parameters["mtp.ffn.gate.bias"]
    bias.data.add_(_BALANCE_STEP * torch.sign(loads.mean(1, keepdim=True) - loads))


def drop_bad_gradients(optimizer: Optimizer) -> Tensor:
    """Set all gradients to zero unless all are finite: one bad batch must not end a run. Does not wait for the device.

    Returns:
        Whether they were finite.
    """
    gradients = [parameter.grad for _, parameter in optimizer.trained() if parameter.grad is not None]
    is_good = torch.nn.utils.get_total_norm(gradients).isfinite()
    for gradient in gradients:
        gradient.copy_(torch.where(is_good, gradient, 0.0))
    return is_good


def prepared_batches(setup: Setup, maker: BatchMaker, args: argparse.Namespace) -> Iterator[Prepared]:
    """A fresh batch every ``--fresh-every`` steps, between them one of the ``--cached-batches`` newest."""
    with torch.no_grad():
        weights = setup.parameters.rounded(setup.dtype, draft=False)
    rng, cache = random.Random(SEED), deque[Prepared](maxlen=args.cached_batches)
    fresh = batches(maker, range(1, args.steps // args.fresh_every + 2), args.workers)
    for step in itertools.count():
        if step % args.fresh_every == 0:
            cache.append(prepare(setup, weights, next(fresh)))
            yield cache[-1]
        else:
            yield cache[rng.randrange(len(cache))]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("build/tiny"))
    parser.add_argument("--out", type=Path, default=Path("build/tiny/out"))
    parser.add_argument("--state", type=Path, default=Path("build/tiny/state.pt"), help="of the finished backbone")
    parser.add_argument("--model", type=Path, help="start from an exported model, draft included, instead of a state")
    parser.add_argument("--restart", action="store_true", help="take the backbone of --model only")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--max-seconds", type=float, default=1e9, help="cut the run short; the rate decays in time")
    parser.add_argument("--batch-tokens", type=int, default=16384)
    parser.add_argument("--anchors", type=int, default=96, help="blocks per sequence")
    parser.add_argument("--fresh-every", type=int, default=8, help="steps from one new batch to the next")
    parser.add_argument("--cached-batches", type=int, default=1000, help="34 MB each with 16,384 tokens in bf16")
    parser.add_argument("--peak", type=float, default=3e-3)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--log-every", type=int, default=100)
    return parser.parse_args()


def train(setup: Setup, optimizer: Optimizer, maker: BatchMaker, args: argparse.Namespace, began: float) -> int:
    """All steps, or those that fit ``--max-seconds``. Returns how many there were."""
    trainer = DraftTrainer(setup.backbone)
    progress, step, first_step_ended = 0.0, 0, began
    num_bad = torch.zeros((), dtype=torch.int64, device=setup.device)
    for step, batch in enumerate(prepared_batches(setup, maker, args)):
        cross_share = max(0.1, 1 - 1.8 * progress)
        loss, shares, pace, loads = train_step(setup, trainer, batch, args.anchors, step, cross_share)
        num_bad = num_bad + ~drop_bad_gradients(optimizer)
        if progress < _FREEZE_BALANCE_AT:
            balance(setup, loads)
        rate = learning_rate(int(10000 * progress), 10000, args.peak, warm_up=0, decay_from=0.3)
        optimizer.step(rate * min(1.0, (step + 1) / _WARM_UP))
        if step == 0:
            first_step_ended = time.monotonic()  # the rate must not decay while the first step compiles
        elapsed = time.monotonic() - first_step_ended
        progress = max((step + 1) / args.steps, elapsed / max(args.max_seconds - (first_step_ended - began), 1e-3))
        if step % args.log_every == 0 or progress >= 1:
            record = {
                "step": step,
                "seconds": round(time.monotonic() - began, 1),
                "loss": round(float(loss), 4),
                "accepted": [round(float(share), 4) for share in shares],
                "tokens per step": round(float(pace), 3),
                "bad": int(num_bad),
                "worst load": round(float((loads.max(1).values / loads.mean(1)).max()), 2),
            }
            log(args.out, "draft_log.jsonl", record)
        if progress >= 1:
            break
    return step + 1


def main() -> None:
    args, began = parse(), time.monotonic()
    setup = set_up(args.data, args.device, is_compiled=False)  # two minutes of compiling gained nothing here
    if args.model is None:
        load_parameters(args.state, setup)
    else:
        load_checkpoint(args.model, setup, draft=not args.restart)
    if args.model is None or args.restart:
        add_draft_look_back_heads(setup.parameters)
    for key, parameter in setup.parameters.items():
        if not key.startswith("mtp."):
            parameter.requires_grad_(False)
    continued = np.load(args.data / "continued.npy")
    optimizer = Optimizer(setup.parameters, "mtp.")
    maker = BatchMaker(
        setup.tokenizer_file, setup.prose, args.batch_tokens, 1, SEED + 1, phases=DRAFT_PHASES, continued=continued
    )
    num_steps = train(setup, optimizer, maker, args, began)
    export_model(args.out / "model", setup)
    if args.model is not None:
        keep_backbone(args.out / "model", args.model)
    save(args.state.with_name("draft_state.pt"), setup, optimizer, num_steps)
    print(f"draft trained in {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
