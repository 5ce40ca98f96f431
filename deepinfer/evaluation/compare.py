"""Two engines on the same samples: differences with intervals that know that the samples are the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from deepinfer.errors import ConfigError
from deepinfer.evaluation.evaluate import Evaluation
from deepinfer.evaluation.intervals import Interval, PairCounts, mcnemar, paired_difference, ratio_difference
from deepinfer.evaluation.report import make_table, percent, plain
from deepinfer.evaluation.suite import Answer, by_cell


def compare(a: Evaluation, b: Evaluation) -> dict[str, Any]:
    """Differences B - A as JSON values; parts that only one of them measured are left out.

    ``tasks`` -> name -> length -> ``a``, ``b``, ``difference`` (with its interval), the discordant counts,
    ``p_value`` (McNemar, exact) and ``same_text``, the share of equal answers.

    Raises:
        ConfigError: the two were asked different samples (their tokenizers differ).
    """
    return {
        "tasks": _compare_tasks(a.answers, b.answers),
        "bits_per_byte": plain(_compare_texts(a, b)),
        "tokens_per_step": plain(_compare_steps(a.answers, b.answers)),
    }


def _compare_tasks(a: Sequence[Answer], b: Sequence[Answer]) -> dict[str, dict[str, Any]]:
    tasks: dict[str, dict[str, Any]] = {}
    cells_b = by_cell(b)
    for cell, left in by_cell(a).items():
        if cell not in cells_b:
            continue
        right = cells_b[cell]
        _check_same_samples(left, right)
        pairs = PairCounts.of([answer.is_correct for answer in left], [answer.is_correct for answer in right])
        same = sum(x.text == y.text for x, y in zip(left, right, strict=True)) / len(left)
        tasks.setdefault(cell[0], {})[str(cell[1])] = {
            "a": plain((pairs.both + pairs.only_a) / pairs.n),
            "b": plain((pairs.both + pairs.only_b) / pairs.n),
            "difference": plain(paired_difference(pairs)),
            "only_a": pairs.only_a,
            "only_b": pairs.only_b,
            "n": pairs.n,
            "p_value": plain(mcnemar(pairs)),
            "same_text": plain(same),
        }
    return tasks


def _check_same_samples(a: Sequence[Answer], b: Sequence[Answer]) -> None:
    if [answer.problem.sample for answer in a] != [answer.problem.sample for answer in b]:
        raise ConfigError(
            f"the samples of {a[0].problem.task} at {a[0].problem.length} tokens differ",
            why="samples are cut to a length in tokens, and the two models have different tokenizers",
            fix="compare configurations of models with the same tokenizer",
        )


def _compare_texts(a: Evaluation, b: Evaluation) -> Interval | None:
    pairs = list(zip(a.windows, b.windows, strict=False))
    if not pairs or any((x.text, x.num_bytes) != (y.text, y.num_bytes) for x, y in pairs):
        return None
    bits = tuple([window.nats / 0.6931471805599453 for window in side] for side in zip(*pairs, strict=True))
    sizes = tuple([float(window.num_bytes) for window in side] for side in zip(*pairs, strict=True))
    return ratio_difference((bits[0], bits[1]), (sizes[0], sizes[1]))


def _compare_steps(a: Sequence[Answer], b: Sequence[Answer]) -> Interval | None:
    """Tokens per step behind that of the prompt, over the answers of both."""
    pairs = [(x, y) for x, y in zip(a, b, strict=False) if x.cell == y.cell and x.num_steps > 1 and y.num_steps > 1]
    if not pairs:
        return None
    left, right = zip(*pairs, strict=True)
    tokens = ([answer.num_tokens - 1.0 for answer in left], [answer.num_tokens - 1.0 for answer in right])
    steps = ([answer.num_steps - 1.0 for answer in left], [answer.num_steps - 1.0 for answer in right])
    return ratio_difference(tokens, steps)


def render_comparison(record: Mapping[str, Any]) -> RenderableType:
    """The result of :func:`compare` for a terminal."""
    title = "B - A on the same samples, with 95 % intervals"
    table = make_table(title, "task", "tokens", "A", "B", "difference", "only A, B", "p", "same text")
    for task, lengths in record["tasks"].items():
        for length, row in lengths.items():
            change = row["difference"]
            table.add_row(
                task,
                length,
                percent(row["a"]),
                percent(row["b"]),
                f"{100 * change['value']:+.1f} ({100 * change['low']:+.1f} to {100 * change['high']:+.1f})",
                f"{row['only_a']}, {row['only_b']}",
                f"{row['p_value']:.3f}",
                percent(row["same_text"]),
            )
    lines = [
        Text(f"{name.replace('_', ' ')}: {change['value']:+.4f} ({change['low']:+.4f} to {change['high']:+.4f})")
        for name, change in record.items()
        if name != "tasks" and change is not None and change["value"] is not None
    ]
    return Group(table, *lines)
