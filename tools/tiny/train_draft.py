"""Train the DSpark draft on the frozen backbone: ``python -m tools.tiny.train_draft --steps N``.

Losses per slot k, weighted by ``exp(-(k - 1) / gamma)``: 0.1 cross entropy with the text, 0.9 total variation between
draft and target distribution, 1.0 binary cross entropy of the confidence with one minus that total variation.
"""

from __future__ import annotations

import argparse
import time
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
from tools.tiny.run_state import SEED, Setup, load_parameters, log, save, set_up

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


def train_step(setup: Setup, trainer: DraftTrainer, batch: Batch, step: int) -> tuple[Tensor, Tensor]:
    """Forward and backward of one batch."""
    device, text = setup.device, setup.backbone.text
    ids = torch.from_numpy(batch.ids.astype("int64")).to(device)
    size = text.dspark_block_size
    importance = torch.from_numpy(batch.weights).float().sqrt()  # answers over their prompts
    anchors = draw_anchors(importance, size, step).to(device)
    places = anchors[..., None] + 1 + torch.arange(size, device=device)  # [B, A, S] rows whose logits are predicted
    sequence = torch.arange(len(ids), device=device)[:, None, None]
    weights = setup.parameters.rounded(setup.dtype, draft=True)
    result = setup.backbone.forward(weights, ids, Mode())
    hidden = result.hidden.detach().unflatten(0, ids.shape)[sequence, places]
    norm, head = tensor(weights, "norm.weight"), tensor(weights, "head.weight")
    target = logits_of(hidden.flatten(0, 2), norm, head, text.rms_norm_eps).detach().unflatten(0, hidden.shape[:3])
    features = [feature.detach() for feature in result.features]
    blocks = trainer.hidden(weights, features, ids, anchors, quantise=True)
    slots = trainer.slots(weights, blocks, ids[sequence, places])
    worth = importance.to(device)[sequence, places]
    loss, shares = draft_losses(target, slots.logits, slots.confidence_logits, ids[sequence, places + 1], worth)
    loss.backward()
    return loss.detach(), shares


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("build/tiny"))
    parser.add_argument("--out", type=Path, default=Path("build/tiny/out"))
    parser.add_argument("--state", type=Path, default=Path("build/tiny/state.pt"), help="of the finished backbone")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--max-seconds", type=float, default=1e9, help="cut the run short, with a low learning rate")
    parser.add_argument("--batch-tokens", type=int, default=32768)
    parser.add_argument("--peak", type=float, default=3e-3)
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--log-every", type=int, default=100)
    args = parser.parse_args()
    began = time.monotonic()
    setup = set_up(args.data, args.device)
    load_parameters(args.state, setup)
    trainer, optimizer = DraftTrainer(setup.backbone), Optimizer(setup.parameters, "mtp.")
    # Steps of the last phase only, at the shortest length: the draft sees 128 tokens of context.
    maker = BatchMaker(setup.tokenizer_file, setup.prose, args.batch_tokens, 1, SEED + 1, max_length=_LENGTH)
    for step, batch in enumerate(batches(maker, range(1, args.steps + 1), args.workers)):
        loss, shares = train_step(setup, trainer, batch, step)
        progress = max(step / args.steps, (time.monotonic() - began) / args.max_seconds)
        optimizer.step(learning_rate(int(progress * args.steps), args.steps, args.peak))
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
