"""Score the finished model and its draft with all ablations: ``python -m tools.tiny.report``.

It writes ``metrics.json`` and ``loss.png``. The temperatures in there are fitted to the drafts of the training program,
those of the model to the engine's (``deepinfer calibrate``).
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from pathlib import Path
from typing import Any

import torch

from tools.tiny.backbone import Mode
from tools.tiny.export import export_model
from tools.tiny.run_state import Setup, load_checkpoint, load_parameters, log, set_up
from tools.tiny.scoring import (
    NEEDLE_LENGTHS,
    AnswerSet,
    exact_matches,
    held_out_sets,
    perplexity,
    score_sets,
)
from tools.tiny.speculation import (
    Blocks,
    calibration_errors,
    continue_greedily,
    draft_blocks,
    fit_temperatures,
)

ABLATIONS = {
    "no engram": Mode(no_engram=True),
    "window only": Mode(window_only=True),
    "random selection": Mode(random_selection=True),
    "dense attention": Mode(dense=True),
}
_PROSE_PROMPT, _PROSE_ANSWER, _PROSE_ROWS = 128, 48, 64


def prose_set(setup: Setup, weights: Any) -> AnswerSet:
    """Held-out prose, each prompt continued by the model itself."""
    tokens = [token for text in setup.held_out_texts.values() for token in setup.encoder.text(text)]
    stride = (len(tokens) - _PROSE_PROMPT) // _PROSE_ROWS
    ids = torch.full((_PROSE_ROWS, 512), 2)
    for row in range(_PROSE_ROWS):
        ids[row, 0] = setup.encoder.bos
        ids[row, 1:_PROSE_PROMPT] = torch.tensor(tokens[row * stride : row * stride + _PROSE_PROMPT - 1])
    ids = continue_greedily(setup.backbone, weights, ids.to(setup.device), _PROSE_PROMPT, _PROSE_ANSWER).cpu()
    asked = torch.zeros(ids.shape, dtype=torch.bool)
    asked[:, _PROSE_PROMPT - 1 : _PROSE_PROMPT + _PROSE_ANSWER - 1] = True
    return AnswerSet("prose", 512, ids, asked)


def own_answers(setup: Setup, weights: Any, answers: AnswerSet) -> AnswerSet:
    """The samples that the model answers as expected: there the expected answer is its own continuation."""
    matched = exact_matches(setup.backbone, weights, answers, Mode())
    return AnswerSet(answers.task, answers.length, answers.ids[matched], answers.is_asked[matched])


def measure_drafts(setup: Setup, weights: Any, sets: list[AnswerSet]) -> dict[str, Any]:
    """Acceptance by task, and temperatures fitted on one half of the blocks and judged on the other."""
    tasks: dict[str, Any] = {}
    gathered = []
    for answers in sets:
        blocks = draft_blocks(setup.backbone, weights, answers)
        tasks[answers.task] = {
            "mean_accepted_per_step": round(sum(blocks.steps) / max(len(blocks.steps), 1), 3),
            "acceptance_by_position": [round(float(share), 3) for share in blocks.accepted.float().mean(0)],
            "n": len(blocks.steps),
        }
        gathered.append(blocks)
    confidence = torch.cat([blocks.confidence for blocks in gathered])
    accepted = torch.cat([blocks.accepted for blocks in gathered])
    steps = [length for blocks in gathered for length in blocks.steps]
    order = torch.randperm(len(accepted), generator=torch.Generator().manual_seed(0))
    halves = [Blocks(accepted[part], confidence[part], steps) for part in order.chunk(2)]
    temperatures = fit_temperatures(halves[0])
    return {
        "tasks": tasks,
        "mean_accepted_per_step": round(sum(steps) / len(steps), 3),
        "acceptance_by_position": [round(float(share), 4) for share in accepted.float().mean(0)],
        "temperatures": [round(float(value), 4) for value in temperatures],
        "ece_by_position_before": calibration_errors(halves[1], torch.ones(len(temperatures))),
        "ece_by_position": calibration_errors(halves[1], temperatures),
        "n_blocks": len(accepted),
    }


def report_on_scores(setup: Setup, sets: list[AnswerSet], out: Path, metrics: dict[str, Any]) -> None:
    """Exact match and perplexity."""
    weights = setup.parameters.rounded(setup.dtype, draft=False)
    metrics["tasks"] = score_sets(setup.backbone, weights, sets, Mode())
    log(out, "report.jsonl", metrics)
    metrics["perplexity"] = perplexity(setup.backbone, weights, setup.encoder, setup.held_out_texts)
    log(out, "report.jsonl", metrics["perplexity"])


def report_on_draft(setup: Setup, sets: list[AnswerSet], out: Path, metrics: dict[str, Any]) -> None:
    """Acceptance and calibration."""
    weights = setup.parameters.rounded(setup.dtype, draft=True)
    own = [own_answers(setup, weights, answers) for answers in sets if answers.length == 512]
    own = [answers for answers in own if len(answers.ids)]
    metrics["dspark"] = measure_drafts(setup, weights, [*own, prose_set(setup, weights)])
    log(out, "report.jsonl", metrics["dspark"])


def report_on_ablations(setup: Setup, sets: list[AnswerSet], out: Path, metrics: dict[str, Any]) -> None:
    """Exact match without one mechanism at a time."""
    weights = setup.parameters.rounded(setup.dtype, draft=False)
    metrics["ablations"] = {}
    for name, mode in ABLATIONS.items():
        metrics["ablations"][name] = score_sets(setup.backbone, weights, sets, mode)
        log(out, "report.jsonl", {name: metrics["ablations"][name]})


def plot_log(folder: Path) -> None:
    """Loss curves of ``log.jsonl`` as ``loss.png``."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    records = [json.loads(line) for line in (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    scores = [json.loads(line) for line in (folder / "scores.jsonl").read_text(encoding="utf-8").splitlines()]
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    for name in ("prose", "answer", "index"):
        left.plot([record["step"] for record in records], [record[name] for record in records], label=name)
    left.set(xlabel="step", ylabel="loss in nats", yscale="log", title="training loss")
    left.legend()
    for task in scores[-1]["scores"]:
        for length in scores[-1]["scores"][task]:
            values = [record["scores"][task][length]["exact_match"] for record in scores]
            right.plot([record["step"] for record in scores], values, label=f"{task} {length}")
    right.set(xlabel="step", ylabel="exact match, held out", title="tasks")
    right.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(folder / "loss.png", dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("build/tiny"))
    parser.add_argument("--out", type=Path, default=Path("build/tiny/out"))
    parser.add_argument("--state", type=Path, default=Path("build/tiny/draft_state.pt"))
    parser.add_argument("--model", type=Path, help="report on an exported model instead of a state")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--draft-only", action="store_true", help="leave out what depends on the backbone alone")
    args = parser.parse_args()
    began = time.monotonic()
    setup = set_up(args.data, args.device, is_compiled=not args.draft_only)
    if args.model is None:
        load_parameters(args.state, setup)
        export_model(args.out / "model", setup)
    else:
        load_checkpoint(args.model, setup)
        if args.model.resolve() != (args.out / "model").resolve():
            shutil.copytree(args.model, args.out / "model", dirs_exist_ok=True)
    sets = held_out_sets(setup.encoder, args.samples, 2, NEEDLE_LENGTHS)
    metrics: dict[str, Any] = {}
    if args.draft_only:
        with torch.no_grad():
            report_on_draft(setup, sets, args.out, metrics)
    else:
        report_on_scores(setup, sets, args.out, metrics)
        report_on_draft(setup, sets, args.out, metrics)
        report_on_ablations(setup, sets, args.out, metrics)
        plot_log(args.out)
    (args.out / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n", encoding="utf-8")
    print(f"report written in {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
