"""A picture of a benchmark record. matplotlib is optional: ``pip install 'deepinfer[plots]'``."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from deepinfer.errors import ConfigError


def require_matplotlib() -> None:
    """Raise ConfigError if there is nothing to draw with."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            "--plot is given",
            why="matplotlib, which draws it, is not installed",
            fix="install deepinfer[plots], or leave --plot out",
        )


def plot_record(record: dict[str, Any], file: Path) -> None:
    """Prefill cost by prompt length beside what it has to be, and where a decoding step's time goes."""
    from matplotlib.figure import Figure  # an optional library, imported where it is used

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    rows = record["prefill"]
    lengths = [row["prompt_tokens"] for row in rows]
    left.plot(lengths, [row["us_per_token"] for row in rows], "o-", label="measured")
    left.plot(lengths, [row["required_us_per_token"] for row in rows], "--", label="required by the index scan")
    left.plot(lengths, [row["us_per_token_outside_scan"] for row in rows], ":", label="outside the scan")
    left.set(xlabel="prompt tokens", ylabel="µs per token", title="prefill", ylim=(0, None))
    left.legend()
    names = sorted({name for row in record["decode"] for name in row["phase_shares"]})
    batches = [str(row["batch"]) for row in record["decode"]]
    bottom = [0.0] * len(batches)
    for name in names:
        shares = [100 * row["phase_shares"].get(name, 0.0) for row in record["decode"]]
        right.bar(batches, shares, bottom=bottom, label=name)
        bottom = [base + share for base, share in zip(bottom, shares, strict=True)]
    right.set(xlabel="running sequences", ylabel="% of step time", title="decode")
    right.legend()
    figure.savefig(file)
