"""Train the backbone: ``python -m tools.tiny.train_backbone --steps N``. Stops and resumes at any step.

A piece ends after ``--max-seconds`` and leaves its state; the same command goes on from there. Batches depend on the
step alone, so pieces give the run that one piece would have given (up to the order of GPU additions).
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from torch import Tensor

from tools.tiny.backbone import Mode
from tools.tiny.data import WEIGHT_UNIT, Batch, BatchMaker, batches, phase_at
from tools.tiny.export import export_model
from tools.tiny.initialise import add_look_back_heads
from tools.tiny.loss import next_token_loss, tensor
from tools.tiny.optimizer import Optimizer, learning_rate
from tools.tiny.run_state import SEED, Setup, log, resume, save, set_up
from tools.tiny.scoring import held_out_sets, score_sets

_LESSON_ROWS = 32
"""Positions per sequence that teach the indexer, for sequences of 512 tokens; longer ones have as many per batch."""
_INDEX_TEMPERATURE = 1 / 16
_INDEX_WEIGHT = 0.5
_BALANCE_STEP = 1e-3
_FREEZE_BALANCE_AT = 0.9


def train_step(setup: Setup, batch: Batch, step: int) -> dict[str, Tensor]:
    """Forward and backward of one batch; gradients are left in the parameters. Values stay on the device."""
    device = setup.device
    ids = torch.from_numpy(batch.ids.astype("int64")).to(device, non_blocking=True)
    units = torch.from_numpy(batch.weights).to(device, non_blocking=True).flatten()
    length = ids.shape[1]
    generator = torch.Generator().manual_seed(step)
    count = _LESSON_ROWS * length // 512
    rows = torch.randint(64, length, (count,), generator=generator).sort().values.to(device)
    weights = setup.parameters.rounded(setup.dtype, draft=False)
    result = setup.backbone.forward(weights, ids, Mode(dense=batch.dense), rows)
    assert result.lessons is not None
    index_loss = result.lessons.loss(_INDEX_TEMPERATURE)
    targets = ids.roll(-1, 1).flatten()
    norm, head = tensor(weights, "norm.weight"), tensor(weights, "head.weight")
    loss, losses = next_token_loss(
        result.hidden, norm, head, targets, units.float() / WEIGHT_UNIT, setup.backbone.text.rms_norm_eps
    )
    (loss + _INDEX_WEIGHT * index_loss).backward()
    is_prose, is_answer = units == WEIGHT_UNIT // 2, units == 3 * WEIGHT_UNIT
    return {
        "loss": loss.detach(),
        "prose": losses[is_prose].mean(),
        "answer": losses[is_answer].mean(),
        "index": index_loss.detach(),
        "loads": result.loads.detach(),
    }


def balance(setup: Setup, loads: Tensor) -> None:
    """Raise the selection bias of experts with less than the mean load, lower that of the others."""
    bias = setup.parameters["layers.ffn.gate.bias"]
    mean = loads.mean(1, keepdim=True)
    bias.data.add_(_BALANCE_STEP * torch.sign(mean - loads))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("build/tiny"))
    parser.add_argument("--out", type=Path, default=Path("build/tiny/out"))
    parser.add_argument("--state", type=Path, default=Path("build/tiny/state.pt"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, required=True, help="of the whole run, not of this piece")
    parser.add_argument("--stop-at", type=int, help="end this piece before this step")
    parser.add_argument("--max-seconds", type=float, default=1e9, help="end this piece after so long")
    parser.add_argument("--batch-tokens", type=int, default=32768)
    parser.add_argument("--peak", type=float, default=3e-3, help="learning rate")
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--log-every", type=int, default=100)
    parser.add_argument("--score-every", type=int, default=1500)
    parser.add_argument("--score-samples", type=int, default=128, help="held-out samples per task")
    args = parser.parse_args()
    began = time.monotonic()
    setup = set_up(args.data, args.device)
    optimizer = Optimizer(setup.parameters, "")
    if args.state.exists():
        first = resume(args.state, setup, optimizer)
    else:
        first = 0
        add_look_back_heads(setup.parameters)
    last = min(args.steps, args.stop_at or args.steps)
    maker = BatchMaker(setup.tokenizer_file, setup.prose, args.batch_tokens, args.steps, SEED)
    sets = held_out_sets(setup.encoder, args.score_samples, 2, (512, 2048))
    step, tokens, mark = first, 0, time.monotonic()
    for batch in batches(maker, range(first, last), args.workers):
        values = train_step(setup, batch, step)
        if step < _FREEZE_BALANCE_AT * args.steps:
            balance(setup, values["loads"])
        optimizer.step(learning_rate(step, args.steps, args.peak))
        step, tokens = step + 1, tokens + batch.ids.size
        if step % args.log_every == 0 or step == last:
            record = {name: round(float(values[name]), 4) for name in ("loss", "prose", "answer", "index")}
            loads = values["loads"]
            record["worst load"] = round(float((loads.max(1).values / loads.mean(1)).max()), 2)
            seconds = time.monotonic() - mark
            log(args.out, "log.jsonl", {"step": step, **record, "tokens_per_s": round(tokens / seconds)})
            tokens, mark = 0, time.monotonic()
        is_over = time.monotonic() - began > args.max_seconds
        if step % args.score_every == 0 or step == last or is_over:
            weights = setup.parameters.rounded(setup.dtype, draft=False)
            scores = score_sets(setup.backbone, weights, sets, Mode(dense=phase_at(step, args.steps).dense))
            log(args.out, "scores.jsonl", {"step": step, "scores": scores})
            tokens, mark = 0, time.monotonic()
        if is_over:
            break
    save(args.state, setup, optimizer, step)
    export_model(args.out / "model", setup)
    print(f"stopped at step {step} of {args.steps} after {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
