"""Make the tiny model from nothing: texts, tokenizer, backbone, draft, confidence, report. One command, in pieces.

``python -m tools.tiny.train`` runs every stage whose result is missing below ``build/tiny``. Stages that need a package
archive (texts) can be done on another machine: copy ``build/tiny`` over. On one H200 all stages take half an hour.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

FOLDER = Path("build/tiny")
BACKBONE_STEPS = 2860
DRAFT_STEPS = 1584
DRAFT_PEAK = 2.5e-3
CALIBRATION_SAMPLES = "120,512=120,2048=16,4096=6"


def run(program: str, *arguments: str) -> None:
    """Run a module and stop when it fails."""
    subprocess.run([sys.executable, "-m", program, *arguments], check=True)


def backbone_steps() -> int:
    """Steps that the saved backbone was trained for."""
    file = FOLDER / "state.pt"
    return int(torch.load(file, map_location="cpu", mmap=True, weights_only=True)["step"]) if file.exists() else 0


def prepare_prose() -> None:
    """Token ids of the training text as ``prose.npy``."""
    backend = Tokenizer.from_file(str(FOLDER / "tokenizer" / "tokenizer.json"))
    pieces = (FOLDER / "texts" / "train.txt").read_text(encoding="utf-8").split("\n\n")
    encoded = backend.encode_batch(pieces, add_special_tokens=False)
    np.save(FOLDER / "prose.npy", np.concatenate([np.array(piece.ids, np.uint16) for piece in encoded]))


def calibrate(model: Path) -> None:
    """Temperatures of the confidence, from what the engine accepts on held-out prompts (seed 1; scores use seed 0)."""
    log = FOLDER / "confidence.jsonl"
    log.unlink(missing_ok=True)
    flags = ("--model", str(model), "--num-threads", "1", "--num-speculative-tokens", "5", "--confidence-log", str(log))
    samples = ("--suite", "all", "--eval-seed", "1", "--samples", CALIBRATION_SAMPLES)
    run("deepinfer", "eval", *samples, *flags, "--confidence-temperatures", "1")
    run("deepinfer", "calibrate", str(log), "--output", str(model))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-seconds", type=float, default=1e9, help="of one piece of the backbone's training")
    args = parser.parse_args()
    if not (FOLDER / "texts" / "train.txt").exists():
        run("tools.tiny.fetch_texts")
    if not (FOLDER / "tokenizer" / "tokenizer.json").exists():
        run("tools.tiny.tokenizer")
    if not (FOLDER / "prose.npy").exists():
        prepare_prose()
    if backbone_steps() < BACKBONE_STEPS:
        run("tools.tiny.train_backbone", "--steps", str(BACKBONE_STEPS), "--max-seconds", str(args.max_seconds))
    if backbone_steps() < BACKBONE_STEPS:
        sys.exit(f"The backbone has {backbone_steps()} of {BACKBONE_STEPS} steps. The same command goes on.")
    model, fitted = FOLDER / "out" / "model", FOLDER / "confidence_is_fitted"
    if not (FOLDER / "draft_state.pt").exists():
        run("tools.tiny.continuations")
        run("tools.tiny.train_draft", "--steps", str(DRAFT_STEPS), "--peak", str(DRAFT_PEAK))
        fitted.unlink(missing_ok=True)
        (model / "dspark_calibration.json").unlink(missing_ok=True)
    if not fitted.exists():
        run("tools.tiny.fit_confidence")
        fitted.touch()
    if not (model / "dspark_calibration.json").exists():
        calibrate(model)
    run("tools.tiny.report", "--model", str(model))


if __name__ == "__main__":
    main()
