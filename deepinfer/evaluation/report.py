"""An evaluation as JSON values, and as tables for a terminal."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from deepinfer.evaluation.draft_metrics import DraftMetrics, summarize
from deepinfer.evaluation.evaluate import Evaluation
from deepinfer.evaluation.intervals import wilson
from deepinfer.evaluation.perplexity import bits_per_byte, perplexity
from deepinfer.evaluation.suite import Answer, by_cell

_DIGITS = 4


def as_json(evaluation: Evaluation) -> dict[str, Any]:
    """Scores as JSON values. What was not measured is null.

    ``tasks`` -> name -> length -> ``exact_match``, ``n``, ``low``, ``high`` (95 %); ``perplexity`` over all texts;
    ``dspark`` -> ``mean_accepted_per_step``, ``acceptance_by_position``, ``ece``. Details have keys of their own.
    """
    steps = [] if evaluation.drafts is None else evaluation.drafts.all_steps()
    metrics = summarize(steps)
    texts = dict.fromkeys(window.text for window in evaluation.windows)
    windows_of = {name: [window for window in evaluation.windows if window.text == name] for name in texts}
    return {
        "tasks": _tasks(evaluation.answers),
        "perplexity": _number(perplexity(evaluation.windows)),
        "perplexity_by_text": {
            name: {
                "perplexity": _number(perplexity(windows)),
                "bits_per_byte": _number(bits_per_byte(windows)),
                "num_tokens": sum(window.num_tokens for window in windows),
            }
            for name, windows in windows_of.items()
        },
        "dspark": {
            "mean_accepted_per_step": _number(metrics.mean_accepted_per_step),
            "acceptance_by_position": [_number(share) for share in metrics.acceptance_by_position],
            "ece": _number(metrics.ece),
        },
        "dspark_details": _draft_details(evaluation, metrics),
        "num_errors": sum(answer.error is not None for answer in evaluation.answers),
        "cached_prompt_share": _number(_cached_share(evaluation.answers)),
        "skipped": evaluation.skipped,
        "seconds": round(evaluation.seconds, 1),
    }


def _tasks(answers: Iterable[Answer]) -> dict[str, dict[str, Any]]:
    tasks: dict[str, dict[str, Any]] = {}
    for (task, length), group in by_cell(answers).items():
        found = wilson(sum(answer.is_correct for answer in group), len(group))
        tasks.setdefault(task, {})[str(length)] = {
            "exact_match": _number(found.value),
            "n": len(group),
            "low": _number(found.low),
            "high": _number(found.high),
        }
    return tasks


def _draft_details(evaluation: Evaluation, metrics: DraftMetrics) -> dict[str, Any]:
    by_task = {} if evaluation.drafts is None else evaluation.drafts.steps
    details: dict[str, Any] = {
        "num_steps": metrics.num_steps,
        "ece_by_position": [_number(error) for error in metrics.ece_by_position],
        "by_task": {},
    }
    for task, steps in by_task.items():
        found = summarize(steps)
        details["by_task"][task] = {
            "mean_accepted_per_step": _number(found.mean_accepted_per_step),
            "acceptance_by_position": [_number(share) for share in found.acceptance_by_position],
            "ece": _number(found.ece),
            "num_steps": found.num_steps,
        }
    return details


def _cached_share(answers: Iterable[Answer]) -> float:
    answers = list(answers)
    total = sum(len(answer.problem.prompt_ids) for answer in answers)
    return sum(answer.num_cached_tokens for answer in answers) / total if total else math.nan


def _number(value: float) -> float | None:
    """JSON has no NaN."""
    return round(value, _DIGITS) if math.isfinite(value) else None


def plain(value: Any) -> Any:
    """Dataclasses (intervals, counts) as JSON values, rounded."""
    if dataclasses.is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return _number(value) if isinstance(value, float) else value


def render(record: Mapping[str, Any]) -> RenderableType:
    """The scores of :func:`as_json` for a terminal."""
    parts: list[RenderableType] = [_task_table(record["tasks"])] if record["tasks"] else []
    if record["perplexity"] is not None:
        parts.append(_text_table(record))
    if record["dspark"]["mean_accepted_per_step"] is not None:
        parts.append(_draft_table(record))
    if record.get("ablations"):
        parts.append(_ablation_table(record))
    for name, why in record["skipped"].items():
        parts.append(Text(f"not measured: {name} ({why})"))
    if record["num_errors"]:
        parts.append(Text(f"{record['num_errors']} requests ended with an error and count as wrong"))
    cached = record["cached_prompt_share"]
    if cached:
        parts.append(Text(f"{100 * cached:.1f} % of the prompts' tokens came from the prefix cache"))
    return Group(*parts)


def make_table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right")
    return table


def _task_table(tasks: Mapping[str, Any]) -> Table:
    table = make_table(
        "Exact match, greedy, with 95 % intervals", "task", "tokens", "exact match", "interval", "samples"
    )
    for task, lengths in tasks.items():
        for length, score in lengths.items():
            interval = f"{percent(score['low'])} to {percent(score['high'])}"
            table.add_row(task, length, percent(score["exact_match"]), interval, str(score["n"]))
    return table


def _text_table(record: Mapping[str, Any]) -> Table:
    table = make_table("Held-out text", "text", "perplexity", "bits per byte", "tokens")
    for name, score in record["perplexity_by_text"].items():
        table.add_row(name, f"{score['perplexity']:.2f}", f"{score['bits_per_byte']:.3f}", str(score["num_tokens"]))
    table.add_row("all", f"{record['perplexity']:.2f}", "", "")
    return table


def _draft_table(record: Mapping[str, Any]) -> Table:
    table = make_table("DSpark", "prompts", "tokens per step", "accepted at position 1, 2, ...", "ECE", "steps")

    def row(name: str, score: Mapping[str, Any], num_steps: int) -> None:
        shares = " ".join("-" if share is None else f"{share:.2f}" for share in score["acceptance_by_position"])
        ece = "-" if score["ece"] is None else percent(score["ece"])
        table.add_row(name, f"{score['mean_accepted_per_step']:.2f}", shares, ece, str(num_steps))

    details = record["dspark_details"]
    for task, score in details["by_task"].items():
        row(task, score, score["num_steps"])
    row("all", record["dspark"], details["num_steps"])
    return table


def _ablation_table(record: Mapping[str, Any]) -> Table:
    ablations = record["ablations"]
    table = make_table(
        "Without a mechanism: exact match (change)",
        "task",
        "tokens",
        "whole model",
        *(name.replace("_", " ") for name in ablations),
    )
    whole = next(iter(ablations.values()))["tasks"]
    for task, lengths in whole.items():
        for length, first in lengths.items():
            cells = [each["tasks"][task][length] for each in ablations.values()]
            shown = [f"{percent(cell['exact_match'])} ({100 * cell['change']['value']:+.0f})" for cell in cells]
            table.add_row(task, length, percent(first["whole_model"]), *shown)
    values = [each["perplexity"] for each in ablations.values()]
    if all(value is not None for value in values) and record["perplexity"] is not None:
        first = next(iter(ablations.values()))["whole_model_perplexity"]
        table.add_row("perplexity", "", f"{first:.2f}", *(f"{value:.2f}" for value in values))
    return table


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"
