"""Make the tiny model from nothing: texts, tokenizer, backbone, draft, report. One command, resumable in pieces.

``python -m tools.tiny.train`` runs every stage whose result is missing below ``build/tiny``. Stages that need a package
archive (texts) can be done on another machine: copy ``build/tiny`` over. On one H200 all stages take half an hour.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

FOLDER = Path("build/tiny")
BACKBONE_STEPS = 2860
DRAFT_STEPS = 1600


def run(program: str, *arguments: str) -> None:
    """Run one of the programs of this folder and stop when it fails."""
    subprocess.run([sys.executable, "-m", f"tools.tiny.{program}", *arguments], check=True)


def prepare_prose() -> None:
    """Token ids of the training text as ``prose.npy``."""
    backend = Tokenizer.from_file(str(FOLDER / "tokenizer" / "tokenizer.json"))
    pieces = (FOLDER / "texts" / "train.txt").read_text(encoding="utf-8").split("\n\n")
    encoded = backend.encode_batch(pieces, add_special_tokens=False)
    np.save(FOLDER / "prose.npy", np.concatenate([np.array(piece.ids, np.uint16) for piece in encoded]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-seconds", type=float, default=1e9, help="of one piece of the backbone's training")
    args = parser.parse_args()
    if not (FOLDER / "texts" / "train.txt").exists():
        run("fetch_texts")
    if not (FOLDER / "tokenizer" / "tokenizer.json").exists():
        run("tokenizer")
    if not (FOLDER / "prose.npy").exists():
        prepare_prose()
    if not (FOLDER / "draft_state.pt").exists():
        run("train_backbone", "--steps", str(BACKBONE_STEPS), "--max-seconds", str(args.max_seconds))
        if not (FOLDER / "continued.npy").exists():
            run("continuations")
        run("train_draft", "--steps", str(DRAFT_STEPS))
        run("fit_confidence")
    run("report", "--model", str(FOLDER / "out" / "model"))


if __name__ == "__main__":
    main()
